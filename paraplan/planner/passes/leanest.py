"""Plans of one device for as little memory as can be, found quickly: what an error advises, and what is fallen back on.

With states and parameters on the device and layouts chosen as if memory were free, the step is ordered op by op
(`memory.whole`) within budgets from what is proved to be needed up to what needs nothing executed again, in every usual
number of microbatches. What counts of an order is what the allocator would reserve, where a reserve is kept, for that
is what has to fit; else the bytes alive. A search that finds nothing else takes the first of them that fits: so a plan
is found for the budget that an error advises.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from paraplan.cost_models.predict import reserved_of, simulate_plan
from paraplan.ir.errors import NoPlanError
from paraplan.ir.execution.memory_actions import Actions, format_actions
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.sizes import say_size
from paraplan.lowering import lower
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import SolveLimits
from paraplan.planner.memory.plan_memory import MemoryLimits, plan_memory
from paraplan.planner.memory.problem import MemoryProblem
from paraplan.planner.memory.relaxations.least_budget import LeastBytes, least_need
from paraplan.planner.memory.reruns import Arrays
from paraplan.planner.memory.single_device import memory_problem, memory_tiers, peak_without
from paraplan.planner.options.placements import ON_DEVICE
from paraplan.planner.pipeline.microbatches import most_to_order
from paraplan.planner.sharding.solve import Candidate, Skipped, solve_mesh

ROOM = float(1 << 60)
BUDGETS = 3
"""From what is needed on, below what needs nothing again."""
MOST_S = 10.0
"""Of a time limit; half of it where that is less."""


@dataclass(frozen=True)
class Lean:
    """A plan for little memory.

    Attributes:
        candidate: the plan.
        held_bytes: what has to be allowed for it.
        problem, need: its step, and what any order of it needs at least.
    """

    candidate: Candidate
    held_bytes: int
    problem: MemoryProblem
    need: LeastBytes


def lean_time_s(limit_s: float) -> float:
    """What of a time limit is for this."""
    return min(limit_s / 2, MOST_S)


def orders_freely(mesh: Mesh, constraints: Constraints) -> bool:
    """Whether a plan may be of this kind: on one device, nothing said of what is executed again or has to be away."""
    free = constraints.recompute is None and constraints.pp in (None, 1)
    return mesh.size == 1 and free and not constraints.pins_away


def leanest(job: Job, mesh: Mesh, constraints: Constraints, time_s: float, enough_bytes: int = 0) -> Lean | None:
    """The plan found that has to be allowed least, or the first that has to be allowed no more than is enough.

    Args:
        job, mesh, constraints: one device's.
        time_s: for all of it.
        enough_bytes: at which to stop.
    """
    best: Lean | None = None
    counts = most_to_order(job.program, constraints, mesh)
    stop = time.perf_counter() + time_s
    for count in counts:
        for lean in _in_microbatches(job, mesh, constraints, count, time_s / len(counts), enough_bytes):
            best = lean if best is None or lean.held_bytes < best.held_bytes else best
            if best.held_bytes <= enough_bytes:
                return best
        if time.perf_counter() > stop:
            break
    return best


def what_would_do(job: Job, mesh: Mesh, constraints: Constraints, limit_s: float) -> str:
    """What any step needs at least, and the least that has to be allowed for a plan found, with states and parameters
    on the device; empty where none is of this kind.

    Args:
        job, mesh, constraints: what was planned, and where.
        limit_s: of the search that found nothing.
    """
    if not orders_freely(mesh, constraints):
        return ""
    lean = leanest(job, mesh, constraints, lean_time_s(limit_s))
    if lean is None:
        return ""
    count, alive = lean.candidate.plan.num_microbatches, max(lean.candidate.simulation.peak_bytes)
    most = say_size(peak_without(lean.problem))
    op = f"op {lean.need.op} ({lean.problem.ops[lean.need.op].label})"
    ways = "" if constraints.tiers else ", with states and parameters that may leave (offload='host')"
    parts = f" in {count} microbatches" if count > 1 else ""
    reserved = f", of which {say_size(alive)} are alive at once" if alive < lean.held_bytes else ""
    return (
        f". With states and parameters on the device{parts}: The least budget found to do is "
        f"{say_size(lean.held_bytes)} ({lean.held_bytes} bytes){reserved}, and none below {say_size(lean.need.nbytes)} "
        f"({lean.need.nbytes} bytes) does in this order of ops, as {op} executes; {most} alive need "
        f"nothing executed again. {say_size(lean.problem.base_bytes)} are there all the time (parameters, "
        f"optimizer states, buffers, the batch). Less is needed with a smaller batch{ways}, or with an optimizer of "
        "fewer states (sgd, momentum)"
    )


def _in_microbatches(
    job: Job, mesh: Mesh, constraints: Constraints, count: int, time_s: float, enough_bytes: int
) -> Iterator[Lean]:
    """Plans of one number of microbatches: as captured, and within less and less memory."""
    stop = time.perf_counter() + time_s
    kept = constraints.placed(ON_DEVICE)
    limits = SolveLimits(time_s=time_s, memory_bytes=ROOM, certify=False)
    try:
        roomy = solve_mesh(job, mesh, count, kept, limits)
    except NoPlanError:
        return
    if isinstance(roomy, Skipped):
        return
    tiers = memory_tiers(job.cluster, constraints.tiers)
    problem = memory_problem(roomy.plan, tiers)
    need = least_need(Arrays(problem), time.perf_counter() + time_s / 8)
    reserves, most = constraints.reserve_bytes != 0, peak_without(problem)

    def lean(actions: Actions | None, again_s: float) -> Lean:
        candidate, programs = _ordered(roomy, actions, again_s)
        held = reserved_of(candidate.plan, programs, enough_bytes or int(ROOM)) if reserves else ()
        return Lean(candidate, max(held or candidate.simulation.peak_bytes), problem, need)

    for at in range(BUDGETS):
        budget = need.nbytes + (most - need.nbytes) * at // BUDGETS
        left_s = max(stop - time.perf_counter(), time_s / 2)
        try:
            answer = plan_memory(problem, budget, MemoryLimits(time_s=left_s / 2, gap=1.0))
        except NoPlanError:
            continue
        yield lean(answer.actions, answer.evaluation.recomputed_s)
        if time.perf_counter() > stop:
            return
    yield lean(None, 0.0)


def _ordered(roomy: Candidate, actions: Actions | None, again_s: float) -> tuple[Candidate, tuple[RankProgram, ...]]:
    """A plan whose step runs in an order, and what it lowers to; None leaves it as captured."""
    plan = roomy.plan
    if actions is not None:
        note = "memory planned op by op, by the first order found that is lean enough"
        plan = msgspec.structs.replace(plan, memory_actions=format_actions(actions), notes=(*plan.notes, note))
    programs = lower(plan)
    made = replace(
        roomy,
        plan=plan,
        simulation=simulate_plan(plan, programs),
        status="feasible",
        memory_binds=True,
        objective_s=roomy.objective_s + again_s,
    )
    return made, programs
