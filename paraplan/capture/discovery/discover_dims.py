"""Finding the named dims of an op by running it: which dims may be sharded together, and what that does to results.

A named dim of an op is a set of its values' dims, at most one of each value, with the integer arguments that count
them. It may be sharded where running the op on the shards, one after another, gives results that concatenate along a
dim, add up, or whose maximum is the whole result, for every number of shards that divides and on every draw. Those that
may are then held against each other in pairs. Below, a `dim` is a named one; a dim of one value goes by its `position`
in the value's shape.

Source: the idea of sharding rules found by execution is EasyDist's (`metashard`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from paraplan.capture.discovery.discover_draws import Draw, Outputs, close
from paraplan.capture.discovery.discover_linear import find_linear
from paraplan.capture.discovery.discover_run import Bench, int_args
from paraplan.ir.model.op_rule import ArgPath
from paraplan.rules.carried_rules import divide_args

MAX_CANDIDATES = 512
MAX_SHARDS, SMALL_SIZE = 16, 128
Members = tuple[tuple[int, int], ...]  # (value, position of the dim in its shape)
Way = int | str  # the position of the output's dim that shards concatenate along, "sum" or "max"


@dataclass(frozen=True)
class ShardableDim:
    """A dim of an op, and what sharding it does.

    Attributes:
        members: the values' dims sharded together, each by its position.
        args: integer arguments divided with them.
        ways: per output what becomes of it; None for an absent one.
        addends: values that only the first shard may hold (zeros elsewhere).
        step: the smallest block a shard may hold along the dims.
    """

    members: Members
    args: tuple[ArgPath, ...]
    ways: tuple[Way | None, ...]
    addends: tuple[int, ...] = ()
    step: int = 1

    @property
    def contracted(self) -> str:
        """ "sum", "max", or "" where every output has the dim."""
        return next((way for way in self.ways if isinstance(way, str)), "")


@dataclass(frozen=True)
class OpStructure:
    """What an op is: the dims that may be sharded and the sets of values it is linear in."""

    dims: tuple[ShardableDim, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    addends: tuple[int, ...] = field(default=())


def shards_of(bench: Bench, draw: Draw, cuts: Sequence[tuple[ShardableDim, int]]) -> list[Outputs] | None:
    """What the op gives on every shard, the first dim outermost; None where it refuses one.

    Args:
        bench: the op, with its shapes and arguments.
        draw: the values that are cut.
        cuts: (dim, number of shards, which must divide it).
    """
    args, kwargs = bench.sizing.args, bench.sizing.kwargs
    for dim, parts in cuts:
        if dim.args:
            numbers = int_args(args, kwargs)
            if any(numbers.get(path, 1) % parts for path in dim.args):
                return None
        args, kwargs = divide_args(args, kwargs, dim.args, parts)
    found = []
    for place in itertools.product(*(range(parts) for _, parts in cuts)):
        tensors: list[Tensor] = list(draw.tensors)
        for (dim, parts), index in zip(cuts, place, strict=True):
            for value, position in dim.members:
                shard = tensors[value].chunk(parts, position)[index]
                tensors[value] = shard.clone(memory_format=torch.contiguous_format)
            if index:
                for value in dim.addends:
                    tensors[value] = torch.zeros_like(tensors[value])
        outs = bench.run(tensors, args, kwargs)
        if outs is None:
            return None
        found.append(outs)
    return found


def _ways(shards: list[Outputs], whole: Outputs) -> list[set[Way]] | None:
    """Per output, everything that makes the whole of its shards; None where nothing does for one of them."""
    found: list[set[Way]] = []
    for index, wanted in enumerate(whole):
        ways: set[Way] = set()
        if wanted is not None:
            parts = [outs[index] for outs in shards]
            if any(part is None or part.dim() != wanted.dim() for part in parts):
                return None
            ways = _ways_of([part for part in parts if part is not None], wanted)
            if not ways:
                return None
        found.append(ways)
    return found


def _ways_of(parts: list[Tensor], wanted: Tensor) -> set[Way]:
    shapes = {part.shape for part in parts}
    if len(shapes) != 1:
        return set()
    (shape,) = shapes
    ways: set[Way] = set()
    for position in range(wanted.dim()):
        if shape[position] * len(parts) == wanted.shape[position] and (*shape[:position], *shape[position + 1 :]) == (
            *wanted.shape[:position],
            *wanted.shape[position + 1 :],
        ):
            if close(torch.cat(parts, position), wanted):
                ways.add(position)
    if shape == wanted.shape and wanted.dtype != torch.bool:
        stacked = torch.stack(parts)
        if close(stacked.sum(0).to(wanted.dtype), wanted):
            ways.add("sum")
        alike = all(torch.equal(part, parts[0]) for part in parts)  # shards that are the whole each show no maximum
        if not wanted.is_complex() and not alike and close(stacked.amax(0), wanted):
            ways.add("max")
    return ways


def try_dim(bench: Bench, dim: ShardableDim) -> ShardableDim | None:
    """The dim with what becomes of outputs, if it is legal on every draw and number of shards; else None."""
    size = _size(bench, dim.members)
    counts = _counts(size)
    first = bench.draws[:1]
    primes = [count for count in counts if all(count % other for other in counts if other < count)]
    if not any(_try(bench, dim, [count], first) for count in primes):
        return None
    most = next((count for count in reversed(counts) if _try(bench, dim, [count], first)), 0)
    sets = _try(bench, dim, [count for count in counts if most and most % count == 0], bench.draws)
    ways = None if sets is None else _choose(sets, bench.draws[0].whole)
    return None if ways is None else replace(dim, ways=ways, step=size // most)


def _counts(size: int) -> list[int]:
    """Numbers of shards to try: every divisor of a small size, the small divisors of a large one."""
    return [count for count in range(2, size + 1) if size % count == 0 and (count <= MAX_SHARDS or size <= SMALL_SIZE)]


def _try(bench: Bench, dim: ShardableDim, counts: Sequence[int], draws: Sequence[Draw]) -> list[set[Way]] | None:
    kept: list[set[Way]] | None = None
    for draw in draws:
        for count in counts:
            shards = shards_of(bench, draw, ((dim, count),))
            ways = None if shards is None else _ways(shards, draw.whole)
            if ways is None:
                return None
            kept = ways if kept is None else [a & b for a, b in zip(kept, ways, strict=True)]
            if any(not way for way, out in zip(kept, draw.whole, strict=True) if out is not None):
                return None
    return kept


def _choose(sets: list[set[Way]], whole: Outputs) -> tuple[Way | None, ...] | None:
    """One way per output: a position where there is one; all others reduced alike."""
    reduced = [ways for ways, out in zip(sets, whole, strict=True) if out is not None and not _positions(ways)]
    how = next((how for how in ("sum", "max") if all(how in ways for ways in reduced)), None)
    if reduced and how is None:
        return None
    return tuple(
        None if out is None else (min(_positions(ways)) if _positions(ways) else how)
        for ways, out in zip(sets, whole, strict=True)
    )


def _positions(ways: set[Way]) -> list[int]:
    return [way for way in ways if isinstance(way, int)]


def _size(bench: Bench, members: Members) -> int:
    value, position = members[0]
    return bench.sizing.shapes[value][position]


def _candidates(bench: Bench, anchor: tuple[int, int], used: set[tuple[int, int]]) -> Iterator[Members]:
    """Sets of unused dims of the anchor's size with at most one of each value: aligned dims first, then by number."""
    shapes = bench.sizing.shapes
    size = shapes[anchor[0]][anchor[1]]
    free = [
        [
            (value, position)
            for position in range(len(shape))
            if shape[position] == size and (value, position) not in used
        ]
        for value, shape in enumerate(shapes)
        if value != anchor[0]
    ]
    aligned = [next((m for m in members if m[1] == anchor[1]), members[0] if members else None) for members in free]
    first = tuple(sorted((anchor, *(m for m in aligned if m is not None))))
    yield first
    others = [members for members in free if members]
    tried = 0
    for count in range(len(others) + 1):
        for group in itertools.combinations(others, count):
            for chosen in itertools.product(*group):
                members = tuple(sorted((anchor, *chosen)))
                if members != first:
                    tried += 1
                    if tried > MAX_CANDIDATES:
                        return
                    yield members


def _arg_sets(bench: Bench, size: int) -> list[tuple[ArgPath, ...]]:
    """Integer arguments that may count a dim of this size: none, all that equal it, one that is a multiple of it or
    divides it (groups of it)."""
    numbers = int_args(bench.sizing.args, bench.sizing.kwargs)
    equal = tuple(path for path, value in numbers.items() if value == size)
    found: list[tuple[ArgPath, ...]] = [()]
    if equal:
        found.append(equal)
    related = [(path,) for path, value in numbers.items() if value % size == 0 or size % value == 0]
    found += [paths for paths in related if paths not in found]
    return found


def _addend_sets(bench: Bench, members: Members) -> list[tuple[int, ...]]:
    """Float values without the dim that may have to be added once: none, each, all."""
    inside = {value for value, _ in members}
    floats = [value for value, spec in enumerate(bench.probe.specs) if value not in inside and spec.is_float]
    return [(), *((value,) for value in floats), *([tuple(floats)] if len(floats) > 1 else [])]


def find_dims(bench: Bench) -> tuple[tuple[ShardableDim, ...], tuple[int, ...]]:
    """All dims that may be sharded, each dim of a value in one at most, and the addends of the contracted ones."""
    found: list[ShardableDim] = []
    used: set[tuple[int, int]] = set()
    for value, shape in enumerate(bench.sizing.shapes):
        for position, size in enumerate(shape):
            if size < 2 or (value, position) in used or bench.probe.specs[value].shape[position] < 2:
                continue
            dim = _first_legal(bench, (value, position), used)
            if dim is not None:
                found.append(dim)
                used.update(dim.members)
    addends = tuple(sorted({value for dim in found for value in dim.addends}))
    kept = []
    for dim in found:
        if dim.contracted and addends:
            inside = {value for value, _ in dim.members}
            again = replace(dim, addends=tuple(value for value in addends if value not in inside))
            legal = try_dim(bench, again)
            if legal is None:
                continue
            dim = legal
        if all(legal_together(bench, other, dim, bench.draws[-1]) for other in kept):
            kept.append(dim)
    return tuple(kept), addends if any(dim.addends for dim in kept) else ()


def _first_legal(bench: Bench, anchor: tuple[int, int], used: set[tuple[int, int]]) -> ShardableDim | None:
    size = bench.sizing.shapes[anchor[0]][anchor[1]]
    blank = (None,) * len(bench.probe.outs)
    for members in _candidates(bench, anchor, used):
        if bench.is_spent:
            return None
        for args in _arg_sets(bench, size):
            plain = ShardableDim(members, args, blank)
            if all(shards_of(bench, bench.draws[0], ((plain, count),)) is None for count in _counts(size)[:3]):
                continue
            for addends in _addend_sets(bench, members):
                legal = try_dim(bench, replace(plain, addends=addends))
                if legal is not None and (not addends or legal.contracted == "sum"):
                    return legal
    return None


def counts_of(bench: Bench, dim: ShardableDim) -> list[int]:
    """The fewest and the most shards that a dim's smallest block allows."""
    size = _size(bench, dim.members)
    counts = [count for count in _counts(size) if (size // count) % dim.step == 0]
    return sorted({*counts[:1], *counts[-1:]})


def holds(bench: Bench, dim: ShardableDim, draws: Sequence[Draw]) -> bool:
    """Whether a dim, as it was found, gives the whole results of these draws back, in the fewest and the most
    shards that its smallest block allows.

    Args:
        bench: the op, with its shapes and arguments.
        dim: with its `ways`, as `try_dim` gives it.
        draws: values of the bench's shapes.
    """
    counts = counts_of(bench, dim)
    sets = _try(bench, dim, counts, draws) if counts else None
    return not counts or (
        sets is not None and all(way is None or way in ways for way, ways in zip(dim.ways, sets, strict=True))
    )


def _least(size: int) -> int:
    return next(count for count in range(2, size + 1) if size % count == 0)


def legal_together(bench: Bench, one: ShardableDim, other: ShardableDim, draw: Draw) -> bool:
    """Whether both may be sharded at once, one inside the other.

    Args:
        bench: the op, with its shapes and arguments.
        one, other: dims that may be sharded alone; `one` is the outer.
        draw: values of the bench's shapes.
    """
    counts = [_least(_size(bench, dim.members) // dim.step) for dim in (one, other)]
    shards = shards_of(bench, draw, ((one, counts[0]), (other, counts[1])))
    if shards is None:
        return False
    rows = [shards[i : i + counts[1]] for i in range(0, len(shards), counts[1])]
    whole = joined([joined(row, other.ways) for row in rows], one.ways)
    return all(b is None or (a is not None and close(a, b)) for a, b in zip(whole, draw.whole, strict=True))


def joined(parts: Sequence[Outputs], ways: Sequence[Way | None]) -> Outputs:
    found: list[Tensor | None] = []
    for index, way in enumerate(ways):
        pieces = [outs[index] for outs in parts]
        if way is None or any(piece is None for piece in pieces):
            found.append(None)
            continue
        tensors = [piece for piece in pieces if piece is not None]
        if isinstance(way, int):
            found.append(torch.cat(tensors, way))
        else:
            stacked = torch.stack(tensors)
            found.append(stacked.sum(0).to(tensors[0].dtype) if way == "sum" else stacked.amax(0))
    return tuple(found)


def find(bench: Bench) -> OpStructure:
    """Everything about an op's dims."""
    dims, addends = find_dims(bench)
    return OpStructure(dims, find_linear(bench), addends)


def real_parts(bench: Bench, dim: ShardableDim) -> int:
    """How many shards a dim allows at the real sizes: a divisor of the size of each of its members."""
    sizes = [bench.probe.specs[value].shape[position] for value, position in dim.members]
    outs = [
        spec.shape[way]
        for spec, way in zip(bench.probe.outs, dim.ways, strict=True)
        if spec is not None and isinstance(way, int)
    ]
    numbers = int_args(bench.probe.op.args, bench.probe.op.kwargs)
    outs += [numbers.get(path, 1) for path in dim.args]
    whole = math.gcd(*sizes)
    return math.gcd(whole // dim.step, *outs) if whole % dim.step == 0 else 1


def still_legal(bench: Bench, dim: ShardableDim, parts: int) -> bool:
    """Whether a dim found on small shapes is legal on these, in as few shards as `parts` allows.

    Args:
        bench: the op at other shapes.
        dim: as it was found.
        parts: the number of shards at the real sizes must divide this (`real_parts`).
    """
    sets = _try(bench, dim, [_least(parts)], bench.draws)
    return sets is not None and all(way is None or way in ways for way, ways in zip(dim.ways, sets, strict=True))
