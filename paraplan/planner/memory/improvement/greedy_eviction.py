"""Making a schedule fit: let go of what is idle at the peak and make it again before its next reader.

At the position with the most bytes, every tensor that waits there for a later reader is a candidate. Letting go of it
means executing its op again in the stage of that reader; what that op reads is retained until then where that fits,
else made again too, recursively. The candidate with the least seconds per byte of overflow it takes away is chosen, and
the profile worked out afresh. A heuristic: it may fail where a schedule exists.

Source: offline, with the future known, what DTR (Kirisame et al. 2021) decides as it runs; the recursion is its
"evicted neighbourhood".
"""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from paraplan.planner.memory.problem import GIVEN
from paraplan.planner.memory.reruns import Arrays, Floats, Ints, Residency, with_first, without_dead

_MOST_CLOSURE = 200
"""Ops in one recursive rerun."""
_TRIED = 24
"""Candidates whose reruns are worked out, of those at one peak."""


@dataclass(frozen=True)
class Eviction:
    """Letting go of a tensor: keys to add, their seconds, and the bytes it frees at the peak."""

    keys: tuple[int, ...]
    seconds: float
    relief: int


@dataclass(frozen=True, eq=False)
class EvictionPrices:
    """What choices are compared by: [op] seconds of a rerun, and [op] bytes it makes."""

    seconds: Floats
    nbytes: Floats

    @cached_property
    def costs(self) -> list[float]:
        """`seconds` as a list."""
        found: list[float] = self.seconds.tolist()
        return found

    @staticmethod
    def true(arrays: Arrays) -> EvictionPrices:
        """As they are."""
        made = np.zeros(arrays.num_ops)
        there = arrays.maker != GIVEN
        np.add.at(made, arrays.maker[there], arrays.nbytes[there])
        return EvictionPrices(arrays.time_s, np.maximum(made, 1.0))

    @staticmethod
    def drawn(arrays: Arrays, draw: np.random.Generator) -> EvictionPrices:
        """Seconds times random factors."""
        spread = draw.choice((0.1, 0.1, 0.4, 1.0))
        true = EvictionPrices.true(arrays)
        return EvictionPrices(true.seconds * np.exp(draw.normal(0.0, spread, arrays.num_ops)), true.nbytes)


def squeeze(
    profile: Residency, budget_bytes: int, deadline: float, most_s: float = np.inf, prices: EvictionPrices | None = None
) -> Residency | None:
    """The schedule with reruns added until it fits; None where that fails, takes too long or costs above `most_s`.

    Args:
        profile: the schedule, with its bytes over time.
        budget_bytes: that it has to fit.
        deadline: on `time.perf_counter()`.
        most_s: of reruns.
        prices: of evictions; left out, made anew.
    """
    prices = prices or EvictionPrices.true(profile.arrays)
    best_excess, stalled = np.inf, 0
    while profile.peak > budget_bytes:
        if profile.recomputed_s > most_s or time.perf_counter() > deadline:
            return None
        excess = _excess(profile, budget_bytes)
        stalled = 0 if excess < best_excess * (1 - 1e-9) else stalled + 1
        best_excess = min(best_excess, excess)
        if stalled > 25:
            return None
        keys = _step(profile, budget_bytes, prices)
        if keys is None:
            return None
        profile = without_dead(profile.again(with_first(profile.arrays, np.append(profile.keys, keys))))
    return profile


def _excess(profile: Residency, budget_bytes: int) -> float:
    """Bytes above the budget, the most of each stage, summed."""
    over = np.maximum(profile.live - budget_bytes, 0)
    first = np.flatnonzero(np.append(True, profile.stages[1:] != profile.stages[:-1]))
    return float(np.maximum.reduceat(over, first).sum())


def _step(profile: Residency, budget_bytes: int, prices: EvictionPrices) -> Ints | None:
    """Keys to add for the worst position; None where nothing can be let go of there."""
    over = np.maximum(profile.live - budget_bytes, 0)
    position = int(over.argmax())
    versions, gaps_from, gaps_to = idle_at(profile, position)
    if not len(versions):
        return None
    tensors = profile.tensor[versions]
    covered = np.append(0.0, np.cumsum(over))
    total = covered[gaps_to] - covered[gaps_from + 1]
    counts = np.append(0, np.cumsum(over > 0))
    value = np.minimum(total, profile.arrays.nbytes[tensors] * (counts[gaps_to] - counts[gaps_from + 1]))
    optimistic = prices.seconds[profile.arrays.maker[tensors]] / np.maximum(value, 1e-9)
    best: tuple[float, Eviction] | None = None
    for index in np.argsort(optimistic, kind="stable")[:_TRIED].tolist():
        stage = int(profile.stages[min(gaps_to[index], len(profile.keys) - 1)])
        for deep in (True, False):
            most_s = np.inf if best is None else best[0] * float(value[index])
            found = evict(profile, int(tensors[index]), stage, position, budget_bytes, deep, prices, most_s)
            if found is None or found.relief <= 0:
                continue
            score = (found.seconds + 1e-12) / (value[index] * found.relief / profile.arrays.nbytes[tensors[index]])
            if best is None or score < best[0]:
                best = score, found
    return None if best is None else np.array(best[1].keys, np.int64)


def idle_at(profile: Residency, position: int) -> tuple[Ints, Ints, Ints]:
    """Versions resident at a position, idle there, that could be made again after it: (version, idle from, idle to)."""
    arrays, length, n = profile.arrays, len(profile.keys), profile.arrays.num_ops
    versions = np.flatnonzero((profile.start < position) & (profile.last > position))
    maker = arrays.maker[profile.tensor[versions]]
    able = (maker != GIVEN) & arrays.repeatable[np.maximum(maker, 0)]
    versions, maker = versions[able], maker[able]
    at = np.searchsorted(profile.use_keys, versions * length + position)
    padded = np.append(profile.use_keys, np.iinfo(np.int64).max)
    following = np.minimum(padded[at] - versions * length, length)
    before = np.where(at > 0, padded[at - 1] - versions * length, -1)
    before = np.where(before >= 0, before, np.maximum(profile.start[versions], 0))
    stage = profile.stages[np.minimum(following, length - 1)]
    fits = (following > position) & (stage * n + maker > profile.keys[position]) & (maker < stage)
    return versions[fits], before[fits], following[fits]


def evict(
    profile: Residency,
    tensor: int,
    stage: int,
    position: int,
    budget_bytes: int,
    deep: bool,
    prices: EvictionPrices,
    most_s: float = np.inf,
) -> Eviction | None:
    """What it takes to make a tensor again in a stage instead of holding it at a position.

    None above `most_s` seconds.

    Args:
        profile: the schedule.
        tensor: in question.
        stage, position: where it is not to be held: the stage, and the op in it.
        budget_bytes: that may be held.
        deep: whether what is no longer there for that is made again too rather than retained.
        prices: of reruns.
        most_s: seconds beyond which it is not worth it.
    """
    arrays, n = profile.arrays, profile.arrays.num_ops
    present, _, lasts = profile.lists
    sizes, makers, repeats, costs = arrays.sizes, arrays.makers, arrays.repeats, prices.costs
    first = stage * n
    todo, keys, seconds, held = [makers[tensor]], set[int](), 0.0, 0
    seen: set[int] = {tensor}
    while todo:
        op = todo.pop()
        key = first + op
        at = bisect_left(present, key)
        if key in keys or (at < len(present) and present[at] == key):
            continue
        keys.add(key)
        seconds += costs[op]
        if len(keys) > _MOST_CLOSURE or seconds > most_s or arrays.working[op] > budget_bytes:
            return None
        for read in arrays.reads[op]:
            if read in seen:
                continue
            seen.add(read)
            last, maker, size = lasts[profile.version_at(read, at)], makers[read], sizes[read]
            if last >= at or first + maker in keys:
                continue
            room = last >= position and int(profile.live[last + 1 : at].max(initial=0)) + size <= budget_bytes
            if room:
                continue
            wanted = deep or (last < position and size * 4 > sizes[tensor])
            if wanted and maker != GIVEN and repeats[maker]:
                todo.append(maker)
            elif last < position:
                held += size
    return Eviction(tuple(keys), seconds, sizes[tensor] - held) if keys else None


def polish(profile: Residency, budget_bytes: int, prices: EvictionPrices | None = None) -> Residency:
    """Without reruns that fit without: each is taken away where retaining what it makes stays within the budget.

    The most seconds per byte are tried first.

    Args:
        profile: the schedule, with its bytes over time.
        budget_bytes: that it has to fit.
        prices: of evictions; left out, made anew.
    """
    prices = prices or EvictionPrices.true(profile.arrays)
    order = -prices.seconds / prices.nbytes
    while True:
        before = len(profile.keys)
        profile = without_dead(_polish_once(profile, budget_bytes, order))
        if len(profile.keys) == before:
            return profile


def _polish_once(profile: Residency, budget_bytes: int, order: Floats) -> Residency:
    arrays = profile.arrays
    live, last = profile.live.copy(), profile.last.copy()
    merged = np.arange(len(last))  # version -> the one it was merged into
    gone: list[int] = []
    reruns = np.flatnonzero(profile.rerun)
    by_start = {(int(s), int(t)): v for v, (s, t) in enumerate(zip(profile.start, profile.tensor, strict=True))}
    for position in reruns[np.argsort(order[profile.ops[reruns]], kind="stable")].tolist():
        pieces: list[tuple[int, int, int, int]] = []
        for tensor in arrays.problem.ops[profile.ops[position]].makes:
            version = by_start[position, tensor]
            previous = version - 1
            while merged[previous] != previous:
                previous = int(merged[previous])
            used = last[version] > position
            since = int(last[previous]) + 1 if used else position
            pieces.append((version, previous, since, int(arrays.nbytes[tensor])))
        if not _fits(live, position, pieces, budget_bytes):
            continue
        for version, previous, since, size in pieces:
            live[since:position] += size
            last[previous], merged[version] = max(last[previous], last[version] if since < position else 0), previous
        gone.append(position)
    return _without(profile, gone, budget_bytes)


def _without(profile: Residency, gone: list[int], budget_bytes: int) -> Residency:
    """Without some positions; without as many as fit where copies, whose times then change, no longer do."""
    found = profile.again(np.delete(profile.keys, gone))
    if profile.away is None or found.peak <= budget_bytes:
        return found
    return _without(profile, gone[: len(gone) // 2], budget_bytes) if gone else profile


def _fits(live: Ints, position: int, pieces: list[tuple[int, int, int, int]], budget_bytes: int) -> bool:
    if len(pieces) == 1:
        _, _, since, size = pieces[0]
        return int(live[since:position].max(initial=0)) + size <= budget_bytes
    if not pieces:
        return True
    first = min(since for _, _, since, _ in pieces)
    stretch = live[first:position].copy()
    for _, _, since, size in pieces:
        stretch[since - first :] += size
    return int(stretch.max(initial=0)) <= budget_bytes
