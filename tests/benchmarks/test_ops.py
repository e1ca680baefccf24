"""A part of `python -m benchmarks.ops`: torch's own samples under placements of every op, against eager in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import ops
from benchmarks.op_samples import OpSample, _Slot, samples
from paraplan.ir.errors import ConstraintError
from paraplan.rules.time_axis import program_micro, splittable
from paraplan.runtime.in_process import InProcessTrainer

torch.set_num_threads(1)

FEW = (
    *("add", "cummax", "gather", "index_add", "index_select", "logsumexp", "masked_fill", "max reduction_with_dim"),
    *("nn.functional.embedding", "sort", "split_with_sizes_copy", "triangular_solve", "tril", "var_mean", "where"),
    *("_segment_reduce lengths", "nn.functional.max_pool1d", "zeros_like", "bmm", "linalg.solve_ex", "searchsorted"),
    *("topk", "nn.functional.glu", "cross", "diff", "roll", "bfloat16", "nn.functional.smooth_l1_loss"),
)


@pytest.fixture(autouse=True)
def _few_plans(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(ops, "PLANS", (2,))


@pytest.mark.parametrize("name", FEW)
def test_an_op_is_right_under_every_placement_tried(name: str) -> None:
    row = ops.try_op(name)
    assert row["status"] == "right" and row["plans"] >= 2, row


@pytest.mark.parametrize(
    ("name", "said"), [("hash_tensor", "makes a tensor of dtype uint64"), ("linalg.lstsq", "depends on tensor data")]
)
def test_an_op_that_cannot_be_captured_is_refused_by_name(name: str, said: str) -> None:
    row = ops.try_op(name)
    assert row["status"] == "refused" and said in row["reason"], row


def one_call(op: Callable[..., object], *tensors: Tensor) -> OpSample:
    return OpSample(op, tensors, (tuple(_Slot(index) for index in range(len(tensors))), {}))


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    "sample",
    [
        one_call(lambda x: F.unfold(x, 3, padding=1), drawn(4, 2, 8, 8)),  # the gradient is part of a larger storage
        one_call(lambda x: F.fold(x, (8, 8), 3, padding=1), drawn(4, 18, 64)),
        one_call(lambda x: x.detach().sort(dim=1)[0] * x, drawn(4, 64)),  # nobody reads the indices
        one_call(lambda x: x.detach().max(dim=1)[0] * x[:, 0], drawn(4, 256)),
        one_call(lambda x: x.detach().cummin(dim=0).indices * x, drawn(4, 64)),
        one_call(
            lambda w: F.embedding_bag(torch.tensor([0, 3, 1, 5, 2, 2]), w, torch.tensor([0, 1, 4]), mode="sum"),
            drawn(6, 4),
        ),
    ],
    ids=["unfold", "fold", "sort", "max", "cummin", "bags of unequal lengths"],
)
def test_entries_and_peaks_count_what_nobody_reads(sample: OpSample) -> None:
    seen = ops.Seen()
    ops.try_sample(sample, False, 3, seen)
    row = seen.row()
    assert row["status"] == "right" and row["entries_equal"] == f"{row['plans']}/{row['plans']}", row


def test_the_net_sees_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = samples("mul", 1)[0]
    model = ops.OpModel(sample, False)
    batch, dims = model.batch()
    program = ops.captured(model, batch, dims)
    wanted = ops.eager(model, batch)
    assert wanted is not None
    _, make = next(iter(ops.plans(program, 1)))
    assert not ops.run_plan(make(), model, batch, wanted, ops.Seen())
    off, seen = {**wanted.grads, "p0": wanted.grads["p0"] * 1.001}, ops.Seen()
    assert not ops.run_plan(make(), model, batch, ops.Wanted(wanted.loss, off), seen)
    assert "torch's own gradients are not those of finite differences" in seen.refusals[0]
    grads = InProcessTrainer.grads
    monkeypatch.setattr(InProcessTrainer, "grads", lambda self: grads(self) | {"p0": grads(self)["p0"] * 1.001})
    assert "gradient of p0" in ops.run_plan(make(), model, batch, wanted, ops.Seen())
    assert "gradient of p0" in ops.run_plan(
        make(), model, batch, ops.Wanted(wanted.loss, off | {"p0": 0 * off["p0"]}), seen
    )


def test_a_parameter_with_a_slice_per_sample_refuses_microbatches() -> None:
    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = torch.nn.Parameter(drawn(4, 6))

        def forward(self, x: Tensor) -> Tensor:
            return ((x * self.shift) ** 2).sum()

    program = ops.capture(Rows(), {"x": drawn(4, 6)}, precision="fp64")
    assert splittable(program, 1) and not splittable(program, 2)
    with pytest.raises(ConstraintError, match=r"parameter 'shift' has a slice for every sample.*use 1 microbatch"):
        program_micro(program, 2)
