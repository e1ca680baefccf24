"""Kernels a layer launches on CUDA, and the bytes they move: a plan's blocks beside eager PyTorch's, counted without a
device.

    python -m benchmarks.launches [--only PATTERN] [--json FILE]

Ours are counted in a dry run of the one-device plan on CUDA tensors without data, eager's on the meta device by the
same counter, in bfloat16 also beside fp8, with attention as torch's flash kernel, which SDPA takes on CUDA. A case is
the difference of two models, two layers and one, with a dropout and without; cross-entropy comes with the linear layer
before it. Both count calls that reach the device: a kernel of torch's that is several there counts once, in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.table import Row, main
from examples.models.resnet import ResNet
from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.execution.rank_program import BlockRole
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.jobs.checking.dry_run import dry_run
from paraplan.jobs.measuring.local_ops import whole_plan
from paraplan.lowering import lower
from paraplan.runtime.executing.launch_counts import LaunchCounter

Made = tuple[nn.Module, dict[str, Tensor]]
PRECISION = torch.bfloat16


class Count(NamedTuple):
    """Launches of a forward and a backward, and the bytes of both."""

    forward: int
    backward: int
    nbytes: int

    def less(self, other: Count) -> Count:
        """What this has more than another."""
        return Count(*(a - b for a, b in zip(self, other, strict=True)))


def ours(made: Made, precision: str = "bf16") -> Count:
    """A training step of the plan of one device, without its update."""
    model, batch = made
    program = capture(model, batch, precision=precision)
    plan = whole_plan(program, parse_cluster("1xH100"), OPTIMIZERS["adamw"])
    (rank,) = lower(msgspec.structs.replace(plan, hold_casts=precision == "fp8"))
    runs = dry_run(rank, "cuda")
    found = {BlockRole.FORWARD: [0, 0], BlockRole.BACKWARD: [0, 0]}
    for step in rank.steps:
        role = rank.role_of(step)
        role = BlockRole.FORWARD if role is BlockRole.HOLD_CAST else role  # casts of weights, once a step
        if role in found:
            launches = [launch for instr in runs[step.block] for launch in instr.launches]
            found[role][0] += len(launches)
            found[role][1] += sum(each.nbytes for each in launches)
    forward, backward = found.values()
    return Count(forward[0], backward[0], forward[1] + backward[1])


def eager(made: Made, precision: str = "bf16") -> Count:
    """A forward and a backward of the model in bfloat16, whatever ours is in."""
    model, batch = made
    model = model.to(PRECISION)
    forward, backward = LaunchCounter(), LaunchCounter()
    with _flash_attention():
        with forward:
            found = model(**{name: x.to(PRECISION) if x.is_floating_point() else x for name, x in batch.items()})
            loss = found if isinstance(found, Tensor) else found["loss"]
        with backward:
            loss.backward()
    return Count(len(forward.launches), len(backward.launches), forward.nbytes + backward.nbytes)


class _Flash(torch.autograd.Function):
    """Attention on the meta device by the kernels that SDPA calls on CUDA."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, p: float, causal: bool) -> Tensor:
        out, lse, *_, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, p, causal)
        ctx.save_for_backward(q, k, v, out, lse, seed, offset)
        ctx.rest = (q.shape[2], k.shape[2], p, causal)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, seed, offset = ctx.saved_tensors
        made = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grads[0], q, k, v, out, lse, None, None, *ctx.rest, seed, offset
        )
        return (*made, None, None)


@contextmanager
def _flash_attention() -> Iterator[None]:
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        assert attn_mask is None, "eager's models here have no masks"
        return _Flash.apply(query, key, value, dropout_p, is_causal)

    unpacked = patch("transformers.masking_utils.find_packed_sequence_indices", lambda *_: None)  # it reads values
    with patch.object(F, "scaled_dot_product_attention", attention), unpacked:
        yield


def _language(kind: str, layers: int, tokens: tuple[int, int]) -> Made:
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  (optional extra)

    sizes: dict[str, dict[str, Any]] = {
        "gpt2": {"n_layer": layers, "n_embd": 1600, "n_head": 25, "bos_token_id": None, "eos_token_id": None},
        "llama": {
            "num_hidden_layers": layers,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "vocab_size": 128256,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        "mixtral": {"num_hidden_layers": layers, "experts_implementation": "grouped_mm"},
    }
    config = AutoConfig.for_model(kind, **sizes[kind], use_cache=False)
    ids = torch.zeros(tokens, dtype=torch.long)
    return AutoModelForCausalLM.from_config(config).train(), {"input_ids": ids, "labels": ids}


class _Head(nn.Module):
    """Rows through a linear layer and, maybe, what is counted."""

    def __init__(self, columns: int, then: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(1024, columns, bias=False), then

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.then(self.linear(x), labels)


def _head(columns: int, then: Callable[[Tensor, Tensor], Tensor]) -> Made:
    return _Head(columns, then).train(), {"x": torch.zeros(8192, 1024), "labels": torch.zeros(8192, dtype=torch.long)}


def _resnet(blocks: int) -> Made:
    batch = {"pixels": torch.zeros(32, 3, 224, 224), "labels": torch.zeros(32, dtype=torch.long)}
    return ResNet((blocks,)).train(), batch


def _sum(x: Tensor, labels: Tensor) -> Tensor:
    return x.float().sum()


CASES: dict[str, tuple[Callable[[], Made], Callable[[], Made] | None]] = {
    "llama layer": (lambda: _language("llama", 2, (1, 8192)), lambda: _language("llama", 1, (1, 8192))),
    "mixtral layer": (lambda: _language("mixtral", 2, (1, 8192)), lambda: _language("mixtral", 1, (1, 8192))),
    "gpt2 layer, dropout": (lambda: _language("gpt2", 2, (8, 1024)), lambda: _language("gpt2", 1, (8, 1024))),
    "resnet block": (lambda: _resnet(3), lambda: _resnet(2)),
    "dropout": (lambda: _head(4096, lambda x, _: _sum(F.dropout(x, 0.1), _)), lambda: _head(4096, _sum)),
    "layer norm": (lambda: _head(4096, lambda x, _: _sum(F.layer_norm(x, (4096,)), _)), lambda: _head(4096, _sum)),
    "rms norm": (lambda: _head(4096, lambda x, _: _sum(F.rms_norm(x, (4096,)), _)), lambda: _head(4096, _sum)),
    **{
        f"linear, cross-entropy {columns}": (
            lambda columns=columns: _head(columns, lambda x, y: F.cross_entropy(x, y, reduction="sum")),  # type: ignore[misc]
            None,
        )
        for columns in (32000, 128256)
    },
}


def _row(more: Callable[[], Made], less: Callable[[], Made] | None, precision: str = "bf16") -> Row:
    counts = []
    for count in (ours, eager):
        with torch.device("meta"):
            counts.append(count(more(), precision).less(count(less(), precision) if less else Count(0, 0, 0)))
    mine, theirs = counts
    return {
        "ours_forward": mine.forward,
        "ours_backward": mine.backward,
        "eager_forward": theirs.forward,
        "eager_backward": theirs.backward,
        "ours_bytes": mine.nbytes,
        "eager_bytes": theirs.nbytes,
    }


COLUMNS = ("case", "ours_forward", "ours_backward", "eager_forward", "eager_backward", "ours_bytes", "eager_bytes")

if __name__ == "__main__":
    cases = {name: lambda pair=pair: _row(*pair) for name, pair in CASES.items()}  # type: ignore[misc]
    cases["llama layer, fp8"] = lambda: _row(*CASES["llama layer"], precision="fp8")
    raise SystemExit(main("launches", cases, columns=COLUMNS))
