"""Whether stages exist whose slowest takes at most T: a dynamic program over ideals, from the last stage to the first.

A state is an ideal, of which all but it is cut into stages already, with (devices taken, sum of data degrees): fewer of
both is better, as memory asks for the sum alone, so each ideal keeps a Pareto front. What prunes is T:

    the devices taken can do what is cut:        device seconds of it ≤ T · devices
    the devices left can do the rest:            device seconds of the ideal ≤ T · (all − devices)
    a stage's fastest variants take at most T, and its leanest ones fit

which are arrays over all states at once. Variants are chosen (`variants.py`) only where the fastest ones do not fit (or
differ in what they send) and no other stage is as good.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from paraplan.planner.partition.hybrid_problem import (
    Floats,
    HybridProblem,
    HybridStage,
    Ints,
    TensorDegree,
    microbatches_in_flight,
)
from paraplan.planner.partition.ideals import Ideals

_SLACK = 1 + 1e-12


class OutOfTime(Exception):
    """The deadline passed."""


@dataclass(frozen=True)
class _Sums:
    """Of one tensor degree, sums over ideals that give those of stages as differences.

    Attributes:
        fastest_s: [ideal] time of the fastest variants.
        params: [ideal] the fewest parameter bytes.
        per_microbatch, always: [ideal] memory of the fastest variants.
        entering, leaving: [edge] the fewest bytes.
        missing: [ideal] nodes that have no variant of this degree, counted as nothing above.
        exact: whether these are the fastest variants' own, as a node's variants differ in time and memory alone.
    """

    degree: TensorDegree
    fastest_s: Floats
    params: Floats
    per_microbatch: Floats
    always: Floats
    entering: Floats
    leaving: Floats
    missing: Floats
    exact: bool


@dataclass
class _States:
    """States found so far, in columns; `parent` is a state, -1 of the first."""

    ideal: Ints
    devices: Ints
    degrees: Ints
    parent: Ints
    tensor: Ints
    data: Ints
    count: int = 0

    @staticmethod
    def empty(size: int = 1024) -> _States:
        return _States(
            np.zeros(size, np.int64),
            np.zeros(size, np.int64),
            np.zeros(size, np.int64),
            np.zeros(size, np.int64),
            np.zeros(size, np.int64),
            np.zeros(size, np.int64),
        )

    def add(self, ideal: int, rows: Ints) -> None:
        """Rows of (devices, degrees, parent, tensor, data)."""
        stop = self.count + len(rows)
        columns = ("devices", "degrees", "parent", "tensor", "data")
        if stop > len(self.ideal):
            for name in ("ideal", *columns):
                setattr(self, name, np.resize(getattr(self, name), 2 * stop))
        self.ideal[self.count : stop] = ideal
        for name, values in zip(columns, rows.T, strict=True):
            getattr(self, name)[self.count : stop] = values
        self.count = stop


@dataclass
class HybridSearch:
    """The dynamic program over some ideals, run for one T after another."""

    problem: HybridProblem
    ideals: Ideals
    deadline: float = np.inf
    _least_memory: dict[tuple[int, int], Floats] = field(default_factory=dict)
    _variants: dict[tuple[int, int, int, int, int], tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem, member = self.problem, self.ideals.member.astype(float)
        self.work = member @ problem.device_seconds
        self.sums = [self._sums(degree, member) for degree in problem.degrees]
        crossing = self.ideals.member[:, problem.sources] & ~self.ideals.member[:, problem.targets]
        self.crossing, self.has_source = crossing.astype(float), member[:, problem.sources]
        self.has_target = member[:, problem.targets]
        self.sync = np.array([problem.sync_share(d) for d in problem.data_degrees])

    def _sums(self, degree: TensorDegree, member: Floats) -> _Sums:
        problem, there = self.problem, np.isfinite(degree.time_s)
        held = np.where(there, degree.per_microbatch_bytes, np.inf)
        fastest = np.lexsort((held, degree.time_s), axis=1)[:, 0]
        nodes = np.arange(problem.num_nodes)
        least, exact = [], True
        for values, of in (
            (degree.param_bytes, there),
            (degree.entering_bytes, there[problem.targets]),
            (degree.leaving_bytes, there[problem.sources]),
        ):
            lowest = np.where(of, values, np.inf).min(axis=1)
            exact &= bool((np.where(of, values, -np.inf).max(axis=1) <= lowest).all())
            least.append(np.where(np.isfinite(lowest), lowest, 0.0))

        def summed(per_node: Floats) -> Floats:
            return np.asarray(member @ np.where(np.isfinite(per_node), per_node, 0.0))

        return _Sums(
            degree,
            summed(degree.time_s[nodes, fastest]),
            summed(least[0]),
            summed(degree.per_microbatch_bytes[nodes, fastest]),
            summed(degree.always_bytes[nodes, fastest]),
            least[1],
            least[2],
            summed((~there).all(axis=1).astype(float)),
            exact,
        )

    def run(self, limit_s: float) -> list[HybridStage] | None:
        """Stages that each take at most a limit; None where, proved, these ideals have none.

        Raises:
            OutOfTime: the deadline passed.
        """
        states = _States.empty()
        last = len(self.ideals) - 1
        states.add(last, np.array([[0, 0, -1, 0, 0]]))
        for ideal in range(last - 1, -1, -1):
            if time.perf_counter() > self.deadline:
                raise OutOfTime
            rows = self._front(states, ideal, limit_s)
            if len(rows):
                states.add(ideal, rows)
        ends = np.flatnonzero(states.ideal[: states.count] == 0)
        return self._traced(states, int(ends[0])) if len(ends) else None

    def _front(self, states: _States, ideal: int, limit_s: float) -> Ints:
        """The front of an ideal: rows of (devices, degrees, parent, tensor, data)."""
        problem, n = self.problem, states.count
        total = self.work[-1]
        most_devices = problem.devices - np.ceil(self.work[ideal] / limit_s / _SLACK - 1e-9)
        fewest = np.ceil((total - self.work[ideal]) / limit_s / _SLACK - 1e-9)
        if fewest > most_devices or most_devices < 1:
            return np.empty((0, 5), np.int64)
        room = most_devices - states.devices[:n]
        larger = states.ideal[:n]
        at = np.flatnonzero((room >= 1) & (self.work[larger] - self.work[ideal] <= room * limit_s * _SLACK))
        missing = self.ideals.words[ideal] & ~self.ideals.words[larger[at]]
        at = at[~missing.any(axis=1)]
        return self._pareto(states, ideal, limit_s, at, most_devices) if len(at) else np.empty((0, 5), np.int64)

    def _pareto(self, states: _States, ideal: int, limit_s: float, at: Ints, most_devices: float) -> Ints:
        problem = self.problem
        larger, inverse = np.unique(states.ideal[at], return_inverse=True)
        sure, unsure = [], []
        room = most_devices - states.devices[at]
        for index, sums in enumerate(self.sums):
            moved = self._moved(sums, ideal, larger)
            fastest = sums.fastest_s[larger] - sums.fastest_s[ideal] + moved
            params = sums.params[larger] - sums.params[ideal]
            t = sums.degree.degree
            d = np.array(problem.data_degrees)
            quick = fastest[:, None] / d + self.sync * params[:, None] <= limit_s * _SLACK  # [larger, d]
            quick &= (sums.missing[larger] == sums.missing[ideal])[:, None]
            pair, which = np.nonzero(quick[inverse] & (t * d <= room[:, None]))
            if not len(pair):
                continue
            state, data = at[pair], d[which]
            later = states.degrees[state]
            in_flight = 1 + -(-later // data)
            to = states.ideal[state]
            held = (sums.per_microbatch[to] - sums.per_microbatch[ideal]) * in_flight
            held += sums.always[to] - sums.always[ideal]
            rows = np.stack(
                [states.devices[state] + t * data, later + data, state, np.full(len(state), index), data], axis=1
            )
            legal = rows[:, 1] <= problem.microbatches
            fits = (held <= problem.memory_bytes) & sums.exact
            sure.append(rows[legal & fits])
            doubtful = legal & ~fits
            lean = np.zeros(len(state), bool)
            for y in np.unique(in_flight[doubtful]):
                here = doubtful & (in_flight == y)
                least = self._leanest(index, int(y))
                lean[here] = least[to[here]] - least[ideal] <= problem.memory_bytes
            unsure.append(rows[lean])
        front = _nondominated(np.concatenate(sure)) if sure else np.empty((0, 5), np.int64)
        more = np.concatenate(unsure) if unsure else front
        return self._with_unsure(states, ideal, limit_s, front, more)

    def _moved(self, sums: _Sums, ideal: int, larger: Ints) -> Floats:
        """[larger] the least seconds that what crosses the stages' boundaries takes, on one replica."""
        into = self.has_target[larger] @ (self.crossing[ideal] * sums.entering)
        out = self.crossing[larger] @ ((1 - self.has_source[ideal]) * sums.leaving)
        return np.asarray(2 * (into + out) / self.problem.bytes_per_s)

    def _leanest(self, index: int, in_flight: int) -> Floats:
        """[ideal] the least memory of all its nodes."""
        key = (index, in_flight)
        if key not in self._least_memory:
            degree = self.sums[index].degree
            held = degree.per_microbatch_bytes * in_flight + degree.always_bytes
            least = np.where(np.isfinite(degree.time_s), held, np.inf).min(axis=1)
            self._least_memory[key] = self.ideals.member.astype(float) @ np.where(np.isfinite(least), least, 0.0)
        return self._least_memory[key]

    def _with_unsure(self, states: _States, ideal: int, limit_s: float, front: Ints, unsure: Ints) -> Ints:
        """The front, with those rows that improve it whose variants do fit at the limit."""
        kept, sure = [], front.tolist()
        least = np.iinfo(np.int64).max  # the smallest sum of degrees with no more devices than the row's
        place = 0
        for row in unsure[np.lexsort((unsure[:, 1], unsure[:, 0]))].tolist():
            while place < len(sure) and sure[place][0] <= row[0]:
                least = min(least, sure[place][1])
                place += 1
            if row[1] < least and self._attains(states, ideal, row, limit_s):
                kept.append(row)
                least = row[1]
        return _nondominated(np.array(sure + kept, np.int64).reshape(-1, 5))

    def _attains(self, states: _States, ideal: int, row: list[int], limit_s: float) -> bool:
        """Whether a stage's variants can be chosen so that it takes at most the limit and fits."""
        to, index, data = int(states.ideal[row[2]]), row[3], row[4]
        in_flight = microbatches_in_flight(data, row[1] - data)
        key = (ideal, to, index, data, in_flight)
        low, high = self._variants.get(key, (-np.inf, np.inf))
        if not low <= limit_s < high:
            return high <= limit_s
        inside = self.ideals.member[to] & ~self.ideals.member[ideal]
        found = self.problem.stage(inside, self.problem.degrees[index], data, in_flight, limit_s)
        self._variants[key] = (np.inf, np.inf) if found is None else (found.bound, found.cost)
        return found is not None and found.cost <= limit_s

    def _traced(self, states: _States, state: int) -> list[HybridStage]:
        found = []
        while states.parent[state] >= 0:
            parent = int(states.parent[state])
            ideal, to = int(states.ideal[state]), int(states.ideal[parent])
            degree, data = self.problem.degrees[int(states.tensor[state])], int(states.data[state])
            inside = self.ideals.member[to] & ~self.ideals.member[ideal]
            chosen = self.problem.stage(inside, degree, data, microbatches_in_flight(data, int(states.degrees[parent])))
            assert chosen is not None
            found.append(HybridStage(tuple(np.flatnonzero(inside).tolist()), data, degree.degree, chosen.variants))
            state = parent
        return found


def _nondominated(rows: Ints) -> Ints:
    """Rows of which no other has as few devices and as small a sum of degrees."""
    if not len(rows):
        return rows
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    fewer_before = np.minimum.accumulate(np.append(np.iinfo(np.int64).max, rows[:, 1]))[:-1]
    return rows[rows[:, 1] < fewer_before]
