"""Cutting and joining, and the memory a state that is a view of its stored copy takes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paraplan.ir.errors import InvalidPlanError, PlanMismatchError
from paraplan.ir.machine.mesh import Layout, R, S, is_shardable, local_shape, parse_layout
from paraplan.runtime.state.params import cut, join, join_over, narrow_state, own_part, owned_here, pad


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout, tuple[int, ...]]:
    mesh = tuple(draw(st.lists(st.sampled_from((1, 2, 3)), min_size=0, max_size=3)))
    dims = draw(st.integers(1, 3))
    layout = tuple(draw(st.sampled_from([R, *(S(d) for d in range(dims))])) for _ in mesh)
    shape = [draw(st.integers(1, 3)) for _ in range(dims)]
    for placement, size in zip(layout, mesh, strict=True):
        if placement != R:
            shape[placement.dim] *= size
    assert is_shardable(tuple(shape), layout, mesh)
    return tuple(shape), layout, mesh


@given(cases())
@settings(max_examples=200, deadline=None)
def test_cut_and_join_round_trip(case: tuple[tuple[int, ...], Layout, tuple[int, ...]]) -> None:
    shape, layout, mesh = case
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    shards = {c: cut(full, layout, mesh, c) for c in itertools.product(*map(range, mesh))}
    assert {tuple(s.shape) for s in shards.values()} == {local_shape(shape, layout, mesh)}
    assert torch.equal(join(shape, layout, mesh, shards.__getitem__), full)
    counted = sum(s.numel() for c, s in shards.items() if owned_here(layout, c))
    assert counted == full.numel()


@pytest.mark.parametrize(("n", "k"), [(9, 2), (11, 4), (50257, 4), (50257, 8), (45, 16), (197, 8)])
def test_uneven_shards_are_the_chunks_of_a_dtensor(n: int, k: int) -> None:
    """Ceil-sized blocks, the last one shorter, or empty (45 on 16); padded, they join to the same."""
    full, layout = torch.arange(2 * n).reshape(n, 2), (R, S(0))
    shards = {c: cut(full, layout, (2, k), c) for c in itertools.product(range(2), range(k))}
    chunks = full.chunk(k)
    assert [shards[0, c].shape[0] for c in range(k)] == [x.shape[0] for x in chunks] + [0] * (k - len(chunks))
    padded = {c: pad(x, local_shape((n, 2), layout, (2, k))) for c, x in shards.items()}
    assert all(torch.equal(own_part(x, (n, 2), layout, (2, k), c), shards[c]) for c, x in padded.items())
    assert all(x.sum() == shards[c].sum() for c, x in padded.items())
    for held in (shards, padded):
        assert torch.equal(join((n, 2), layout, (2, k), held.__getitem__), full)
    gathered = join_over((n, 2), layout, padded[0, 1], lambda x, axis: [padded[0, c] for c in range(k)])
    assert torch.equal(gathered, full)


def test_the_earlier_axis_is_outer() -> None:
    full = torch.arange(8)
    layout = (S(0), S(0))
    assert [cut(full, layout, (2, 2), c).tolist() for c in itertools.product((0, 1), (0, 1))] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]


def test_join_over_gathers_inner_axes_first() -> None:
    full, layout, mesh = torch.arange(24).reshape(4, 6), (S(1), S(0)), (2, 2)
    at = dict.fromkeys(itertools.product((0, 1), (0, 1)))
    here = {c: cut(full, layout, mesh, c) for c in at}
    for axis in (1, 0):  # one round of gathers by every rank, as the transport would do
        dim = layout[axis].dim
        here = {
            c: torch.cat([here[tuple(k if a == axis else v for a, v in enumerate(c))] for k in (0, 1)], dim) for c in at
        }
    assert all(torch.equal(x, full) for x in here.values())
    assert torch.equal(join_over((4, 6), (R, R), full, lambda x, axis: [x]), full)


def test_dims_that_need_much_padding_are_refused() -> None:
    with pytest.raises(PlanMismatchError, match="cannot lie as S0 on a mesh"):
        cut(torch.zeros(5), (S(0),), (2,), (0,))


@given(cases(), st.data())
@settings(max_examples=60, deadline=None)
def test_state_views_are_the_states_shard(
    case: tuple[tuple[int, ...], Layout, tuple[int, ...]], data: st.DataObject
) -> None:
    shape, state, mesh = case
    stored = tuple(data.draw(st.sampled_from([placement, R])) for placement in state)
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for c in itertools.product(*map(range, mesh)):
        local = cut(full, stored, mesh, c).clone()
        try:
            found = narrow_state(local, stored, state, mesh, c)
        except InvalidPlanError:
            assert any(a != b and b in stored[i + 1 :] for i, (a, b) in enumerate(zip(stored, state, strict=True)))
            continue
        assert torch.equal(found, cut(full, state, mesh, c))
        assert found.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()


def test_a_state_that_is_no_part_of_the_stored_copy_is_refused() -> None:
    with pytest.raises(InvalidPlanError, match="no part of stored"):
        narrow_state(torch.zeros(4), parse_layout("R,S0"), parse_layout("S0,S0"), (2, 2), (0, 0))
