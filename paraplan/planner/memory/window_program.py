"""A few stages of a schedule decided anew, all others left as they are: an integer program with the exact bytes.

The window is stages first .. last. Columns, for a stage t of it, an op j and a tensor v:

    again[t, j]     whether j is executed again in stage t
    resident[t, v]  whether v is resident as stage t begins

    minimise  sum_t,j time_j again[t, j]
    subject to
      resident[t, v] + again[t, maker v] >= 1                   v read by op t; or v read after the window (t = last)
      resident[t, u] + again[t, maker u] >= again[t, j]         u read by j
      resident[t, v] + again[t, maker v] >= resident[t + 1, v]
      bytes as op t executes: its working set, and of the others what is resident as t + 1 begins     <= budget
      bytes before the window: what stays from its last reader before the window until it begins      <= budget
      bytes as j executes again in stage t: its working set, and of the others
          v made after j: resident[t, v];  v made before j: resident[t + 1, v] or again[t, i], a reader i > j
                                                                                                      <= budget

What is needed after the window is what was, so that nothing changes there. The last rows, of which there is one for
every place an op may run again at, are asked for where a solution breaks them (`places`).
Source: Checkmate's ILP (Jain et al. 2020, section 4) on a window.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from paraplan.planner.memory.problem import GIVEN
from paraplan.planner.memory.reruns import Floats, Ints, Profile
from paraplan.planner.milp import Milp, MilpBuilder

_UNIT = 2.0**-26
"""Bytes are rounded down to so much of the budget, so that what fits to the byte is a solution."""
_ONE = -2
"""In the place of a column: always 1. (-1: always 0.)"""


class WindowProgram:
    """The program of one window.

    Attributes:
        milp: in shares of the step's compute seconds and of the budget.
        hint: the schedule given, a solution.
    """

    milp: Milp
    hint: Floats

    def __init__(
        self, profile: Profile, first: int, last: int, budget_bytes: int, most_ops: int,
        places: Iterable[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        """`most_ops`: how many ops may be executed again in the window; `places`: (stage, op) of the last rows."""
        self.profile, self.arrays, self.first, self.last = profile, profile.arrays, first, last
        self.budget = budget_bytes
        n = self.arrays.num_ops
        self.begin = int(np.searchsorted(profile.keys, first * n))
        self.end = int(np.searchsorted(profile.keys, last * (n + 1)))
        self._builder = MilpBuilder()
        self._values: list[float] = []
        self._needed_after()
        self._choose_ops(most_ops)
        self._choose_tensors()
        self._add_columns()
        for stage in range(first, last + 1):
            self._add_stage(stage)
        self._add_before()
        for stage, op in places:
            self._add_place(stage, op)
        self.milp, self.hint = self._builder.build(), np.array(self._values)

    def keys(self, values: Floats) -> Ints:
        """The schedule of a solution."""
        n = self.arrays.num_ops
        outside = np.append(self.profile.keys[: self.begin], self.profile.keys[self.end + 1 :])
        inside = [stage * n + op for (stage, op), column in self.again.items() if values[column] > 0.5]
        own = np.arange(self.first, self.last + 1) * (n + 1)
        return np.unique(np.concatenate([outside, np.array(inside, np.int64), own]))

    def _needed_after(self) -> None:
        profile = self.profile
        there = (profile.start <= self.end) & (profile.last > self.end)
        self.after = set(profile.tensor[there].tolist())

    def _choose_ops(self, most: int) -> None:
        """Ops that may be executed again: those that are, then by their distance from what the window needs."""
        arrays, profile = self.arrays, self.profile
        inside = slice(self.begin, self.end + 1)
        now = profile.ops[inside][profile.rerun[inside]]
        self.now = set(profile.keys[inside][profile.rerun[inside]].tolist())
        chosen = dict.fromkeys(sorted(set(now.tolist())))
        reads = {tensor for op in range(self.first, self.last + 1) for tensor in arrays.reads[op]}
        level = sorted(reads | self.after)
        seen = set(level)
        while level and len(chosen) < most:
            following: set[int] = set()
            for tensor in level:
                op = arrays.makers[tensor]
                if op == GIVEN or op >= self.last or not arrays.repeats[op] or arrays.working[op] > self.budget:
                    continue
                if len(chosen) < most:
                    chosen[op] = None
                if op in chosen:
                    following.update(arrays.reads[op])
            level = sorted(following - seen)
            seen |= following
        self.chosen = sorted(chosen)

    def _choose_tensors(self) -> None:
        """`until`: the last stage at whose beginning a tensor may be of use; what stays all the while is `always`."""
        arrays, chosen = self.arrays, set(self.chosen)
        self.always = {v for v in self.after if arrays.makers[v] < self.first and arrays.makers[v] not in chosen}
        self.active = [
            any(arrays.makers[tensor] in chosen for tensor in arrays.reads[stage])
            or any(stage * arrays.num_ops <= key < (stage + 1) * arrays.num_ops for key in self.now)
            for stage in range(self.first, self.last + 1)
        ]
        latest = max((self.first + k for k, on in enumerate(self.active) if on), default=self.first - 1)
        self.until = dict.fromkeys(sorted(self.after - self.always), self.last)
        for stage in range(self.first, self.last + 1):
            for tensor in arrays.reads[stage]:
                if tensor not in self.always:
                    self.until[tensor] = max(self.until.get(tensor, stage), stage)
        for op in self.chosen:
            for tensor in arrays.reads[op]:
                if tensor not in self.always and latest >= self.first:
                    self.until[tensor] = max(self.until.get(tensor, latest), latest)

    def _add_columns(self) -> None:
        arrays, profile, n = self.arrays, self.profile, self.arrays.num_ops
        unit = float(arrays.time_s.sum()) or 1.0
        self.again: dict[tuple[int, int], int] = {}
        self.resident: dict[tuple[int, int], int] = {}
        for stage in range(self.first, self.last + 1):
            begin = int(np.searchsorted(profile.keys, stage * n))
            there = set(profile.tensor[(profile.start < begin) & (profile.last >= begin)].tolist())
            for tensor, until in self.until.items():
                if arrays.makers[tensor] < stage <= until:
                    self.resident[stage, tensor] = self._column(float(tensor in there))
            for op in self.chosen if self.active[stage - self.first] else ():
                if op < stage:
                    cost = float(arrays.time_s[op]) / unit
                    self.again[stage, op] = self._column(float(stage * n + op in self.now), cost)

    def _column(self, value: float, cost: float = 0.0) -> int:
        self._values.append(value)
        return self._builder.add_columns(1, upper=1.0, integer=True, objective=cost)

    def _stays(self, stage: int, tensor: int) -> int:
        """The column of resident[stage, tensor], `_ONE` or -1."""
        if tensor in self.always or (stage == self.last + 1 and tensor in self.after):
            return _ONE
        return self.resident.get((stage, tensor), -1)

    def _cover(self, stage: int, tensor: int, other: int) -> None:
        """resident[stage, v] + again[stage, maker v] >= the other column."""
        here = self._stays(stage, tensor)
        if here == _ONE:
            return
        columns = [column for column in (here, self.again.get((stage, self.arrays.makers[tensor]), -1)) if column >= 0]
        if other == _ONE:
            self._builder.add_row(columns, np.ones(len(columns)), lower=1.0)
        else:
            self._builder.add_row([*columns, other], [*[1.0] * len(columns), -1.0], lower=0.0)

    def _add_stage(self, stage: int) -> None:
        arrays = self.arrays
        for tensor in arrays.reads[stage]:
            self._cover(stage, tensor, _ONE)
        for op in self.chosen:
            column = self.again.get((stage, op), -1)
            for tensor in arrays.reads[op] if column >= 0 else ():
                self._cover(stage, tensor, column)
        for tensor in self.until:
            following = self._stays(stage + 1, tensor)
            if following != -1 and arrays.makers[tensor] < stage:
                self._cover(stage, tensor, following)
        held = [(v, self._stays(stage + 1, v)) for v in (*self.until, *self.always)]
        own = {*arrays.reads[stage], *arrays.problem.ops[stage].makes}
        self._limit([(c, arrays.sizes[v]) for v, c in held if v not in own], self.budget - int(arrays.working[stage]))

    def _limit(self, held: list[tuple[int, int]], room: int, where: int = _ONE) -> None:
        """Bytes of columns are at most the room, where a column is 1."""
        columns = [column for column, _ in held if column >= 0]
        shares = np.floor(np.array([size for column, size in held if column >= 0]) / self.budget / _UNIT) * _UNIT
        room -= sum(size for column, size in held if column == _ONE)
        most = -float(np.floor(-room / self.budget / _UNIT) * _UNIT)
        above = float(shares.sum()) - most
        if above <= 0.0:
            return
        if where == _ONE:
            self._builder.add_row(columns, shares, upper=most)
        else:
            self._builder.add_row([*columns, where], [*shares.tolist(), above], upper=most + above)

    def _add_before(self) -> None:
        """What stays until the window begins, from its last reader before."""
        profile, arrays, length = self.profile, self.arrays, len(self.profile.keys)
        tensors = np.array([v for (stage, v) in self.resident if stage == self.first], np.int64)
        if not len(tensors) or not self.begin:
            return
        version = np.searchsorted(profile.version_keys, tensors * (length + 1) + self.begin + 1) - 1
        at = np.searchsorted(profile.use_keys, version * length + self.begin)
        before = np.append(-1, profile.use_keys)[at]
        used = np.where(before // length == version, before % length, profile.start[version])
        live = profile.live[: self.begin].copy()
        for tensor, since, last in zip(tensors.tolist(), used.tolist(), profile.last[version].tolist(), strict=True):
            if last >= self.begin:
                live[since + 1 :] -= arrays.sizes[tensor]
        highest = -1
        for position in range(self.begin - 1, -1, -1):
            if live[position] > highest:
                highest = int(live[position])
                held = [
                    (self.resident[self.first, v], arrays.sizes[v])
                    for v, since in zip(tensors.tolist(), used.tolist(), strict=True)
                    if since < position
                ]
                self._limit(held, self.budget - highest)

    def _add_place(self, stage: int, op: int) -> None:
        """Bytes as an op is executed again in a stage."""
        column = self.again.get((stage, op), -1)
        if column < 0:
            return
        arrays, held = self.arrays, []
        own = {*arrays.reads[op], *arrays.problem.ops[op].makes}
        for tensor in (*self.until, *self.always):
            if tensor in own:
                continue
            if arrays.makers[tensor] > op:
                held.append((self._stays(stage, tensor), arrays.sizes[tensor]))
                continue
            later = [self._stays(stage + 1, tensor)]
            later += [_ONE] if tensor in arrays.reads[stage] else []
            readers = self.arrays.problem.readers[tensor]
            later += [self.again.get((stage, reader), -1) for reader in readers if op < reader < stage]
            held.append((self._either(later), arrays.sizes[tensor]))
        self._limit(held, self.budget - int(arrays.working[op]), column)

    def _either(self, columns: list[int]) -> int:
        """A column that is 1 where any of some is."""
        if _ONE in columns:
            return _ONE
        there = [column for column in columns if column >= 0]
        if len(there) <= 1:
            return there[0] if there else -1
        found = self._column(max(self._values[column] for column in there))
        count = np.arange(len(there))
        self._builder.add_rows(
            len(there), np.concatenate([count, count]), np.concatenate([np.full(len(there), found), there]),
            np.repeat([1.0, -1.0], len(there)), lower=0.0,
        )  # fmt: skip
        return found
