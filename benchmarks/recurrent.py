"""Capture and planning of recurrent models: loops over time are one op, so neither grows with the length of a sequence.

Mamba (hidden 768, state 16) and RWKV (768), whose loop writes its steps by index, of two layers, and an LSTM of two
layers (1024 wide), batch 16, bf16, from the meta device, planned on 8 H100 (modelled); `unrolled` rows keep every step.

    python -m benchmarks.recurrent [--only mamba] [--json FILE]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.table import main
from paraplan.capture import capture
from paraplan.capture.recurrences import layers, loop_runs
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.model.scan import SCAN
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search

BATCH, WIDTH, WORDS = 16, 1024, 4096
NEVER = 1 << 30
COLUMNS = ("case", "kinds", "ops", "loops", "capture_s", "plan_s", "step_ms", "gap", "peak_gib", "chosen")


class LSTM(nn.Module):
    """A language model of two recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of labels: [batch, time]."""
        scores = self.head(self.layers(self.words(input_ids))[0])
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def mamba() -> nn.Module:
    """Two layers of Mamba 130M's sizes, by transformers' loop in Python."""
    from transformers import MambaConfig, MambaForCausalLM  # noqa: PLC0415  (optional extra)

    return MambaForCausalLM(
        MambaConfig(vocab_size=WORDS, hidden_size=768, state_size=16, num_hidden_layers=2, use_cache=False)
    )


def rwkv() -> nn.Module:
    """Two layers of RWKV 169M's sizes, by transformers' loop in Python."""
    from transformers import RwkvConfig, RwkvForCausalLM  # noqa: PLC0415  (optional extra)

    return RwkvForCausalLM(
        RwkvConfig(vocab_size=WORDS, context_length=4096, hidden_size=768, num_hidden_layers=2, use_cache=False)
    )


def planned(make: Callable[[], nn.Module], tokens: int) -> dict[str, object]:
    """Capture and plan once."""
    with torch.device("meta"):
        model = make().train()
        ids = torch.zeros(BATCH, tokens, dtype=torch.long)
    started = time.perf_counter()
    program = capture(model, {"input_ids": ids, "labels": ids}, precision="bf16")
    captured = time.perf_counter()
    job = Job(program, parse_cluster("8xH100"), OPTIMIZERS["adamw"], ModelRef(display=type(model).__name__), {})
    plan = search(job, Constraints(pp=1)).plan
    ended = time.perf_counter()
    targets = [op.target for segment in program.segments for op in program.kinds[segment.kind].graph.ops]
    assert plan.prediction is not None and plan.certificate is not None
    return {
        "kinds": len(program.kinds),
        "ops": len(targets),
        "loops": targets.count(SCAN),
        "capture_s": captured - started,
        "plan_s": ended - captured,
        "step_ms": plan.prediction.step_s * 1e3,
        "gap": plan.certificate.gap,
        "peak_gib": max(plan.prediction.peak_bytes) / 2**30,
        "chosen": "x".join(map(str, plan.stages[0].mesh.shape)),
    }


def unrolled(make: Callable[[], nn.Module], tokens: int) -> dict[str, object]:
    """The same with every step written out."""
    with mock.patch.object(layers, "MIN_STEPS", NEVER), mock.patch.object(loop_runs, "MIN_STEPS", NEVER):
        return planned(make, tokens)


MODELS: dict[str, Callable[[], nn.Module]] = {"mamba": mamba, "rwkv": rwkv, "lstm": LSTM}
CASES: dict[str, Callable[[], dict[str, object]]] = {
    f"{name} {tokens}": lambda make=make, tokens=tokens: planned(make, tokens)
    for name, make in MODELS.items()
    for tokens in (32, 512, 4096)
} | {f"{name} 32 unrolled": lambda make=make: unrolled(make, 32) for name, make in MODELS.items()}

if __name__ == "__main__":
    raise SystemExit(main("recurrent", CASES, COLUMNS))
