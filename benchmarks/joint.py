"""Everything free: degrees, mesh, microbatches, schedule, stages a position, sharding and recomputation in one search.

Llama-3.1 in its sizes (sequence 8192, bf16, AdamW) and GPT-3 175B (sequence 2048) on clusters of their size, from
capture on the meta device to the priced plan, under a time limit. `mfu` is of the flops of the model alone. `planned`
is what the search says of its estimates and of the plans it made.

    python -m benchmarks.joint [--only 405B] [--json FILE [--resume]]      LIMIT=60 seconds (environment)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.table import Row, main
from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search

LIMIT = float(os.environ.get("LIMIT", "60"))
COLUMNS = ("case", "cpu_s", "step_s", "mfu", "peak_gib", "stages", "mesh", "microbatches", "schedule", "recomputing")


def llama(layers: int, hidden: int, inner: int, heads: int, vocabulary: int = 128256) -> torch.nn.Module:
    """A Llama-3.1 on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  (optional extra)

    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).train()


def gpt3() -> torch.nn.Module:
    """GPT-3 175B on the meta device."""
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415  (optional extra)

    config = GPT2Config(n_layer=96, n_embd=12288, n_head=96, n_positions=2048, vocab_size=51200, use_cache=False)
    with torch.device("meta"):
        return GPT2LMHeadModel(config).train()


def planned(make: Callable[[], torch.nn.Module], batch: int, sequence: int, cluster: str) -> Row:
    """Capture and plan once."""
    started = time.process_time()
    tokens = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    program = capture(make(), {"input_ids": tokens, "labels": tokens}, precision="bf16")
    job = Job(program, parse_cluster(cluster), OPTIMIZERS["adamw"], ModelRef(display=cluster), {})
    plan = search(job, Constraints(), LIMIT, certify=False).plan
    assert plan.prediction is not None
    return {
        "cpu_s": time.process_time() - started,
        "step_s": plan.prediction.step_s,
        "mfu": plan.prediction.mfu,
        "peak_gib": max(plan.prediction.peak_bytes) / 2**30,
        "stages": len(plan.stages),
        "mesh": "x".join(map(str, plan.stages[0].mesh.shape)),
        "microbatches": plan.num_microbatches,
        "schedule": plan.schedule.name,
        "recomputing": any(choice.activations for stage in plan.stages for choice in stage.choices),
        "planned": [note for note in plan.notes if "were estimated" in note],
    }


CASES = {
    "Llama 8B on 64 H100": partial(planned, partial(llama, 32, 4096, 14336, 32), 64, 8192, "8xH100:8"),
    "Llama 70B on 256 H100": partial(planned, partial(llama, 80, 8192, 28672, 64), 256, 8192, "8xH100:32"),
    "GPT-3 175B on 1024 A100": partial(planned, gpt3, 1536, 2048, "8xA100-80:128"),
    "Llama 405B on 16384 H100": partial(planned, partial(llama, 126, 16384, 53248, 128), 2048, 8192, "8xH100:2048"),
}

if __name__ == "__main__":
    raise SystemExit(main("joint", CASES, COLUMNS))
