"""Changing layouts: every pair on small meshes moves the right data, cheaply, and never across a frozen axis."""

from __future__ import annotations

import heapq
import itertools
import math
import random

import pytest
import torch

from paraplan.ir.execution.rank_program import BlockRole
from paraplan.ir.machine.mesh import (
    Layout,
    P,
    Partial,
    Placement,
    R,
    S,
    Shard,
    is_shardable,
    layout_text,
    local_shape,
    padded_dims,
)
from paraplan.ir.machine.reshard import NoPath, reshard_path
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.emit import BlockEmitter
from tests.lowering.lockstep import assert_close, everywhere, gather, local_strides, placed, run_block, scatter

Dims = tuple[int, ...]
PMAX = Partial(op="max")
SMALL = [
    ((2,), (4,)),
    ((2,), (4, 2)),
    ((2,), (2, 4, 2)),
    ((3,), (3, 6)),
    ((2, 2), (4,)),
    ((2, 2), (4, 4)),
    ((2, 3), (6, 12)),
    ((2, 2), (1, 4)),
]
UNEVEN = [
    ((2,), (9,)),
    ((2,), (9, 11)),
    ((4,), (15, 2, 3)),
    ((2,), (1, 9, 2)),
    ((3,), (8, 9)),
    ((2, 2), (9, 4)),
    ((2, 4), (15, 11)),
]
LARGE = [((2, 2), (4, 2, 4)), ((2, 3), (6, 6, 6)), ((2, 2, 2), (8, 4))]


def layouts(mesh: Dims, shape: Dims, extra: tuple[Placement, ...] = (P,)) -> list[Layout]:
    options = (R, *extra, *(S(dim) for dim in range(len(shape))))
    return [layout for layout in itertools.product(options, repeat=len(mesh)) if is_shardable(shape, layout, mesh)]


def run(mesh: Dims, shape: Dims, source: Layout, target: Layout, order: Dims | None = None) -> None:
    torch.manual_seed(0)
    full = torch.randn(shape, dtype=torch.float64)
    emitter = BlockEmitter("move", (1, *mesh), BlockRole.FORWARD)
    strides = local_strides(local_shape(shape, source, mesh), order)
    emitter.give("x", TensorSpec("float64", shape), (R, *source), strides)
    out = emitter.get("x", (R, *target))
    block = emitter.finish((out,), ())
    pieces = scatter(full, source, mesh)
    left = run_block(block, {c: {"x": placed(pieces[c], strides)} for c in everywhere(mesh)}, mesh)
    assert_close(
        gather({c: env[out] for c, env in left.items()}, target, mesh, shape),
        full,
        f"{layout_text(source)} to {layout_text(target)}",
    )


@pytest.mark.parametrize(("mesh", "shape"), SMALL)
def test_every_pair_moves_the_right_data(mesh: Dims, shape: Dims) -> None:
    for source, target in itertools.product(layouts(mesh, shape), repeat=2):
        run(mesh, shape, source, target)


@pytest.mark.parametrize(("mesh", "shape"), UNEVEN)
def test_padding_is_added_and_dropped(mesh: Dims, shape: Dims) -> None:
    """It holds NaN at first, and zeros wherever a move has put it."""
    pairs = list(itertools.product(layouts(mesh, shape), repeat=2))
    assert any(padded_dims(shape, target, mesh) for _, target in pairs)
    for source, target in random.Random(0).sample(pairs, min(len(pairs), 300)):
        run(mesh, shape, source, target)


def test_a_move_pads_with_zeros() -> None:
    full = torch.ones(9, 4, dtype=torch.float64)
    for source in ((R,), (P,), (S(1),)):
        emitter = BlockEmitter("move", (1, 2), BlockRole.FORWARD)
        emitter.give("x", TensorSpec("float64", (9, 4)), (R, *source))
        out = emitter.get("x", (R, S(0)))
        assert (out, 0) in emitter.zeroed
        pieces = scatter(full, source, (2,))
        left = run_block(emitter.finish((out,), ()), {c: {"x": pieces[c]} for c in everywhere((2,))}, (2,))
        assert left[(1,)][out].sum(1).tolist() == pytest.approx([4.0] * 4 + [0.0])


def test_an_uneven_dim_is_sharded_by_one_axis_of_the_mesh() -> None:
    """And not at all where more than an eighth would be padding, or over microbatches."""
    assert is_shardable((9,), (S(0),), (2,)) and local_shape((9,), (S(0),), (2,)) == (5,)
    assert local_shape((50257, 768), (S(0), R), (8, 2)) == (6283, 768)
    for shape, layout, mesh in (((7,), (S(0),), (2,)), ((9,), (S(0),), (4,)), ((18,), (S(0), S(0)), (2, 2))):
        assert not is_shardable(shape, layout, mesh)
    assert is_shardable((9,), (S(0), R), (2, 2)) and not is_shardable((9,), (S(0), R), (2, 2), frozen=1)
    assert is_shardable((9,), (R, S(0)), (2, 2), frozen=1)
    with pytest.raises(NoPath):
        reshard_path((9,), (R, R), (S(0), R), (2, 2), frozen=1)


@pytest.mark.parametrize(("mesh", "shape"), LARGE)
def test_sampled_pairs_move_the_right_data(mesh: Dims, shape: Dims) -> None:
    pairs = list(itertools.product(layouts(mesh, shape), repeat=2))
    for source, target in random.Random(0).sample(pairs, min(len(pairs), 250)):
        run(mesh, shape, source, target)


def test_sources_in_other_memory_orders() -> None:
    for source, target in itertools.product(layouts((2,), (4, 2, 4)), repeat=2):
        for order in itertools.permutations(range(3)):
            run((2,), (4, 2, 4), source, target, order)


def test_partial_maxima_are_reduced_by_maximum() -> None:
    for target in layouts((2, 2), (4, 4), ()):
        for source in ((PMAX, R), (PMAX, PMAX), (PMAX, S(1)), (S(0), PMAX)):
            run((2, 2), (4, 4), source, target)
    with pytest.raises(NoPath, match="no way from layout R to Pmax"):
        reshard_path((4,), (R,), (PMAX,), (2,))


@pytest.mark.parametrize(("mesh", "shape"), SMALL + LARGE)
def test_moves_chain_and_touch_one_axis(mesh: Dims, shape: Dims) -> None:
    pairs = list(itertools.product(layouts(mesh, shape), repeat=2))
    for source, target in random.Random(1).sample(pairs, min(len(pairs), 200)):
        at = source
        for move in reshard_path(shape, source, target, mesh):
            assert move.before == at
            assert [axis for axis, (a, b) in enumerate(zip(move.before, move.after, strict=True)) if a != b] == [
                move.axis
            ]
            touched = {p.dim for p in (move.before[move.axis], move.after[move.axis]) if isinstance(p, Shard)}
            assert not touched & {p.dim for p in at[move.axis + 1 :] if isinstance(p, Shard)}, (
                "an inner axis shards the dim"
            )
            at = move.after
        assert at == target


def test_nothing_crosses_a_frozen_axis() -> None:
    """Along the microbatch axis a value is sliced or counted once: there is a way exactly if it stays or was whole."""
    mesh, shape = (2, 2), (4, 4)
    for source, target in itertools.product(layouts(mesh, shape), repeat=2):
        possible = source[0] == target[0] or source[0] == R
        try:
            path = reshard_path(shape, source, target, mesh, frozen=1)
        except NoPath:
            assert not possible, (source, target)
            continue
        assert possible, (source, target)
        assert all(move.kind in ("slice", "first_only") for move in path if move.axis == 0)


def price(shape: Dims, mesh: Dims, before: Layout, kind: str, axis: int) -> float:
    """A ring's elements per rank and the move's latency, dearer on outer axes; sizes count as powers of two."""
    n = mesh[axis]
    count = math.prod(local_shape(shape, before, mesh)) * 2 ** math.prod(shape).bit_length() / math.prod(shape)
    if kind in ("slice", "first_only"):
        return 0.02 * count / (n if kind == "slice" else 1) + 2**14
    share = (n - 1) / n
    factors = {"all_reduce": 2 * share, "reduce_scatter": share, "all_gather": n - 1.0, "all_to_all": share}
    return (factors[kind] * count + 2**16) * (1 + 0.25 * (len(mesh) - 1 - axis))


def kind_of(a: Placement, b: Placement) -> str | None:
    if a == b:
        return None
    names = {
        ("P", "R"): "all_reduce",
        ("P", "S"): "reduce_scatter",
        ("S", "R"): "all_gather",
        ("S", "S"): "all_to_all",
        ("R", "S"): "slice",
        ("R", "P"): "first_only",
    }
    return names.get((str(a)[0], str(b)[0]))


def cheapest(shape: Dims, mesh: Dims, source: Layout, target: Layout, allowed: set[Placement]) -> float:
    """Dijkstra over all layouts of the allowed placements; what is whole at first and divided is not gathered again."""
    best: dict[Layout, float] = {}
    queue: list[tuple[float, str, Layout]] = [(0.0, "", source)]
    while queue:
        cost, _, at = heapq.heappop(queue)
        if at in best:
            continue
        best[at] = cost
        for axis, then in itertools.product(range(len(mesh)), allowed):
            kind = kind_of(at[axis], then)
            touched = {p.dim for p in (at[axis], then) if isinstance(p, Shard)}
            if then == R and source[axis] == R:
                continue
            if kind is None or touched & {p.dim for p in at[axis + 1 :] if isinstance(p, Shard)}:
                continue
            after = (*at[:axis], then, *at[axis + 1 :])
            if is_shardable(shape, after, mesh):
                heapq.heappush(queue, (cost + price(shape, mesh, at, kind, axis), layout_text(after), after))
    return best[target]


@pytest.mark.parametrize("source", [(R, P), (R, S(0)), (R, S(1))])
@pytest.mark.parametrize("target", [(R, R), (R, S(0)), (R, S(1))])
def test_nothing_moves_along_an_axis_that_is_whole_at_both_ends(source: Layout, target: Layout) -> None:
    path = reshard_path((4096, 1024), source, target, (8, 4))
    assert all(move.axis == 1 for move in path) and len(path) == (source != target)


@pytest.mark.parametrize(("mesh", "shape"), [*SMALL, ((2, 4), (4096, 512)), ((4, 2), (256, 8, 512))])
def test_the_path_is_the_cheapest(mesh: Dims, shape: Dims) -> None:
    """Among paths through any layout of whole, partial and sharded dims, as the module's head says."""
    allowed: set[Placement] = {R, P, *(S(dim) for dim in range(len(shape)))}
    pairs = list(itertools.product(layouts(mesh, shape), repeat=2))
    for source, target in random.Random(2).sample(pairs, min(len(pairs), 150)):
        cost = sum(
            price(shape, mesh, move.before, move.kind, move.axis) for move in reshard_path(shape, source, target, mesh)
        )
        assert cost == pytest.approx(cheapest(shape, mesh, source, target, allowed)), (
            layout_text(source),
            layout_text(target),
        )


def test_well_known_paths() -> None:
    def kinds(*args: object) -> list[str]:
        return [f"{move.kind}@{move.axis}" for move in reshard_path(*args)]  # type: ignore[arg-type]

    assert kinds((8,), (P,), (R,), (4,)) == ["all_reduce@0"]
    assert kinds((8,), (P,), (S(0),), (4,)) == ["reduce_scatter@0"]
    assert kinds((8, 8), (S(0),), (S(1),), (4,)) == ["all_to_all@0"]
    assert kinds((8,), (S(0), S(0)), (R, R), (2, 2)) == ["all_gather@1", "all_gather@0"]
    assert kinds((8,), (R, R), (S(0), S(0)), (2, 2)) == ["slice@0", "slice@1"]
    assert kinds((8,), (R,), (P,), (2,)) == ["first_only@0"]
    assert kinds((8,), (S(0),), (S(0),), (2,)) == []
    large = (1024, 4096)
    assert kinds(large, (P, P), (R, R), (4, 8)) == ["reduce_scatter@1", "all_reduce@0", "all_gather@1"]
    assert kinds((8,), (P, P), (R, R), (4, 8)) == ["all_reduce@0", "all_reduce@1"]
