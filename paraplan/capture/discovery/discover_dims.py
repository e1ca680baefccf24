"""Finding the named dims of an op by running it: which dims may be sharded together, and what that does to results.

A letter is a set of dims, at most one of each value, with the integer arguments that count them. It is legal where
running the op on the shards, one after another, gives results that concatenate along a dim, add up, or whose maximum
is the whole result, for every number of shards that divides and on every draw. Legal letters are then held against
each other in pairs. An op is linear in a set of inputs where f(x + x', rest) = f(x, rest) + f(x', rest).

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
from paraplan.capture.discovery.discover_run import Bench, int_args
from paraplan.ir.model.op_rule import ArgPath
from paraplan.rules.carried_rules import divide_args

MAX_CANDIDATES = 512
MAX_SHARDS, SMALL_SIZE = 16, 128
Members = tuple[tuple[int, int], ...]  # (value, dim)
Way = int | str  # the output dim shards concatenate along, "sum" or "max"


@dataclass(frozen=True)
class Letter:
    """A legal way to shard.

    Attributes:
        members: the dims sharded together.
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
        """ "sum", "max", or "" where every output has the letter."""
        return next((way for way in self.ways if isinstance(way, str)), "")


@dataclass(frozen=True)
class OpStructure:
    """What an op is: its letters and the sets of values it is linear in."""

    letters: tuple[Letter, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    addends: tuple[int, ...] = field(default=())


def shards_of(bench: Bench, draw: Draw, cuts: Sequence[tuple[Letter, int]]) -> list[Outputs] | None:
    """What the op gives on every shard, the first letter outermost; None where it refuses one."""
    args, kwargs = bench.sizing.args, bench.sizing.kwargs
    for letter, parts in cuts:
        if letter.args:
            numbers = int_args(args, kwargs)
            if any(numbers.get(path, 1) % parts for path in letter.args):
                return None
        args, kwargs = divide_args(args, kwargs, letter.args, parts)
    found = []
    for place in itertools.product(*(range(parts) for _, parts in cuts)):
        tensors: list[Tensor] = list(draw.tensors)
        for (letter, parts), index in zip(cuts, place, strict=True):
            for value, dim in letter.members:
                tensors[value] = tensors[value].chunk(parts, dim)[index].clone(memory_format=torch.contiguous_format)
            if index:
                for value in letter.addends:
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
    for dim in range(wanted.dim()):
        if shape[dim] * len(parts) == wanted.shape[dim] and (*shape[:dim], *shape[dim + 1 :]) == (
            *wanted.shape[:dim],
            *wanted.shape[dim + 1 :],
        ):
            if close(torch.cat(parts, dim), wanted):
                ways.add(dim)
    if shape == wanted.shape and wanted.dtype != torch.bool:
        stacked = torch.stack(parts)
        if close(stacked.sum(0).to(wanted.dtype), wanted):
            ways.add("sum")
        alike = all(torch.equal(part, parts[0]) for part in parts)  # shards that are the whole each show no maximum
        if not wanted.is_complex() and not alike and close(stacked.amax(0), wanted):
            ways.add("max")
    return ways


def try_letter(bench: Bench, letter: Letter) -> Letter | None:
    """The letter with what becomes of outputs, if it is legal on every draw and number of shards; else None."""
    size = _size(bench, letter.members)
    counts = _counts(size)
    first = bench.draws[:1]
    primes = [count for count in counts if all(count % other for other in counts if other < count)]
    if not any(_try(bench, letter, [count], first) for count in primes):
        return None
    most = next((count for count in reversed(counts) if _try(bench, letter, [count], first)), 0)
    sets = _try(bench, letter, [count for count in counts if most and most % count == 0], bench.draws)
    ways = None if sets is None else _choose(sets, bench.draws[0].whole)
    return None if ways is None else replace(letter, ways=ways, step=size // most)


def _counts(size: int) -> list[int]:
    """Numbers of shards to try: every divisor of a small size, the small divisors of a large one."""
    return [count for count in range(2, size + 1) if size % count == 0 and (count <= MAX_SHARDS or size <= SMALL_SIZE)]


def _try(bench: Bench, letter: Letter, counts: Sequence[int], draws: Sequence[Draw]) -> list[set[Way]] | None:
    kept: list[set[Way]] | None = None
    for draw in draws:
        for count in counts:
            shards = shards_of(bench, draw, ((letter, count),))
            ways = None if shards is None else _ways(shards, draw.whole)
            if ways is None:
                return None
            kept = ways if kept is None else [a & b for a, b in zip(kept, ways, strict=True)]
            if any(not way for way, out in zip(kept, draw.whole, strict=True) if out is not None):
                return None
    return kept


def _choose(sets: list[set[Way]], whole: Outputs) -> tuple[Way | None, ...] | None:
    """One way per output: a dim where there is one; all others reduced alike."""
    reduced = [ways for ways, out in zip(sets, whole, strict=True) if out is not None and not _dims(ways)]
    how = next((how for how in ("sum", "max") if all(how in ways for ways in reduced)), None)
    if reduced and how is None:
        return None
    return tuple(
        None if out is None else (min(_dims(ways)) if _dims(ways) else how)
        for ways, out in zip(sets, whole, strict=True)
    )


def _dims(ways: set[Way]) -> list[int]:
    return [way for way in ways if isinstance(way, int)]


def _size(bench: Bench, members: Members) -> int:
    value, dim = members[0]
    return bench.sizing.shapes[value][dim]


def _candidates(bench: Bench, anchor: tuple[int, int], used: set[tuple[int, int]]) -> Iterator[Members]:
    """Sets of unused dims of the anchor's size with at most one of each value: aligned dims first, then by number."""
    shapes = bench.sizing.shapes
    size = shapes[anchor[0]][anchor[1]]
    free = [
        [(value, dim) for dim in range(len(shape)) if shape[dim] == size and (value, dim) not in used]
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
    """Float values without the letter that may have to be added once: none, each, all."""
    inside = {value for value, _ in members}
    floats = [value for value, spec in enumerate(bench.probe.specs) if value not in inside and spec.is_float]
    return [(), *((value,) for value in floats), *([tuple(floats)] if len(floats) > 1 else [])]


def find_letters(bench: Bench) -> tuple[tuple[Letter, ...], tuple[int, ...]]:
    """All letters, each dim in one at most, and the addends of the contracted ones."""
    found: list[Letter] = []
    used: set[tuple[int, int]] = set()
    for value, shape in enumerate(bench.sizing.shapes):
        for dim, size in enumerate(shape):
            if size < 2 or (value, dim) in used or bench.probe.specs[value].shape[dim] < 2:
                continue
            letter = _first_legal(bench, (value, dim), used)
            if letter is not None:
                found.append(letter)
                used.update(letter.members)
    addends = tuple(sorted({value for letter in found for value in letter.addends}))
    kept = []
    for letter in found:
        if letter.contracted and addends:
            inside = {value for value, _ in letter.members}
            again = replace(letter, addends=tuple(value for value in addends if value not in inside))
            legal = try_letter(bench, again)
            if legal is None:
                continue
            letter = legal
        if all(legal_together(bench, other, letter, bench.draws[-1]) for other in kept):
            kept.append(letter)
    return tuple(kept), addends if any(letter.addends for letter in kept) else ()


def _first_legal(bench: Bench, anchor: tuple[int, int], used: set[tuple[int, int]]) -> Letter | None:
    size = bench.sizing.shapes[anchor[0]][anchor[1]]
    blank = (None,) * len(bench.probe.outs)
    for members in _candidates(bench, anchor, used):
        if bench.is_spent:
            return None
        for args in _arg_sets(bench, size):
            plain = Letter(members, args, blank)
            if all(shards_of(bench, bench.draws[0], ((plain, count),)) is None for count in _counts(size)[:3]):
                continue
            for addends in _addend_sets(bench, members):
                legal = try_letter(bench, replace(plain, addends=addends))
                if legal is not None and (not addends or legal.contracted == "sum"):
                    return legal
    return None


def counts_of(bench: Bench, letter: Letter) -> list[int]:
    """The fewest and the most shards that a letter's smallest block allows."""
    size = _size(bench, letter.members)
    counts = [count for count in _counts(size) if (size // count) % letter.step == 0]
    return sorted({*counts[:1], *counts[-1:]})


def holds(bench: Bench, letter: Letter, draws: Sequence[Draw]) -> bool:
    """Whether a letter, as it was found, gives the whole results of these draws back, in the fewest and the most
    shards that its smallest block allows."""
    counts = counts_of(bench, letter)
    sets = _try(bench, letter, counts, draws) if counts else None
    return not counts or (
        sets is not None and all(way is None or way in ways for way, ways in zip(letter.ways, sets, strict=True))
    )


def _least(size: int) -> int:
    return next(count for count in range(2, size + 1) if size % count == 0)


def legal_together(bench: Bench, one: Letter, other: Letter, draw: Draw) -> bool:
    """Whether both may be sharded at once, one inside the other."""
    counts = [_least(_size(bench, letter.members) // letter.step) for letter in (one, other)]
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


def find_linear(bench: Bench) -> tuple[tuple[int, ...], ...]:
    """The smallest sets of values the op is linear in: every output then is the sum of what the addends give."""
    probe = bench.probe
    outs = [spec for index, spec in enumerate(probe.outs) if spec is not None and index not in probe.unread]
    floats = [value for value, spec in enumerate(probe.specs) if spec.is_float]
    if not outs or not all(spec.is_float for spec in outs):
        return ()
    narrowest = min(spec.real_bytes for spec in outs)
    floats = [v for v in floats if probe.specs[v].real_bytes <= narrowest]
    found: list[tuple[int, ...]] = []
    counts = range(1, len(floats) + 1) if len(floats) <= 4 else (1, 2, len(floats))
    for count in counts:
        for group in itertools.combinations(floats, count):
            if not any(set(smaller) <= set(group) for smaller in found) and is_linear(bench, group):
                found.append(group)
    return tuple(found)


def is_linear(bench: Bench, group: tuple[int, ...]) -> bool:
    """Whether f(x + x', rest) = f(x, rest) + f(x', rest) for the values of the group, on all draws but the first.

    A result that another x leaves as it is on every draw is no evidence.
    """
    smallest = min((size for shape in bench.sizing.shapes for size in shape if size > 1), default=2)
    args, kwargs = bench.sizing.args, bench.sizing.kwargs
    unmoved = {index for index, out in enumerate(bench.draws[-1].whole) if out is not None and out.numel()}
    unmoved -= bench.probe.unread
    for draw in bench.draws[1:]:
        other = bench.fresh_draw(smallest)
        second = [other[value] if value in group else x for value, x in enumerate(draw.tensors)]
        joined = [x + other[value] if value in group else x for value, x in enumerate(draw.tensors)]
        right, whole = bench.run(second, args, kwargs), bench.run(joined, args, kwargs)
        if right is None or whole is None:
            return False
        for index, (a, b, c) in enumerate(zip(draw.whole, right, whole, strict=True)):
            if a is not None and not (b is not None and c is not None and close(a + b, c)):
                return False
            if a is not None and b is not None and not torch.equal(a, b):
                unmoved.discard(index)
    return not unmoved


def find(bench: Bench) -> OpStructure:
    """Everything about an op's dims."""
    letters, addends = find_letters(bench)
    return OpStructure(letters, find_linear(bench), addends)


def real_parts(bench: Bench, letter: Letter) -> int:
    """How many shards a letter allows at the real sizes: a divisor of each of its dims."""
    sizes = [bench.probe.specs[value].shape[dim] for value, dim in letter.members]
    outs = [
        spec.shape[way]
        for spec, way in zip(bench.probe.outs, letter.ways, strict=True)
        if spec is not None and isinstance(way, int)
    ]
    numbers = int_args(bench.probe.op.args, bench.probe.op.kwargs)
    outs += [numbers.get(path, 1) for path in letter.args]
    whole = math.gcd(*sizes)
    return math.gcd(whole // letter.step, *outs) if whole % letter.step == 0 else 1


def still_legal(bench: Bench, letter: Letter, parts: int) -> bool:
    """Whether a letter found on small shapes is legal on these, in as few shards as `parts` allows."""
    sets = _try(bench, letter, [_least(parts)], bench.draws)
    return sets is not None and all(way is None or way in ways for way, ways in zip(letter.ways, sets, strict=True))
