"""Rematerialisation as retention intervals, solved by constraint programming.

Each op is executed up to C times; each execution keeps its results over an interval of events. Stage j (1 … n) executes
op j for the first time, before it any earlier op again, in order: event j (j − 1) / 2 + k is op k in stage j, so an
order given leaves O(n²) events but only O(C n) integers:

    start[k, i] ∈ events of op k,  end[v, i] ≥ start[maker(v), i] + 1,  present[k, i]      (present[k, 0], at k's own
    event) minimise Σ time_k · present[k, i]   subject to
    present[k, i + 1] ⇒ present[k, i] and start[k, i] < start[k, i + 1], end[v, i] ≤ start[k, i + 1]
    execution i of k reading v ⇒ some m: present[maker(v), m], start[maker, m] < start[k, i] < end[v, m]
    Σ bytes of v over the intervals that hold an event + workspaces at starts ≤ budget              (cumulative)

C is 2 as in the paper, 3 for steps of at most `FEW` ops, where the third is affordable. Optimal, and its bound proved,
among schedules that execute ops for the first time in the order given, each at most once per stage and C times in all.

Source: Bartan, Li, Teague, Lott & Dilkina 2023 (MOCCASIN, arXiv 2304.14463). Beyond it: several results per
op, each with an end of its own, workspaces, ops that must not be executed twice. Limits: C; seconds count to 1e-6 of
the step.
"""

from __future__ import annotations

from paraplan.baselines.common import Clock, Limits, answer, check_budget, fits, keep_all, nothing_fits, pruned
from paraplan.planner.memory.answer import MemoryAnswer, MemoryStatus
from paraplan.planner.memory.memory_schedule import freeing
from paraplan.planner.memory.problem import GIVEN, MemoryProblem
from paraplan.planner.solvers.milp import Status
from paraplan.planner.solvers.milp_intervals import IntervalBuilder, solve_intervals

FEW = 24
RESOLUTION = 10**6
CLASS = "schedules in the order given, each op at most once per stage and {} times"


class _Model:
    def __init__(self, problem: MemoryProblem, budget_bytes: int, most: int) -> None:
        self.problem, self.builder = problem, IntervalBuilder()
        self.count = len(problem.ops)
        self.end_of_time = self.count * (self.count + 1) // 2
        self.start: dict[tuple[int, int], int] = {}
        self.present: dict[tuple[int, int], int] = {}
        self.end: dict[tuple[int, int], int] = {}
        self.demands: dict[int, int] = {}
        self.times = [most if op.repeatable and op.makes else 1 for op in problem.ops]
        self._given()
        for index in range(self.count):
            self._executions(index)
        for index in range(self.count):
            for number in range(self.times[index]):
                self._reads(index, number)
        self.builder.capacity(self.demands, budget_bytes - problem.base_bytes)

    def event(self, stage: int, op: int) -> int:
        """When op `op` would run in a stage (0 … n − 1)."""
        return stage * (stage + 1) // 2 + op

    def _given(self) -> None:
        for tensor, it in enumerate(self.problem.tensors):
            if it.maker == GIVEN:
                begin, always = self.builder.ranged(0, 0), self.builder.literal()
                self.builder.row({always: -1}, -1)
                lowest = self.end_of_time if it.kept else 0
                end = self.end[tensor, 0] = self.builder.ranged(lowest, self.end_of_time)
                self.demands[self.builder.interval(begin, end, always)] = it.nbytes

    def _executions(self, index: int) -> None:
        builder, op = self.builder, self.problem.ops[index]
        events = tuple(self.event(stage, index) for stage in range(index, self.count))
        for number in range(self.times[index]):
            present = builder.literal()
            start = builder.integer(events[:1] if number == 0 else events[1:] or events)
            self.present[index, number], self.start[index, number] = present, start
            if number == 0:
                builder.row({present: -1}, -1)
            else:
                before = self.present[index, number - 1]
                builder.row({present: 1, before: -1}, 0)
                builder.row({self.start[index, number - 1]: 1, start: -1}, -1, (present,))
                if len(events) == 1:
                    builder.row({present: 1}, 0)
            if op.workspace_bytes:
                self.demands[builder.unit(start, present)] = op.workspace_bytes
            for tensor in op.makes:
                end = self.end[tensor, number] = builder.ranged(1, self.end_of_time)
                builder.row({start: 1, end: -1}, -1, (present,))
                self.demands[builder.interval(start, end, present)] = self.problem.tensors[tensor].nbytes
                if number:
                    builder.row({self.end[tensor, number - 1]: 1, start: -1}, 0, (present,))
        for tensor in op.makes:
            if self.problem.tensors[tensor].kept:  # there in the end: its last interval reaches it
                for number in range(self.times[index]):
                    following = self.present.get((index, number + 1))
                    reach = {self.end[tensor, number]: -1}
                    if following is not None:
                        reach[following] = -self.end_of_time
                    builder.row(reach, -self.end_of_time, (self.present[index, number],))

    def _reads(self, index: int, number: int) -> None:
        builder = self.builder
        present, start = self.present[index, number], self.start[index, number]
        for tensor in self.problem.ops[index].reads:
            maker = self.problem.tensors[tensor].maker
            if maker == GIVEN:
                builder.row({start: 1, self.end[tensor, 0]: -1}, -1, (present,))
                continue
            sources = []
            for m in range(self.times[maker]):
                chosen = builder.literal()
                sources.append(chosen)
                builder.row({chosen: 1, self.present[maker, m]: -1}, 0)
                builder.row({self.start[maker, m]: 1, start: -1}, -1, (chosen,))
                builder.row({start: 1, self.end[tensor, m]: -1}, -1, (chosen,))
            builder.row({present: 1, **dict.fromkeys(sources, -1)}, 0)

    def sequence(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """The ops of a solution, by event."""
        runs = [(values[self.start[key]], key[0]) for key, literal in self.present.items() if values[literal]]
        return tuple(op for _, op in sorted(runs))


def moccasin(problem: MemoryProblem, budget_bytes: int, limits: Limits) -> MemoryAnswer:
    """The constraint program's schedule.

    Raises:
        SolverLimitError: there is none of its class (proved of it only), or none was found in time.
    """
    check_budget(problem, budget_bytes)
    free = keep_all(problem)
    if fits(free, budget_bytes):
        return answer(problem, free.actions, bound_s=problem.compute_s, status=MemoryStatus.OPTIMAL, notes=free.notes)
    clock = Clock(limits)
    most = 3 if len(problem.ops) <= FEW else 2
    model = _Model(problem, budget_bytes, most)
    scale = RESOLUTION / max(problem.compute_s, 1e-300)
    model.builder.minimise(
        {literal: int(problem.ops[index].time_s * scale) for (index, _), literal in model.present.items()}
    )
    found = solve_intervals(model.builder, time_limit_s=clock.left_s)
    kind = CLASS.format(most)
    if not found.values:
        proved = found.status is Status.INFEASIBLE
        why = f"proved: none among {kind}" if proved else f"none found in {limits.time_s} s, which proves nothing"
        raise nothing_fits("moccasin", budget_bytes, None, why)
    status = MemoryStatus.OPTIMAL if found.status is Status.OPTIMAL else MemoryStatus.FEASIBLE
    bound = max(problem.compute_s, (found.bound or 0) / scale)
    notes = (f"{len(model.builder.columns)} columns; bound and status are of {kind}",)
    ops = pruned(problem, model.sequence(found.values))
    return answer(problem, freeing(problem, ops), bound_s=bound, status=status, notes=notes)
