"""A plan of one device within a budget: its step flattened, planned op by op, and the actions written into the plan.

Recomputation reaches across segments here, which `planner.recompute` (per kind, for many devices) does not; the price
is a problem as long as the step. `least_budget` brackets the least budget that does, by bisection between what is
proved to be needed (`least_budget.py`) and the peak without recomputation, for the error where one does not.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from paraplan.cost_models.predict import plan_costs, simulate_plan
from paraplan.cost_models.simulator.rank_trace import Simulation
from paraplan.ir.errors import NoPlanError
from paraplan.ir.execution.memory_actions import format_actions
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.model.sources import source_lines
from paraplan.ir.plan import Plan
from paraplan.ir.sizes import say_size
from paraplan.lowering import lower
from paraplan.planner.memory.answer import MemoryAnswer
from paraplan.planner.memory.flatten import flatten
from paraplan.planner.memory.memory_schedule import evaluate, freeing
from paraplan.planner.memory.plan_memory import MemoryLimits, plan_memory
from paraplan.planner.memory.problem import MemoryProblem, Tier
from paraplan.planner.memory.relaxations.least_budget import LeastBytes, least_need
from paraplan.planner.memory.reruns import Arrays

ROUNDS = 6
"""Budgets tried to name the least that was found to do."""


@dataclass(frozen=True)
class Scheduled:
    """A plan with a memory schedule.

    Attributes:
        plan: with its actions; not yet certified.
        programs: what it lowers to.
        simulation: of those.
        answer: what was proved of the schedule.
    """

    plan: Plan
    programs: tuple[RankProgram, ...]
    simulation: Simulation
    answer: MemoryAnswer


def memory_tiers(cluster: ClusterSpec, names: Iterable[str] = TIERS) -> tuple[Tier, ...]:
    """Those of some tiers that are memory as one device of the cluster sees them; nothing where none has room."""
    found = []
    for name in names:
        if TIERS[name].is_memory and cluster.has_room(name, (0,)):
            link = cluster.link(name)
            found.append(Tier(name, cluster.room_bytes(name, (0,)), link.bytes_per_s, link.bytes_per_s, link.latency_s))
    return tuple(found)


def memory_problem(plan: Plan, tiers: tuple[Tier, ...] = (), beside_bytes: int = 0) -> MemoryProblem:
    """What is to be planned of a plan's step; any schedule it has already is left out.

    Args:
        plan: of one device.
        tiers: that tensors may be copied to.
        beside_bytes: that are there all the time and no part of the plan.
    Raises:
        InvalidPlanError: the plan is for several devices.
    """
    plain = msgspec.structs.replace(plan, memory_actions=None)
    problem = flatten(lower(plain)[0], plan_costs(plain)[0], source_lines(plan.program)).problem
    return replace(problem, tiers=tiers, base_bytes=problem.base_bytes + beside_bytes)


def schedule_memory(
    plan: Plan,
    budget_bytes: int,
    limits: MemoryLimits | None = None,
    tiers: tuple[Tier, ...] = (),
    beside_bytes: int = 0,
) -> Scheduled:
    """The plan, its step run in the fastest order found within a budget.

    Args:
        plan: of one device.
        budget_bytes: on it.
        limits: of the search; left out, the defaults.
        tiers: where tensors may be copied to.
        beside_bytes: there all the time and no part of the plan.
    Raises:
        InfeasibleError: proved that there is none.
        SolverLimitError: none was found, nor proved impossible.
        InvalidPlanError: the plan is for several devices.
    """
    answer = plan_memory(memory_problem(plan, tiers, beside_bytes), budget_bytes, limits)
    bound = msgspec.structs.replace(
        plan, memory_actions=format_actions(answer.actions), prediction=None, certificate=None
    )
    programs = lower(bound)
    simulation = simulate_plan(bound, programs)
    assert simulation.peak_bytes[0] + beside_bytes == answer.evaluation.peak_bytes, (
        "the ordered program is not the schedule priced"
    )
    return Scheduled(bound, programs, simulation, answer)


def peak_without(problem: MemoryProblem) -> int:
    """The peak of every op once, each result freed after its last reader."""
    alone = replace(problem, tiers=())
    return evaluate(alone, freeing(alone, tuple(range(len(problem.ops))))).peak_bytes


@dataclass(frozen=True)
class LeastBudget:
    """Between what the least budget that does lies.

    Attributes:
        need: no budget below does, and the op at which.
        found_bytes: a schedule within it was found.
    """

    need: LeastBytes
    found_bytes: int


def least_budget(problem: MemoryProblem, above_bytes: int, time_s: float) -> LeastBudget:
    """What is needed at least, and the least budget above one that does not do for which a schedule was found.

    Args:
        problem: of one device.
        above_bytes: a budget that does not do.
        time_s: of the search.
    """
    deadline = time.perf_counter() + time_s
    need = least_need(Arrays(problem), time.perf_counter() + time_s / 4)
    low, high = max(above_bytes, need.nbytes), peak_without(problem)
    tried = low if low > above_bytes else (low + high) // 2  # what is needed at least often does
    for _ in range(ROUNDS):
        left = deadline - time.perf_counter()
        if high - low <= 0.01 * high or left <= 0:
            break
        try:
            high = plan_memory(problem, tried, MemoryLimits(time_s=left / 2, gap=1.0)).evaluation.peak_bytes
        except NoPlanError:
            low = tried
        tried = (low + high) // 2
    return LeastBudget(need, high)


def least_words(problem: MemoryProblem, above_bytes: int, time_s: float) -> str:
    """What would do, for an error.

    Args:
        problem, above_bytes, time_s: as of `least_budget`.
    """
    least = least_budget(problem, above_bytes, time_s)
    found, need = least.found_bytes, least.need.nbytes
    op = f"op {least.need.op} ({problem.ops[least.need.op].label})"
    return (
        f"The least budget found to do is {say_size(found)} ({found} bytes), and none below {say_size(need)} ({need} "
        f"bytes) does in this order of ops, as {op} executes; {say_size(peak_without(problem))} need nothing executed "
        f"again. {say_size(problem.base_bytes)} are there all the time (parameters, optimizer states, buffers, the "
        "batch)"
    )
