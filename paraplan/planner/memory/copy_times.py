"""Copies to a tier and back, placed so that nobody waits where memory allows.

A stay is a tensor away before one of its readers: after the reader before (or its making) it is freed once its copy to
the tier has ended, and it is brought back in time for the next. Copies out begin as a tensor is made and go in that
order; copies back go in the order of their readers, each as late as lets all be in time. Both take memory for a while,
which is taken where it fits; where it does not, the compute stream waits and `evaluate` says how long.

Source: scheduling each way backwards from its deadlines is that of POFO (Beaumont et al. 2021) and of vDNN's prefetches
(Rhu et al. 2016).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paraplan.ir.execution.memory_actions import Act, Actions, MemAction, free, run
from paraplan.planner.memory.problem import Tier
from paraplan.planner.memory.reruns import Floats, Ints, Residency

Stay = tuple[int, int]
"""A tensor, and the key of the reader it is brought back for."""


@dataclass(frozen=True)
class PlacedStay:
    """A stay in a profile.

    Attributes:
        tensor: who is away.
        made: position it is made at (-1: given).
        before, reader: positions between which nobody reads it.
        leaves: first position it is no longer resident at.
        returns: first position it is resident at again.
    """

    tensor: int
    made: int
    before: int
    reader: int
    leaves: int
    returns: int


@dataclass(frozen=True)
class Copies:
    """Stays on a tier; as `reruns.CopiedAway`, with the positions at which nobody need wait."""

    tier: Tier
    stays: tuple[Stay, ...]

    def absent(self, profile: Residency) -> Ints:
        """[position] bytes away without anybody waiting for a copy."""
        change = np.zeros(len(profile.keys) + 1, np.int64)
        for stay in place(profile, self):
            if stay.leaves < stay.returns:
                change[stay.leaves] += profile.arrays.nbytes[stay.tensor]
                change[stay.returns] -= profile.arrays.nbytes[stay.tensor]
        return np.cumsum(change[:-1])


def place(profile: Residency, copies: Copies) -> list[PlacedStay]:
    """Stays that the keys leave room for, in order of making, where nobody waits."""
    arrays, tier = profile.arrays, copies.tier
    ends: Floats = np.cumsum(arrays.time_s[profile.ops])
    starts = ends - arrays.time_s[profile.ops]
    gaps: list[tuple[int, int, int, int]] = []
    for tensor, key in copies.stays:
        reader = int(np.searchsorted(profile.keys, key))
        if reader >= len(profile.keys) or profile.keys[reader] != key or arrays.rewritten[tensor]:
            continue
        version = profile.version_at(tensor, reader)
        before = _use_before(profile, version, reader)
        if reader - before > 1 and tensor in arrays.problem.ops[profile.ops[reader]].reads:
            gaps.append((int(profile.start[version]), tensor, before, reader))
    gaps.sort()
    first = {tensor: made for made, tensor, _, _ in reversed(gaps)}
    gaps = [gap for gap in gaps if gap[0] == first[gap[1]]]  # only what one making of a tensor is away for
    leaves: list[int] = []
    clock, done = 0.0, dict[int, float]()
    for made, tensor, before, _ in gaps:
        if tensor not in done:
            clock = max(clock, float(ends[made]) if made >= 0 else 0.0) + tier.out_s(int(arrays.nbytes[tensor]))
            done[tensor] = clock
        leaves.append(max(before + 1, int(np.searchsorted(starts, done[tensor] * (1 - 1e-12)))))
    returns = [0] * len(gaps)
    clock = np.inf
    for index in sorted(range(len(gaps)), key=lambda i: -gaps[i][3]):
        _, tensor, _, reader = gaps[index]
        clock = min(clock, float(starts[reader])) - tier.back_s(int(arrays.nbytes[tensor]))
        returns[index] = min(reader, max(0, int(np.searchsorted(starts, clock, side="right")) - 1))
    return [
        PlacedStay(tensor, made, before, reader, leave, back)
        for (made, tensor, before, reader), leave, back in zip(gaps, leaves, returns, strict=True)
    ]


def _use_before(profile: Residency, version: int, reader: int) -> int:
    length = len(profile.keys)
    at = int(np.searchsorted(profile.use_keys, version * length + reader))
    used = at > 0 and profile.use_keys[at - 1] // length == version
    return int(profile.use_keys[at - 1] % length) if used else max(int(profile.start[version]), -1)


def fit(profile: Residency, budget_bytes: int) -> list[PlacedStay] | None:
    """Stays with what memory allows of their copies' time; None where even instant copies do not fit.

    `profile`: of `Copies`.
    """
    copies = profile.away
    assert isinstance(copies, Copies)
    live = profile.live + copies.absent(profile)
    stays = place(profile, copies)
    nbytes = profile.arrays.nbytes
    for stay in stays:
        live[stay.before + 1 : stay.reader] -= nbytes[stay.tensor]
    if int(live.max(initial=0)) > budget_bytes:
        return None
    found = []
    for stay in sorted(stays, key=lambda s: s.reader):
        room = live[: stay.reader] + nbytes[stay.tensor] > budget_bytes
        least = max(min(stay.returns, stay.reader), stay.before + 1)
        full = np.flatnonzero(room[least : stay.reader])
        returns = int(full[-1]) + least + 1 if len(full) else least
        live[returns : stay.reader] += nbytes[stay.tensor]
        found.append((stay, returns))
    placed = []
    for stay, returns in sorted(found, key=lambda pair: (pair[0].leaves, pair[0].made, pair[0].tensor)):
        most = max(min(stay.leaves, returns), stay.before + 1)
        full = np.flatnonzero(live[stay.before + 1 : most] + nbytes[stay.tensor] > budget_bytes)
        leaves = int(full[0]) + stay.before + 1 if len(full) else most
        live[stay.before + 1 : leaves] += nbytes[stay.tensor]
        placed.append(PlacedStay(stay.tensor, stay.made, stay.before, stay.reader, leaves, returns))
    return [stay for stay in placed if stay.leaves < stay.returns]


def actions_of(profile: Residency, placed: list[PlacedStay]) -> Actions:
    """The schedule: frees as soon as possible, copies out as tensors are made, stays where they were placed."""
    copies = profile.away
    assert isinstance(copies, Copies)
    arrays, length, tier = profile.arrays, len(profile.keys), copies.tier.name
    before: list[list[MemAction]] = [[] for _ in range(length + 1)]
    after: list[list[MemAction]] = [[] for _ in range(length + 1)]
    for version in np.flatnonzero(profile.last < length).tolist():
        tensor, last = int(profile.tensor[version]), int(profile.last[version])
        newest = version + 1 == len(profile.tensor) or profile.tensor[version + 1] != tensor
        if not (arrays.kept[tensor] and newest):
            (after[last] if last >= 0 else before[0]).append(free(tensor))
    outs: list[list[MemAction]] = [[] for _ in range(length + 1)]
    stored: set[int] = set()
    for stay in sorted(placed, key=lambda s: (s.made, s.tensor)):
        if stay.tensor not in stored:
            stored.add(stay.tensor)
            out = MemAction(Act.OUT, stay.tensor, tier)
            outs[stay.made + 1].append(out)
    for stay in sorted(placed, key=lambda s: (s.leaves, s.made)):
        before[stay.leaves].append(free(stay.tensor))
    for stay in sorted(placed, key=lambda s: (s.returns, s.reader)):
        before[stay.returns].append(MemAction(Act.BACK, stay.tensor, tier))
    found: list[MemAction] = list(outs[0])
    for position in range(length):
        frees_first = sorted(before[position], key=lambda a: a.act is Act.BACK)
        found += [*frees_first, run(int(profile.ops[position])), *outs[position + 1], *after[position]]
    return tuple(found)
