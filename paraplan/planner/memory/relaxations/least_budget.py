"""What any schedule needs: a bound from below on the least budget, and the op that sets it.

As op t executes for the first time, its working set is resident, and of what was made before it so much that all that
is still needed can be made again from it:

    need_t = working_t + min sum of bytes_v held_v          over v made before t that t neither reads nor makes
      held_v + again_j >= 1             v, which j makes, is read by an op after t, or kept
      held_u + again_i >= again_j       u, which i makes, is read by j            (j can be executed again at all)

a minimum cut, whose relaxation is integral. However often ops run, a schedule that executes ops for the first time in
the given order holds that much as t executes, so the largest need_t bounds every budget from below.
Source: the cut is the one of a memory-optimal checkpoint (Kumar et al. 2019 call its kind a vertex separator).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from paraplan.planner.memory.problem import GIVEN
from paraplan.planner.memory.relaxations.relaxation import useful
from paraplan.planner.memory.reruns import Arrays, Bools, Ints, profile_of
from paraplan.planner.solvers.milp import MilpBuilder, Status, solve


@dataclass(frozen=True)
class LeastBytes:
    """Bytes that no schedule in the given order can do without, and the op at which it needs them."""

    nbytes: int
    op: int


def least_need(arrays: Arrays, deadline: float = math.inf) -> LeastBytes:
    """The largest need of any op; of those looked at before the deadline, where there is one."""
    largest = int(arrays.working.argmax())
    best = LeastBytes(int(arrays.working[largest]), largest)
    if arrays.problem.tiers:  # what waits on a tier is not resident
        return best
    lasting = _lasting(arrays)
    direct = np.array([_direct(arrays, op, lasting) for op in range(arrays.num_ops)], np.int64)
    everything = profile_of(arrays, arrays.diagonal()).live
    for op in np.argsort(-direct, kind="stable").tolist():
        if direct[op] > best.nbytes:
            best = LeastBytes(int(direct[op]), op)
    for op in np.argsort(-direct, kind="stable").tolist():
        if time.perf_counter() > deadline:
            break
        if everything[op] > best.nbytes:
            best = max(best, LeastBytes(need_bytes(arrays, op), op), key=lambda need: need.nbytes)
    return best


def need_bytes(arrays: Arrays, op: int) -> int:
    """Bytes resident at least as an op executes for the first time."""
    builder = MilpBuilder()
    wanted = np.flatnonzero(useful(arrays, op))
    own = {*arrays.reads[op], *arrays.problem.ops[op].makes}
    unit = float(max(int(arrays.nbytes[wanted].sum()), 1))
    cost = np.array([0.0 if tensor in own else arrays.sizes[tensor] / unit for tensor in wanted.tolist()])
    held = builder.add_columns(len(wanted), upper=1.0, objective=cost) + np.arange(len(wanted))
    column = dict(zip(wanted.tolist(), held.tolist(), strict=True))
    able = [maker for maker in np.unique(arrays.maker[wanted]).tolist() if maker != GIVEN and arrays.repeats[maker]]
    first = builder.add_columns(len(able), upper=1.0)
    again = {maker: first + index for index, maker in enumerate(able)}

    def cover(tensor: int, other: int | None) -> None:
        columns = [column[tensor]] + ([again[arrays.makers[tensor]]] if arrays.makers[tensor] in again else [])
        ones = [1.0] * len(columns)
        if other is None:
            builder.add_row(columns, ones, lower=1.0)
        else:
            builder.add_row([*columns, other], [*ones, -1.0], lower=0.0)

    for tensor in np.flatnonzero(_needed_after(arrays, op)).tolist():
        cover(tensor, None)
    for maker in able:
        for tensor in arrays.reads[maker]:
            cover(tensor, again[maker])
    found = solve(builder.build(), time_limit_s=20.0)
    if found.status is not Status.OPTIMAL:
        return int(arrays.working[op])
    held_bytes = found.bound * unit
    return int(arrays.working[op]) + max(0, math.ceil(held_bytes * (1 - 1e-9) - 1e-6))  # whole bytes, but for rounding


def _needed_after(arrays: Arrays, op: int) -> Bools:
    """[tensor] made by an op's first execution and read by a later first execution, or kept."""
    found = arrays.kept.copy()
    found[arrays.read_tensor[arrays.read_start[op + 1] :]] = True
    return np.asarray(found & (arrays.maker <= op))


def _lasting(arrays: Arrays) -> Bools:
    """[tensor] that cannot be made again."""
    there = arrays.maker != GIVEN
    return np.asarray(~there | ~arrays.repeatable[np.maximum(arrays.maker, 0)])


def _direct(arrays: Arrays, op: int, lasting: Bools) -> int:
    """The part of an op's need that is its working set and what cannot be made again."""
    needed = _needed_after(arrays, op) & lasting
    own: Ints = np.array([*arrays.reads[op], *arrays.problem.ops[op].makes], np.int64)
    needed[own] = False
    return int(arrays.working[op]) + int(arrays.nbytes[needed].sum())
