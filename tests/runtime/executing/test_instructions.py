"""The ops lowering adds: fresh, contiguous, and inverse to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paraplan.ir.errors import CodegenError
from paraplan.runtime.executing import instructions, targets
from paraplan.runtime.executing.torch_private import tree_leaves
from paraplan.runtime.executing.tracker import Ledger, Tracker


def _fresh(result: Tensor, source: Tensor) -> bool:
    return (
        result.is_contiguous()
        and result.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
        and (result.untyped_storage().nbytes() == result.numel() * result.element_size())
    )


@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("n", (1, 2, 4))
def test_stack_and_unstack(dim: int, n: int) -> None:
    x = torch.arange(4 * 8 * 4).reshape(4, 8, 4)
    stacked = instructions.stack(x, n, dim)
    assert torch.equal(stacked, torch.cat(x.chunk(n, dim), 0)) and _fresh(stacked, x)
    back = instructions.unstack(stacked, n, dim)
    assert torch.equal(back, x) and _fresh(back, stacked)


def test_every_op_of_lowering_returns_fresh_contiguous_storage() -> None:
    x = torch.arange(12.0).reshape(3, 4).t()
    assert not x.is_contiguous()
    for result, wanted in (
        (instructions.shard(x, 0, 2, 2), x[2:]),
        (instructions.first_only(x, 0), x),
        (instructions.first_only(x, 1), torch.zeros(4, 3)),
        (instructions.reshape_copy(x, (2, 6)), x.reshape(2, 6)),
        (instructions.reshape_copy(x, (4, 3)), x),
        (instructions.copy_alone(x), x),
    ):
        assert torch.equal(result, wanted) and _fresh(result, x)


MADE_BY = {
    "shard": lambda x: (instructions.shard(x, 0, 2, 2), instructions.shard(x, 0, 3, 3)),
    "stack": lambda x: (instructions.stack(x.t(), 2, 1), instructions.stack(x, 2, 1, 2)),
    "unstack": lambda x: (instructions.unstack(x.contiguous(), 2, 1), instructions.unstack(x.contiguous(), 2, 1, 5)),
    "first_only": lambda x: instructions.first_only(x, 1),
    "reshape_copy": lambda x: instructions.reshape_copy(x, (2, 6)),
    "write": lambda x: instructions.write(x, x + 1),
    "write_many": lambda x: instructions.write_many([x], [x + 1]),
    "cast_many": lambda x: instructions.cast_many([x, x.t()], torch.float64),
    "fill_tail": lambda x: instructions.fill_tail(x, 0, 7, 4),
    "fill_tail_": lambda x: instructions.fill_tail_(x, 0, 7, 4),
    "put_": lambda x: instructions.put_(x, x[:2] + 1, 0, 1),
    "grow_": lambda x: instructions.grow_(x, x + 1),
    "constant": lambda x: instructions.constant([1.0, 2.0], torch.float64, (2,)),
    "pack": lambda x: instructions.pack([x, x.contiguous()], 2, [0, 0]),
    "unpack": lambda x: instructions.unpack(x.reshape(-1), [(3,), (9,)]),
    "linear_rows": lambda x: instructions.linear_rows(x, x.t(), None, True, 2, 1, 0, 0),
    "linear_into_": lambda x: instructions.linear_into_(x.new_zeros(4, 4), x[:2], x.t(), None, True, 1, 2, 1, 0),
    "unpack_stacked": lambda x: instructions.unpack_stacked(x.reshape(-1), 2, [(2,), (4,)], [0, 0]),
}


@pytest.mark.parametrize("function", sorted(instructions.LAYOUT_KERNELS, key=lambda f: f.__name__))
def test_a_change_of_layout_makes_its_results_alone(function: Callable[..., object]) -> None:
    """A recording books the results of these without looking inside them."""
    x = torch.arange(12.0).reshape(3, 4).t()
    tracker, ledger = Tracker(), Ledger()
    calls: list[int] = []

    def watched(*args: Any, **kwargs: Any) -> object:
        with tracker, tracker.booking(ledger):
            for tensor in [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]:
                ledger.register(tensor)
            before = ledger.open_window()
            result = function(*args, **kwargs)
        calls.append(ledger.window_bytes - before)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and not _is_among(leaf, args)]
        assert calls[-1] == sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in made}.values())
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(instructions, function.__name__, watched)
        MADE_BY[function.__name__](x)
    assert calls


def _is_among(tensor: Tensor, args: object) -> bool:
    place = tensor.untyped_storage().data_ptr()
    return any(isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() == place for leaf in tree_leaves(args))


def test_write_goes_into_the_destination() -> None:
    x = torch.zeros(2)
    assert targets.resolve("paraplan.write")(x, torch.ones(2)) is None
    assert x.tolist() == [1, 1]


@pytest.mark.parametrize("target", ("paraplan.nothing", "aten.no_such.default", "nowhere.mm.default"))
def test_unknown_ops_are_named(target: str) -> None:
    with pytest.raises(CodegenError, match=target):
        targets.resolve(target)


def test_factories_are_told_by_their_schemas() -> None:
    for name in ("full", "hann_window", "tril_indices", "fft_rfftfreq", "scalar_tensor", "empty.memory_format"):
        assert targets.is_factory(f"aten.{name}" if "." in name else f"aten.{name}.default"), name
    assert targets.is_factory("prims.iota.default") and targets.is_factory("paraplan.constant")
    for target in ("aten.full_like.default", "aten.new_zeros.default", "aten._to_copy.default", "aten.sym_size.int"):
        assert not targets.is_factory(target), target
    assert not targets.is_factory("paraplan.linear")


def test_unbound_collectives_refuse_to_run() -> None:
    with pytest.raises(CodegenError, match="before it was bound"):
        instructions.collective(torch.ones(1), "all_reduce", "sum", 0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["rows", "transposed"])
def test_a_gradient_of_another_dtype_is_added_without_a_copy(order: tuple[int, int]) -> None:
    total, addend = torch.randn(640, 1024), torch.randn(*((640, 1024)[dim] for dim in order)).bfloat16()
    given = addend.permute(order)
    wanted = total + given.float()
    with torch.profiler.profile(profile_memory=True) as profile:
        instructions.grow_(total, given)
    assert torch.equal(total, wanted)
    made = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert made and max(made) <= 4 * instructions.GROWN < total.nbytes / 2
