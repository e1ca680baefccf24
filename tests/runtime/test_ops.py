"""The ops lowering adds: fresh, contiguous, and inverse to each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paraplan.ir.errors import CodegenError
from paraplan.runtime import ops


def _fresh(result: Tensor, source: Tensor) -> bool:
    return result.is_contiguous() and result.untyped_storage().data_ptr() != source.untyped_storage().data_ptr() and (
        result.untyped_storage().nbytes() == result.numel() * result.element_size()
    )  # fmt: skip


@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("n", (1, 2, 4))
def test_stack_and_unstack(dim: int, n: int) -> None:
    x = torch.arange(4 * 8 * 4).reshape(4, 8, 4)
    stacked = ops.stack(x, n, dim)
    assert torch.equal(stacked, torch.cat(x.chunk(n, dim), 0)) and _fresh(stacked, x)
    back = ops.unstack(stacked, n, dim)
    assert torch.equal(back, x) and _fresh(back, stacked)


def test_every_op_of_lowering_returns_fresh_contiguous_storage() -> None:
    x = torch.arange(12.0).reshape(3, 4).t()
    assert not x.is_contiguous()
    for result, wanted in (
        (ops.shard(x, 0, 2, 2), x[2:]), (ops.first_only(x, 0), x), (ops.first_only(x, 1), torch.zeros(4, 3)),
        (ops.reshape_copy(x, (2, 6)), x.reshape(2, 6)), (ops.reshape_copy(x, (4, 3)), x), (ops.copy_alone(x), x),
    ):  # fmt: skip
        assert torch.equal(result, wanted) and _fresh(result, x)


def test_write_goes_into_the_destination() -> None:
    x = torch.zeros(2)
    assert ops.resolve("paraplan.write")(x, torch.ones(2)) is None
    assert x.tolist() == [1, 1]


@pytest.mark.parametrize("target", ("paraplan.nothing", "aten.no_such.default", "nowhere.mm.default"))
def test_unknown_ops_are_named(target: str) -> None:
    with pytest.raises(CodegenError, match=target):
        ops.resolve(target)


def test_unbound_collectives_refuse_to_run() -> None:
    with pytest.raises(CodegenError, match="before it was bound"):
        ops.collective(torch.ones(1), "all_reduce", "sum", 0)
