"""Copies in the relaxation at critical instants: what each stream can carry in the time there is.

Columns, in units of every op once where seconds are meant (E_k: when op t_k begins):

    stored[k, v]  whether v is on a tier by instant k
    back[k, v]    whether v, not resident at instant k, is brought back in segment k     (binary; small ones continuous)
    wait[k]       seconds compute stands still in segment k; its cost

    E_k = sum of first executions before t_k + sum over segments before k of (reruns + wait)
    subject to
      back[k, v] <= stored[k, v] <= stored[k + 1, v],   sum_v bytes_v stored[last, v] <= capacity
      sum over v made by t_j or later of out_s(v) stored[k, v] <= E_k - (E_j + time of t_j)      each j < k, and from 0
      sum over segments from k on of back_s(v) back[k', v] <= end - (E_k + time of t_k)          each k

A copy out has ended before its tensor is first missing, a copy back begins after an instant at which it was missing and
has ended before a reader: so every schedule satisfies these. Several tiers count as one of all their rates, without
latency.
"""

from __future__ import annotations

import numpy as np

from paraplan.planner.memory.problem import Tier
from paraplan.planner.memory.reruns import Arrays, Floats, Ints
from paraplan.planner.solvers.milp import MilpBuilder

_SMALL = 1e-3
"""Of the budget: tensors below are brought back in parts, for all the relaxation says."""


def add_copies(
    builder: MilpBuilder,
    arrays: Arrays,
    instants: tuple[int, ...],
    again: Ints,
    resident: Ints,
    tiers: tuple[Tier, ...],
    budget_bytes: int,
) -> Ints:
    """Adds columns and rows; returns the columns of `back`, [instant, tensor].

    Args:
        builder: of the program.
        arrays: of the memory problem.
        instants: ascending.
        again, resident: [instant, op] and [instant, tensor] columns; -1 for none.
        tiers: where tensors may be copied to.
        budget_bytes: on the device.
    """
    out_s, back_s = _seconds(arrays, tiers)
    unit = float(arrays.time_s.sum()) or 1.0
    stored, back = np.full_like(resident, -1), np.full_like(resident, -1)
    for k, instant in enumerate(instants):
        forced = [*arrays.problem.ops[instant].reads, *arrays.problem.ops[instant].makes]
        able = (resident[k] >= 0) & (arrays.maker < instant) & (arrays.nbytes > 0)
        able[forced] = False
        earlier = stored[k - 1] >= 0 if k else np.zeros_like(able)
        at = np.flatnonzero(able | earlier)
        stored[k, at] = builder.add_columns(len(at), upper=1.0) + np.arange(len(at))
        at = np.flatnonzero(able)
        whole = arrays.nbytes[at] >= _SMALL * budget_bytes
        back[k, at] = builder.add_columns(len(at), upper=1.0, integer=whole) + np.arange(len(at))
        _ordered(builder, back[k], stored[k])
        if k:
            _ordered(builder, stored[k - 1], stored[k])
    waits = builder.add_columns(len(instants) + 1, objective=1.0)
    last = np.flatnonzero(stored[-1] >= 0)
    capacity = float(sum(tier.capacity_bytes for tier in tiers))
    builder.add_row(stored[-1, last], arrays.nbytes[last] / max(capacity, 1.0), upper=1.0 if capacity >= 1 else 0.0)
    clock = _Clock(builder, arrays, instants, again, waits, unit)
    for k in range(len(instants)):
        for j in range(-1, k):
            late = arrays.maker >= (instants[j] if j >= 0 else -1)
            at = np.flatnonzero((stored[k] >= 0) & late)
            clock.holds(stored[k, at], out_s[at] / unit, j, k)
        runs, seconds = [], []
        for segment in range(k, len(instants)):
            at = np.flatnonzero(back[segment] >= 0)
            runs.append(back[segment, at])
            seconds.append(back_s[at] / unit)
        clock.holds(np.concatenate(runs), np.concatenate(seconds), k, len(instants))
    return back


def _seconds(arrays: Arrays, tiers: tuple[Tier, ...]) -> tuple[Floats, Floats]:
    """[tensor] of a copy out and back: of the one tier, or of all together."""
    latency = tiers[0].latency_s if len(tiers) == 1 else 0.0
    out = latency + arrays.nbytes / sum(tier.out_bytes_per_s for tier in tiers)
    back = latency + arrays.nbytes / sum(tier.back_bytes_per_s for tier in tiers)
    return np.asarray(out), np.asarray(back)


def _ordered(builder: MilpBuilder, less: Ints, more: Ints) -> None:
    """less <= more, where both are columns."""
    at = np.flatnonzero((less >= 0) & (more >= 0))
    row = np.arange(len(at))
    if len(at):
        builder.add_rows(
            len(at),
            np.concatenate([row, row]),
            np.concatenate([more[at], less[at]]),
            np.repeat([1.0, -1.0], len(at)),
            lower=0.0,
        )


class _Clock:
    """Rows that compare work on a stream with the time between two instants."""

    def __init__(
        self, builder: MilpBuilder, arrays: Arrays, instants: tuple[int, ...], again: Ints, waits: int, unit: float
    ) -> None:
        self.builder, self.again, self.waits = builder, again, waits
        self.time_s: Floats = arrays.time_s / unit
        self.before: Floats = np.append(0.0, np.cumsum(self.time_s))
        self.instants = instants

    def holds(self, columns: Ints, seconds: Floats, since: int, until: int) -> None:
        """The work is at most the time from the end of op `since` (-1: the start) to op `until` (or the end)."""
        begin = self.before[self.instants[since] + 1] if since >= 0 else 0.0
        end = self.before[self.instants[until]] if until < len(self.instants) else self.before[-1]
        segments = range(max(since, 0), until)
        runs = [self.again[segment][self.again[segment] >= 0] for segment in segments]
        times = [-self.time_s[self.again[segment] >= 0] for segment in segments]
        waits = np.arange(self.waits + since + 1, self.waits + until + 1)
        self.builder.add_row(
            np.concatenate([columns, *runs, waits]),
            np.concatenate([seconds, *times, np.full(len(waits), -1.0)]),
            upper=float(end - begin),
        )
