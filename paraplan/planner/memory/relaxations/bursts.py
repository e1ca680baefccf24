"""Bytes between the instants of the relaxation: at every op, and inside bursts of reruns.

Between instants k and k + 1, what an op reads that was made before and not again in between stayed all the while, and
so did what is resident at k + 1. Columns and rows, for a tensor v and an op j that runs in segment k:

    stays[k, v]  >=  resident[k + 1, v] - again[k, maker v]           (1 for resident after the last instant, of kept v)

    working_j  +  sum of bytes_v (1 - again[k, maker v])     over v made before j, first read after it in the segment
               +  sum of bytes_v stays[k, v]                 over other v made before j
                                                             <=  budget     j runs in segment k for the first time
    working_j  +  sum of bytes_v stays[k, v]                 over v made by instant k
                                                             <=  budget     where again[k, j]

both over v that j neither reads nor makes. The first rows are those of ops that need a good share of the room, over v
made by instant k; or of every op and over every v (`every`): memory is then looked at everywhere, with fewer columns
than instants take, but programs take longer. Every schedule satisfies this. Tensors that are small have no terms, and
where everything fits there is no row.
Source: ours; Checkmate's memory accounting (Jain et al. 2020, 4.4) at instants not looked at.
"""

from __future__ import annotations

import numpy as np

from paraplan.planner.memory.problem import GIVEN
from paraplan.planner.memory.reruns import Arrays, Bools, Ints
from paraplan.planner.solvers.milp import MilpBuilder

_LARGE, _SMALL = 0.3, 0.005
"""Ops that work on less of the room than the first have rows where all do; smaller tensors of the budget no terms."""
_UNIT = 2.0**-26

Terms = list[tuple[int, int]]
"""(column, bytes)"""


def repeats_inside(arrays: Arrays, instant: int, following: int, budget_bytes: int) -> Ints:
    """Ops first run between two instants that make something large: they may run again before the second.

    Args:
        arrays: of the memory problem.
        instant, following: the two.
        budget_bytes: on the device.
    """
    ops = np.unique(arrays.maker[(arrays.maker > instant) & (arrays.maker < following) & _large(arrays, budget_bytes)])
    return np.asarray(ops[arrays.repeatable[ops] & (arrays.working[ops] <= budget_bytes)])


def add_bursts(
    builder: MilpBuilder,
    arrays: Arrays,
    instants: tuple[int, ...],
    resident: Ints,
    again: Ints,
    budget_bytes: int,
    every: bool,
) -> Ints:
    """Adds the rows; [instant, tensor] the columns `stays`, -1 where there is none of its own.

    Args:
        builder: of the program.
        arrays: of the memory problem.
        instants: ascending.
        resident, again: [instant, tensor] and [instant, op] columns; -1 for none.
        budget_bytes: on the device.
        every: at every op, not only at those that need much.
    """
    stays = np.full(resident.shape, -1, np.int64)
    large = arrays.working - arrays.base >= _LARGE * (budget_bytes - arrays.base)
    for k, instant in enumerate(instants):
        segment = _Segment(builder, arrays, instants, k, resident, again, budget_bytes, every)
        segment.add_stays(stays[k])
        for op in range(instant + 1, segment.following):
            if every or large[op]:
                segment.add_first(op)
        for op in np.flatnonzero(large[: instant + 1] & (again[k, : instant + 1] >= 0)).tolist():
            segment.add_rerun(op)
    return stays


def _large(arrays: Arrays, budget_bytes: int) -> Bools:
    return np.asarray(arrays.nbytes > _SMALL * budget_bytes)


class _Segment:
    """From one instant to the next."""

    def __init__(
        self,
        builder: MilpBuilder,
        arrays: Arrays,
        instants: tuple[int, ...],
        k: int,
        resident: Ints,
        again: Ints,
        budget_bytes: int,
        every: bool,
    ) -> None:
        self.builder, self.arrays, self.budget = builder, arrays, budget_bytes
        self.instant, self.last = instants[k], k + 1 == len(instants)
        self.following = arrays.num_ops if self.last else instants[k + 1]
        self.again, self.after = again[k], None if self.last else resident[k + 1]
        self.columns: dict[int, int] = {}
        self.read: dict[int, int] = {}
        large = _large(arrays, budget_bytes) & (arrays.maker < (self.following if every else self.instant + 1))
        for op in range(self.instant + 1, min(self.following + 1, arrays.num_ops)):
            self.read.update((tensor, op) for tensor in arrays.reads[op] if large[tensor])
        there = arrays.kept if self.after is None else self.after >= 0
        self.staying: list[int] = np.flatnonzero(there & large).tolist()

    def rerun(self, tensor: int) -> int:
        """The column of its maker's rerun; -1 where there is none."""
        maker = self.arrays.makers[tensor]
        return int(self.again[maker]) if maker != GIVEN else -1

    def add_stays(self, stays: Ints) -> None:
        """Adds the columns of what is resident at the next instant."""
        for tensor in self.staying:
            rerun = self.rerun(tensor)
            after = [] if self.after is None else [(int(self.after[tensor]), -1.0)]
            if rerun < 0 and after:
                self.columns[tensor] = after[0][0]
                continue
            stays[tensor] = self.columns[tensor] = self.builder.add_columns(1, upper=1.0, integer=True)
            terms = [(self.columns[tensor], 1.0), *after, *([(rerun, 1.0)] if rerun >= 0 else [])]
            self.builder.add_row([c for c, _ in terms], [x for _, x in terms], lower=1.0 if self.after is None else 0.0)

    def add_first(self, op: int) -> None:
        """At an op's first execution."""
        arrays = self.arrays
        own = {*arrays.reads[op], *arrays.problem.ops[op].makes}
        room, held, made_again = self.budget - int(arrays.working[op]), [], []
        for tensor, until in self.read.items():
            if until > op and arrays.makers[tensor] < op and tensor not in own:
                rerun = self.rerun(tensor)
                if rerun < 0:
                    room -= arrays.sizes[tensor]
                else:
                    made_again.append((rerun, arrays.sizes[tensor]))
        for tensor, column in self.columns.items():
            if arrays.makers[tensor] < op and tensor not in own and self.read.get(tensor, -1) <= op:
                held.append((column, arrays.sizes[tensor]))
        self._add_row(held, made_again, room, None)

    def add_rerun(self, op: int) -> None:
        """Where an op is executed again."""
        own = {*self.arrays.reads[op], *self.arrays.problem.ops[op].makes}
        held = [
            (column, self.arrays.sizes[tensor])
            for tensor, column in self.columns.items()
            if self.arrays.makers[tensor] <= self.instant and tensor not in own
        ]
        self._add_row(held, [], self.budget - int(self.arrays.working[op]), int(self.again[op]))

    def _add_row(self, held: Terms, made_again: Terms, room: int, where: int | None) -> None:
        """Σ bytes of `held` + Σ bytes (1 - column) of `made_again` <= room, where a column is 1 (None: always)."""
        shares = np.floor(np.array([size for _, size in (*held, *made_again)]) / self.budget / _UNIT) * _UNIT
        most = float(-np.floor(-room / self.budget / _UNIT) * _UNIT)
        above = float(shares.sum()) - most
        if above <= 0.0:
            return
        signed = np.where(np.arange(len(shares)) < len(held), shares, -shares)
        upper = most - float(shares[len(held) :].sum())
        columns = [column for column, _ in (*held, *made_again)]
        if where is None:
            self.builder.add_row(columns, signed, upper=upper)
        else:
            self.builder.add_row([*columns, where], [*signed.tolist(), above], upper=upper + above)
