"""What makes a plan's step shorter in the same layouts, and what leaves its device: after layouts are chosen."""

from __future__ import annotations

import math
from dataclasses import replace

from paraplan.cost_models.realised_plan import Realised
from paraplan.ir.errors import NoPlanError
from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.machine.tier_placement import HERE
from paraplan.ir.plan import Plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.options.placements import ON_DEVICE
from paraplan.planner.passes.cast_holding import cast_once
from paraplan.planner.passes.delayed_updates import choose_ahead, choose_delay
from paraplan.planner.passes.gather_timing import gathered
from paraplan.planner.passes.grad_reductions import reducing
from paraplan.planner.passes.overlap_products import overlapped
from paraplan.planner.passes.state_placement import choose_places
from paraplan.planner.schedules.full_rounds import as_a_whole, programs_of
from paraplan.planner.sharding.solve import Candidate, Skipped, SolveLimits, solve_mesh


def quickened(best: Candidate, limits: SolveLimits, constraints: Constraints) -> Candidate:
    """The candidate with what makes its step shorter in the same layouts.

    Args:
        best: the candidate.
        limits: of the solver.
        constraints: what is pinned stays.
    """
    made, budget = Realised(best.plan, programs_of(best.plan), best.simulation), int(limits.memory_bytes)
    made = gathered(cast_once(made, budget), budget)
    made = overlapped(reducing(made, budget), constraints.most_pieces, budget)
    return placed(replace(best, plan=made.plan, simulation=made.simulation), limits, constraints)


def by_places(job: Job, mesh: Mesh, count: int, constraints: Constraints, limits: SolveLimits) -> list[Candidate]:
    """The plan of least work with memory for anything, within its limits by what leaves the device alone, if any is.

    Args:
        job, mesh: what is planned, and where.
        count: of microbatches.
        constraints, limits: as of `solve_mesh`.
    """
    roomy = replace(limits, memory_bytes=float(1 << 60))
    try:
        free = solve_mesh(job, mesh, count, constraints.placed(ON_DEVICE), roomy)
    except NoPlanError:
        return []
    if isinstance(free, Skipped):
        return []
    there = replace(placed(free, limits, constraints), status="feasible", memory_binds=True)
    made = as_a_whole(there.plan)
    return [] if made.peak_bytes > limits.memory_bytes or made.over_bytes else [there]


def placed(best: Candidate, limits: SolveLimits, constraints: Constraints) -> Candidate:
    """The candidate with states and parameters where that is fastest, and updated by whom and when, as far as the
    planner may choose.

    Args:
        best, limits, constraints: as of `quickened`.
    """
    away = any(layouts.place != HERE for stage in best.plan.stages for layouts in stage.params.values())
    away = away or max(best.simulation.peak_bytes) > limits.memory_bytes
    chooses = len(constraints.places) > 1 and best.plan.memory_actions is None
    if not away:
        return best

    def price(plan: Plan) -> tuple[float, float]:
        made = as_a_whole(plan)
        over = max(made.over_bytes.values(), default=-math.inf)
        return made.simulation.step_s, max(over, made.peak_bytes - limits.memory_bytes)

    def step_s(plan: Plan) -> float:
        seconds, over = price(plan)
        return seconds if over <= 0 else math.inf

    def place(plan: Plan) -> Plan:
        return choose_places(plan, constraints.places, price, constraints.params) if chooses else plan

    plan = choose_ahead(choose_delay(best.plan, constraints.delayed_update, step_s, place), step_s)
    return replace(best, plan=plan, simulation=as_a_whole(plan).simulation)
