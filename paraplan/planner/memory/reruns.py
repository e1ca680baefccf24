"""Recomputation as a set: which ops run again just before which op's first execution, and the bytes that makes.

Ops run first in the given order; stage t is what happens up to op t's first execution. A rerun is a pair (t, j), j < t:
op j is executed again within stage t. Reruns of a stage run in the given order, then op t does. What is not made again
is retained, so *every* set of pairs is a schedule that runs; the set alone decides cost and bytes. This is what the
search moves over: adding a pair lets go of something for a while, taking one away retains it instead.

A pair is the integer key t·n + j, so that sorted keys (with the first executions t·n + t among them) are the schedule.
Limits: an op runs at most once in a stage, and reruns of a stage in the given order. Source: the stages are Checkmate's
(Jain et al. 2020, section 4); that retention follows from the runs is the view of Moccasin (Bartan et al. 2023).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paraplan.planner.memory.problem import GIVEN, MemoryProblem

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Arrays:
    """A problem as flat arrays: [op], [tensor], and per op the tensors it reads and makes in rows of offsets."""

    def __init__(self, problem: MemoryProblem) -> None:
        self.problem = problem
        self.num_ops, self.num_tensors = len(problem.ops), len(problem.tensors)
        self.time_s: Floats = np.array([op.time_s for op in problem.ops], np.float64)
        self.workspace: Ints = np.array([op.workspace_bytes for op in problem.ops], np.int64)
        self.repeatable: Bools = np.array([op.repeatable for op in problem.ops], bool)
        self.nbytes: Ints = np.array([tensor.nbytes for tensor in problem.tensors], np.int64)
        self.maker: Ints = np.array([tensor.maker for tensor in problem.tensors], np.int64)
        self.rewritten = [tensor.rewritten for tensor in problem.tensors]
        self.kept: Bools = np.array([tensor.kept for tensor in problem.tensors], bool)
        self.read_start, self.read_tensor = _rows([op.reads for op in problem.ops])
        self.make_start, self.make_tensor = _rows([op.makes for op in problem.ops])
        self.reads = [op.reads for op in problem.ops]
        self.sizes = [tensor.nbytes for tensor in problem.tensors]
        self.makers = [tensor.maker for tensor in problem.tensors]
        self.repeats = [op.repeatable for op in problem.ops]
        self.given: Ints = np.flatnonzero(self.maker == GIVEN)
        self.base = problem.base_bytes

    @cached_property
    def start_bytes(self) -> int:
        """Resident before the first op."""
        return self.base + int(self.nbytes[self.given].sum())

    @cached_property
    def working(self) -> Ints:
        """[op] `MemoryProblem.working_bytes`."""
        return np.array([self.problem.working_bytes(op) for op in range(self.num_ops)], np.int64)

    def diagonal(self) -> Ints:
        """Keys of the first executions."""
        return np.arange(self.num_ops, dtype=np.int64) * (self.num_ops + 1)


def _rows(groups: list[tuple[int, ...]]) -> tuple[Ints, Ints]:
    start = np.zeros(len(groups) + 1, np.int64)
    np.cumsum([len(group) for group in groups], out=start[1:])
    return start, np.array([item for group in groups for item in group], np.int64)


def gather(start: Ints, items: Ints, chosen: Ints) -> tuple[Ints, Ints]:
    """Rows `chosen` laid end to end: (position in `chosen`, item) per entry.

    Args:
        start: [row + 1] where each row's items begin.
        items: of all rows.
        chosen: numbers of rows.
    """
    counts = start[chosen + 1] - start[chosen]
    owner = np.repeat(np.arange(len(chosen)), counts)
    inside = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, items[start[chosen][owner] + inside]


class CopiedAway(Protocol):
    """What is copied to a tier while nobody reads it."""

    def absent(self, profile: Residency) -> Ints:
        """[position] bytes not resident, of a profile worked out without it."""


@dataclass(frozen=True, eq=False)
class Residency:
    """What is resident when, for a set of reruns; a version is one making of a tensor until its last reader.

    Attributes:
        arrays: the problem.
        keys: [position], sorted: what runs.
        ops, stages: [position].
        version_keys: [version] tensor·(L + 1) + position + 1, sorted; a given tensor's position is -1.
        tensor, start, last: [version] the tensor, where it is made, and the last position it is needed at.
        use_keys: [use] version·L + position, sorted.
        live: [position] bytes while it executes, workspace included.
        away: what is copied to a tier in between; None for nothing.
    """

    arrays: Arrays
    keys: Ints
    ops: Ints
    stages: Ints
    version_keys: Ints
    tensor: Ints
    start: Ints
    last: Ints
    use_keys: Ints
    live: Ints
    away: CopiedAway | None = None

    def again(self, keys: Ints) -> Residency:
        """Other keys, with the same away."""
        return profile_of(self.arrays, keys, self.away)

    @property
    def peak(self) -> int:
        """The most bytes resident at once."""
        return max(self.arrays.start_bytes, int(self.live.max(initial=0)))

    @cached_property
    def rerun(self) -> Bools:
        """[position] whether it is no first execution."""
        return self.ops != self.stages

    @property
    def recomputed_s(self) -> float:
        """Seconds of reruns."""
        return float(self.arrays.time_s[self.ops[self.rerun]].sum())

    @cached_property
    def lists(self) -> tuple[list[int], list[int], list[int]]:
        """`keys`, `version_keys` and `last` as lists, in which single searches are quick."""
        return self.keys.tolist(), self.version_keys.tolist(), self.last.tolist()

    def version_at(self, tensor: int, position: int) -> int:
        """The version of a tensor that what runs at `position` reads."""
        return bisect_left(self.lists[1], tensor * (len(self.keys) + 1) + position + 1) - 1


def profile_of(arrays: Arrays, keys: Ints, away: CopiedAway | None = None) -> Residency:
    """Bytes over time of a set of keys (sorted, each once, first executions included), less what is away.

    Args:
        arrays: of the memory problem.
        keys: of executions.
        away: what is on tiers, and when.
    """
    n, length = arrays.num_ops, len(keys)
    ops, stages = keys % n, keys // n
    make_at, made = gather(arrays.make_start, arrays.make_tensor, ops)
    tensor = np.concatenate([arrays.given, made])
    start = np.concatenate([np.full(len(arrays.given), -1, np.int64), make_at])
    version_keys = tensor * (length + 1) + start + 1
    order = np.argsort(version_keys, kind="stable")
    version_keys, tensor, start = version_keys[order], tensor[order], start[order]
    read_at, read = gather(arrays.read_start, arrays.read_tensor, ops)
    version = np.searchsorted(version_keys, read * (length + 1) + read_at + 1) - 1
    last = start.copy()
    np.maximum.at(last, version, read_at)
    newest = np.append(tensor[1:] != tensor[:-1], True) if len(tensor) else np.zeros(0, bool)
    last[newest & arrays.kept[tensor]] = length - 1
    change = np.zeros(length + 1, np.int64)
    there = last >= 0  # a given tensor nobody reads goes before the first op
    np.add.at(change, np.maximum(start[there], 0), arrays.nbytes[tensor[there]])
    np.subtract.at(change, last[there] + 1, arrays.nbytes[tensor[there]])
    live = np.cumsum(change[:-1]) + arrays.base + arrays.workspace[ops]
    use_keys = np.sort(version * max(length, 1) + read_at)
    found = Residency(arrays, keys, ops, stages, version_keys, tensor, start, last, use_keys, live, away)
    return found if away is None else replace(found, live=live - away.absent(found))


def with_first(arrays: Arrays, reruns: Ints) -> Ints:
    """Rerun keys and the first executions, sorted, each once."""
    return np.unique(np.concatenate([arrays.diagonal(), reruns]))


def without_dead(profile: Residency) -> Residency:
    """Without reruns whose results nobody needs."""
    while True:
        needed = np.zeros(len(profile.keys), bool)
        used = (profile.last > profile.start) & (profile.start >= 0)
        # A version may also be the newest of a kept tensor made by the last thing that runs.
        newest = np.append(profile.tensor[1:] != profile.tensor[:-1], True)
        used |= newest & profile.arrays.kept[profile.tensor] & (profile.start >= 0) & _only_last(profile)
        needed[profile.start[used]] = True
        keep = needed | ~profile.rerun
        if keep.all():
            return profile
        profile = profile.again(profile.keys[keep])


def _only_last(profile: Residency) -> Bools:
    return profile.start == len(profile.keys) - 1
