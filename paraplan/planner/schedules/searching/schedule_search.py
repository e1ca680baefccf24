"""`searched`: the shortest schedule found for given times, messages and memory, and how far from the best it can be.

For every placement and for whole and split backwards the pipeline is a job shop (`job_shop.py`). Its schedules come
from the named ones that fit, from a grid of list-scheduling rules (`dispatch.py`), from tabu search on the best of
these (`improve.py`) and, where the shop is small, from CP-SAT (`exact.py`). So the answer is never longer than a named
schedule that fits. The bound is the least over the shops of the larger of `bound.py`'s and CP-SAT's: no schedule of
these placements, with backwards all whole or all split, is shorter. Work is limited by counts, not by time, so that
equal problems get equal answers; a time limit, where one is given, stops earlier.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from paraplan.ir.errors import InfeasibleError
from paraplan.ir.execution.schedule import Schedule
from paraplan.ir.struct import Value
from paraplan.planner.schedules.complete import complete
from paraplan.planner.schedules.event_simulation import ScheduleTimes, evaluate
from paraplan.planner.schedules.named import NAMED, applicable
from paraplan.planner.schedules.schedule_problem import Orders, PipelineProblem
from paraplan.planner.schedules.searching.dispatch import dispatch, rules
from paraplan.planner.schedules.searching.exact_schedule import solve_exactly
from paraplan.planner.schedules.searching.job_shop import Shop, StagePositions, build_shop, placements
from paraplan.planner.schedules.searching.shop_bound import machine_bound
from paraplan.planner.schedules.searching.tabu import improve
from paraplan.planner.schedules.searching.timing import timing

_NEAR = 1 + 1e-4
"""A step this near to its bound counts as optimal: CP-SAT's ticks, a millionth of a step, add up along a path."""


class Effort(Value, frozen=True, kw_only=True):
    """How much to search, counted in operations timed.

    Attributes:
        dispatched: by list scheduling.
        improved: by tabu search.
        starts: sequences tabu search starts from.
        exact: operations of the largest shop given to CP-SAT; 0 for none.
        work: CP-SAT's own count of its work per shop; a tenth takes a second or two.
    """

    dispatched: int = 400_000
    improved: int = 1_500_000
    starts: int = 3
    exact: int = 240
    work: float = 0.1


class Searched(Value, frozen=True, kw_only=True):
    """The answer.

    Attributes:
        orders: per position.
        num_replicas: groups of positions that hold each stage.
        placement: name of the placement, and whether backwards are whole or split.
        found_by: what found it: a named schedule, "rules", "tabu" or "cp-sat".
        evaluation: of the orders.
        bound_s: no schedule in scope is shorter.
        bound_scope: which schedules, and what the bound comes from.
        gap: (step - bound) / step.
        status: "optimal" or "feasible".
        solve_s: wall time.
    """

    orders: Orders
    num_replicas: int
    placement: str
    found_by: str
    evaluation: ScheduleTimes
    bound_s: float
    bound_scope: str
    gap: float
    status: str
    solve_s: float

    def schedule(self, problem: PipelineProblem) -> Schedule:
        """With its messages, one rank per position."""
        return complete("searched", self.orders, problem.stages, self.num_replicas)


@dataclass
class _Case:
    """One shop and what is known of it: (step, found by, sequences), shortest first, of equal ones the smallest."""

    placed: StagePositions
    split: bool
    shop: Shop
    bound_s: float
    bound_by: str
    found: list[tuple[float, str, list[list[int]]]] = field(default_factory=list)

    def note(self, found_by: str, sequences: list[list[int]]) -> None:
        """Keep sequences that run, fit and are new."""
        if not all(self.shop.fits(position, each) for position, each in enumerate(sequences)):
            return
        known = timing(self.shop, sequences)
        if known is not None and all(sequences != other for _, _, other in self.found):
            self.found.append((known.step_s, found_by, sequences))
            self.found.sort(key=lambda each: (float(f"{each[0]:.12g}"), self.shop.peak(each[2])))


def search(problem: PipelineProblem, effort: Effort | None = None, time_limit_s: float | None = None) -> Searched:
    """Search.

    Args:
        problem: what is scheduled.
        effort: of the search; left out, the default.
        time_limit_s: None for no limit.
    Raises:
        InfeasibleError: one microbatch at a time does not fit, under any placement.
        ConstraintError: sizes, costs or limits that mean nothing.
    """
    started = time.perf_counter()
    effort = effort or Effort()
    deadline = float("inf") if time_limit_s is None else started + time_limit_s
    cases = _cases(problem)
    for case in cases:
        _from_names(problem, case)
        _from_rules(problem, case, effort.dispatched // len(cases), deadline)
    _improve(cases, effort, deadline)
    _solve(cases, effort, deadline)
    best = min((case for case in cases if case.found), key=lambda case: case.found[0][0])
    _, found_by, sequences = best.found[0]
    orders = best.shop.orders(sequences)
    evaluation = evaluate(orders, problem.stages)
    open_cases = [case for case in cases if case.bound_s * _NEAR < evaluation.step_s]
    least = min(open_cases, key=lambda case: case.bound_s) if open_cases else best
    bound_s = min(evaluation.step_s, *(case.bound_s for case in cases))
    names = sorted({case.placed.name for case in cases})
    return Searched(
        orders=orders,
        num_replicas=len(best.placed.position),
        found_by=found_by,
        evaluation=evaluation,
        placement=f"{best.placed.name}, backwards {'split' if best.split else 'whole'}",
        bound_s=bound_s,
        bound_scope=f"stages {' or '.join(names)}; {least.bound_by}",
        gap=1 - bound_s / max(evaluation.step_s, 1e-300),
        status="feasible" if open_cases else "optimal",
        solve_s=time.perf_counter() - started,
    )


def _cases(problem: PipelineProblem) -> list[_Case]:
    """Every shop in which a microbatch alone fits."""
    cases, short = [], []
    for placed in placements(problem):
        for split in (False, True) if problem.split_backward else (False,):
            shop = build_shop(problem, placed, split)
            if not split and (lack := _lack(shop)):
                short.append(f"{placed.name}: {lack}")
                break
            case = _Case(placed, split, shop, *machine_bound(shop))
            case.note("rules", _one_at_a_time(shop))
            cases.append(case)
    if not cases:
        raise InfeasibleError(
            f"a microbatch alone does not fit, stages {'; '.join(short)}; recompute activations, shard the stages "
            "further or use smaller microbatches"
        )
    return cases


def _lack(shop: Shop) -> str:
    """Where one microbatch's activations at once overflow: its last stage's forward needs them all."""
    for position, own in enumerate(shop.queues):
        need = shop.start_bytes[position] + sum(shop.before_bytes[queue[0]] for queue in own)
        if shop.limit_bytes is not None and need > shop.limit_bytes[position]:
            return f"position {position} needs {need} bytes of {shop.limit_bytes[position]}"
    return ""


def _one_at_a_time(shop: Shop) -> list[list[int]]:
    sequences: list[list[int]] = [[] for _ in shop.queues]
    for op in sorted(range(len(shop.actions)), key=lambda op: (shop.actions[op].microbatch, op)):
        sequences[shop.position[op]].append(op)
    return sequences


def _from_names(problem: PipelineProblem, case: _Case) -> None:
    for name, orders in applicable(len(problem.stages), problem.num_positions, problem.num_microbatches).items():
        if NAMED[name].num_replicas != len(case.placed.position):
            continue
        actions = {action: position for position, order in enumerate(orders) for action in order}
        if all(actions.get(action) == case.shop.position[op] for action, op in case.shop.number.items()):
            case.note(name, case.shop.sequences(orders))


def _from_rules(problem: PipelineProblem, case: _Case, budget: int, deadline: float) -> None:
    every = list(rules(case.shop, problem.num_positions))
    stride = max(1, -(-len(every) * len(case.shop.actions) // max(1, budget)))
    for rule in every[::stride]:
        if time.perf_counter() > deadline or (case.found and case.found[0][0] <= case.bound_s * _NEAR):
            return
        sequences = dispatch(case.shop, rule)
        if sequences is not None:
            case.note("rules", sequences)


def _improve(cases: list[_Case], effort: Effort, deadline: float) -> None:
    """Tabu search from the shortest sequences, shops in the order of their shortest; what cannot win is left."""
    for case in sorted((case for case in cases if case.found), key=lambda case: case.found[0][0]):
        rounds = effort.improved // (len(cases) * effort.starts * 20 * len(case.shop.actions))
        for _, _, sequences in list(case.found[: effort.starts]):
            best_s = min(each.found[0][0] for each in cases if each.found)
            if case.bound_s * _NEAR >= best_s or time.perf_counter() > deadline:
                break
            case.note("tabu", improve(case.shop, sequences, case.bound_s, rounds)[0])


def _solve(cases: list[_Case], effort: Effort, deadline: float) -> None:
    for case in sorted((case for case in cases if case.found), key=lambda case: case.bound_s):
        best_s = min(each.found[0][0] for each in cases if each.found)
        left_s = deadline - time.perf_counter()
        if case.bound_s * _NEAR >= best_s or len(case.shop.actions) > effort.exact or left_s <= 0 or best_s <= 0:
            continue
        step_s, _, sequences = case.found[0]
        solved = solve_exactly(
            case.shop, sequences, step_s, case.bound_s, effort=effort.work, time_limit_s=min(left_s, 600.0)
        )
        if solved.sequences is not None:
            case.note("cp-sat", solved.sequences)
        if solved.bound_s > case.bound_s:
            case.bound_s, case.bound_by = solved.bound_s, "CP-SAT"
