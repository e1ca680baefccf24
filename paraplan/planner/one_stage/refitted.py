"""A plan of one stage within fewer bytes: in its own layouts and chunks, or finer ones, with more made again."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from paraplan.ir.plan import Plan
from paraplan.ir.step_options import ROOMY
from paraplan.planner.assemble import Job, decided
from paraplan.planner.certificate import certified
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import SolveLimits, Until
from paraplan.planner.one_stage.candidate_passes import passed
from paraplan.planner.recompute.split import fit_split, work_s
from paraplan.planner.recompute.stage_recompute import Unfit
from paraplan.planner.sharding.solve import Candidate

WORST = 1.5
"""How much longer a step may be, before passes."""


def refitted(job: Job, plan: Plan, constraints: Constraints, limit_bytes: int, within_s: float) -> Plan | None:
    """The plan with as much recomputed as makes it fit, of which nothing is proved; None where that is not enough, and
    where what it recomputes is not free.

    Args:
        job: what was planned.
        plan: priced.
        constraints: under which it was.
        limit_bytes: that a device may hold.
        within_s: seconds after which none is looked for.
    """
    pinned = constraints.recompute is not None or plan.memory_actions is not None
    if len(plan.stages) > 1 or pinned:
        return None
    job = replace(job, program=plan.program, compiled=plan.compiled, reduce_dtype=plan.reduce_dtype)
    fixed = bool(constraints.params)
    (stage,) = plan.stages
    splits = tuple(stage.choices[at].split for at in stage.segment_choice)
    known = replace(decided(plan, stage.mesh), splits=splits if any(splits) else ())
    decisions = replace(known, options=ROOMY, fixed=fixed)
    worst_s = math.inf if plan.prediction is None else WORST * plan.prediction.step_s
    last = time.perf_counter() + within_s
    until = Until(last, last, worst_s)
    found = fit_split(job, decisions, limit_bytes, constraints.tiers, until)
    if isinstance(found, Unfit):
        return None
    candidate = Candidate(found.plan, found.simulation, work_s(found.simulation), 0.0, "feasible", 0.0, True)
    limits = SolveLimits(time_s=within_s, memory_bytes=limit_bytes, certify=False)
    return certified(passed(candidate, limits, constraints), 0.0, 1)
