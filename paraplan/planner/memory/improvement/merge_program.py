"""Of some reruns, the best set: an integer program with the exact bytes.

Given are places (stage t, op j) at which ops may run again. Every set of them is a schedule (`reruns`); this finds the
one that fits with the fewest seconds. Places and first executions in order are positions; a gap of a tensor lies
between two positions that make or read it, next to each other among those. Columns:

    runs[p]   whether what may run at position p does              (1 for first executions)
    held[g]   whether the tensor is resident throughout gap g

    minimise  sum_p time_p runs[p]
    subject to
      held[g] >= runs[p], held[g] >= held[g + 1]                 gap g ends with p, which reads
      held[g] >= held[g + 1] - runs[p]                           gap g ends with p, which makes
      (working_p - base) runs[p] + sum of bytes held[g]          over gaps p lies inside of    <= budget - base

With `held` as small as it may be this is the schedule's account of bytes, so that what the program finds is found. One
column stands for a whole gap, however many stages it spans, and most follow from others: where a tensor has no place it
may be made again at, its gaps are all held, or just as what reads it runs.
Source: gaps for stages as in Moccasin (Bartan et al. 2023); solving exactly over the union of what good solutions are
made of is merging in the sense of Blum et al. 2016 (construct, merge, solve and adapt).
"""

from __future__ import annotations

import numpy as np

from paraplan.planner.memory.reruns import Arrays, Bools, Floats, Ints, gather
from paraplan.planner.solvers.milp import Milp, MilpBuilder

_BITS = 26
"""Of the budget: units that bytes are counted in, since solvers over integers scale shares of powers of two exactly."""
_ONE = -2
"""In the place of a column: always 1. (-1: always 0.)"""


class MergeProgram:
    """The program of some places.

    Attributes:
        milp: in shares of the step's compute seconds and of the budget.
        hint: the schedule given, as values.
    """

    milp: Milp
    hint: Floats

    def __init__(self, arrays: Arrays, places: Ints, hint: Ints, budget_bytes: int) -> None:
        """`places`: keys that may run; `hint`: keys of a schedule, all of them places or first executions."""
        self.arrays, self.budget = arrays, budget_bytes
        self.positions = np.unique(np.concatenate([arrays.diagonal(), places, hint]))
        self.ops = self.positions % arrays.num_ops
        self.optional: Bools = self.ops != self.positions // arrays.num_ops
        self._builder = MilpBuilder()
        self._add_runs(hint)
        self._inside: tuple[list[int], list[int], list[int], list[int]] = ([], [], [], [])
        self._always = np.zeros(len(self.positions) + 1, np.int64)
        self._add_gaps()
        self._add_rows()
        self.milp, self.hint = self._builder.build(), np.array(self._values)

    def keys(self, values: Floats) -> Ints:
        """The schedule of a solution."""
        chosen = ~self.optional
        chosen[self.optional] = values[self.columns[self.optional]] > 0.5
        return self.positions[chosen]

    def _add_runs(self, hint: Ints) -> None:
        places = np.flatnonzero(self.optional)
        unit = float(self.arrays.time_s.sum()) or 1.0
        self.columns = np.full(len(self.positions), _ONE, np.int64)
        if len(places):
            first = self._builder.add_columns(
                len(places), upper=1.0, integer=True, objective=self.arrays.time_s[self.ops[places]] / unit
            )
            self.columns[places] = first + np.arange(len(places))
        self._values: list[float] = np.isin(self.positions[places], hint).astype(float).tolist()

    def _add_gaps(self) -> None:
        """Goes over each tensor's positions from the last to the first."""
        arrays, length = self.arrays, len(self.positions)
        made_at, made = gather(arrays.make_start, arrays.make_tensor, self.ops)
        read_at, read = gather(arrays.read_start, arrays.read_tensor, self.ops)
        kept = np.flatnonzero(arrays.kept)
        tensor = np.concatenate([arrays.given, made, read, kept])
        at = np.concatenate([np.full(len(arrays.given), -1, np.int64), made_at, read_at, np.full(len(kept), length)])
        makes = np.arange(len(tensor)) < len(arrays.given) + len(made)
        order = np.lexsort((at, tensor))
        events = list(zip(tensor[order].tolist(), at[order].tolist(), makes[order].tolist(), strict=True))
        columns = [*self.columns.tolist(), _ONE]  # what is kept is read in the end
        held, following = -1, (-1, length, True)
        for event in reversed(events):
            if event[0] == following[0]:
                _, position, make = following
                held = self._made(held, columns[position]) if make else self._read(held, columns[position])
                self._hold(held, event[1], position, arrays.sizes[event[0]])
            else:
                held = -1
            following = event

    def _read(self, after: int, runs: int) -> int:
        """The column of a gap before a reader."""
        if _ONE in (after, runs):
            return _ONE
        if after in (-1, runs):
            return runs
        found = self._column(max(self._values[after], self._values[runs]))
        self._builder.add_row([found, after], [1.0, -1.0], lower=0.0)
        self._builder.add_row([found, runs], [1.0, -1.0], lower=0.0)
        return found

    def _made(self, after: int, runs: int) -> int:
        """The column of a gap before what makes the tensor again."""
        if after == -1 or runs == _ONE:
            return -1
        if after == _ONE:
            found = self._column(1.0 - self._values[runs])
            self._builder.add_row([found, runs], [1.0, 1.0], lower=1.0)
            return found
        found = self._column(max(0.0, self._values[after] - self._values[runs]))
        self._builder.add_row([found, runs, after], [1.0, 1.0, -1.0], lower=0.0)
        return found

    def _column(self, value: float) -> int:
        self._values.append(value)
        return self._builder.add_columns(1, upper=1.0, integer=True)

    def _hold(self, held: int, after: int, until: int, nbytes: int) -> None:
        if held == _ONE:
            self._always[after + 1] += nbytes
            self._always[min(until, len(self._always) - 1)] -= nbytes
        elif held >= 0 and nbytes and after + 1 < until:
            for found, item in zip(self._inside, (held, after + 1, until, nbytes), strict=True):
                found.append(item)

    def _add_rows(self) -> None:
        arrays = self.arrays
        column, since, until, nbytes = (np.array(found, np.int64) for found in self._inside)
        always = np.cumsum(self._always)[:-1]
        own = arrays.working[self.ops] - arrays.base
        most = np.zeros(len(always) + 1, np.int64)
        np.add.at(most, since, nbytes)
        np.subtract.at(most, until, nbytes)
        room = self.budget - arrays.base - always
        values = np.array([*self._values, 1.0])
        binding = (np.cumsum(most)[:-1] + own > room) & ~self._dominated(always + own, since, until)
        for position in np.flatnonzero(binding).tolist():
            inside = np.flatnonzero((since <= position) & (until > position))
            columns, terms = [*column[inside].tolist(), int(self.columns[position])], nbytes[inside].tolist()
            self._add_row(np.array(columns), np.array([*terms, own[position]]), int(room[position]), values)

    def _dominated(self, need: Ints, since: Ints, until: Ints) -> Bools:
        """Positions next to a first execution that needs no less, beside all gaps they lie inside of."""
        length = len(self.positions)
        starts, ends = np.zeros(length + 1, bool), np.zeros(length + 1, bool)
        starts[since], ends[until] = True, True
        found = np.zeros(length, bool)
        found[:-1] |= ~self.optional[1:] & ~ends[1:length] & (need[:-1] <= need[1:])
        found[1:] |= ~self.optional[:-1] & ~starts[1:length] & (need[1:] < need[:-1])
        return found

    def _add_row(self, columns: Ints, nbytes: Ints, room: int, values: Floats) -> None:
        """Bytes of columns are at most the room, in units; what rounding leaves out is taken off as the hint allows."""
        unit = max(1, self.budget >> _BITS)
        scale = 2.0 ** -(self.budget // unit).bit_length()
        if columns[-1] == _ONE:
            columns, nbytes, room = columns[:-1], nbytes[:-1], room - int(nbytes[-1])
        hint = values[columns] > 0.5
        lost = nbytes % unit
        room -= max(0, min(int(lost.sum()), room - int(nbytes[hint].sum()) + int(lost[hint].sum())))
        at, where = np.unique(columns, return_inverse=True)
        total = np.zeros(len(at))
        np.add.at(total, where, nbytes // unit)
        self._builder.add_row(at, total * scale, upper=(room // unit) * scale)
