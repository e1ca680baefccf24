"""How many groups of devices a model's stages lie on: every degree that divides the devices, every schedule, simulated.

Degree 1 is a plan of one stage on all devices. Every other is planned as a pinned pipeline is (`pipeline_search`), with
each schedule that takes it; shardings are chosen once per degree and number of microbatches. The plan with the least
simulated step is returned; a note says what every degree came to. Limits: stages a position are the fewest each
schedule takes, and where microbatches are not pinned each degree has the first of 4, 2 and 1 times its positions that
divides the batch, while one stage has as many as its memory asks for.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from paraplan.ir.errors import ConstraintError, NoPlanError
from paraplan.ir.plan import Plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import check_constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.pipeline.pipeline_search import search_pipeline
from paraplan.planner.pipeline.stage_sharding import Shardings
from paraplan.planner.schedules.named import NAMED

OneStage = Callable[[Constraints], Plan]


def search_degrees(
    job: Job,
    constraints: Constraints,
    shardings: Shardings,
    one_stage: OneStage,
    progress: Callable[[str], None],
    deadline: Deadline,
) -> Plan:
    """The fastest plan found over degrees and schedules.

    Args:
        job: what is planned.
        constraints: with `pp` "auto"; a pinned schedule leaves degree 1 out.
        shardings: of stages' devices.
        one_stage: plans without a pipeline.
        progress: told what is being tried.
        deadline: after which no other degree or schedule is begun, once something was found.
    Raises:
        ConstraintError: what is pinned leaves no degree.
        InfeasibleError, SolverLimitError: none fits; says what each comes to.
    """
    n = job.cluster.num_devices
    plans: list[Plan] = []
    words: list[str] = []
    late = ""
    faults: list[NoPlanError | ConstraintError] = []
    for degree in (d for d in range(1, n + 1) if n % d == 0):
        names = ("",) if degree == 1 else tuple(NAMED) if constraints.schedule is None else (constraints.schedule,)
        here: list[tuple[float, str]] = []
        for name in names:
            if degree == 1 and constraints.schedule is not None:
                continue
            if plans and deadline.is_over:
                late = "; then time ran out"
                continue
            progress(f"pp={degree} {name}".rstrip())
            pinned = msgspec.structs.replace(constraints, pp=degree if degree > 1 else None, schedule=name or None)
            try:
                check_constraints(pinned, n)
                plan = one_stage(pinned) if degree == 1 else search_pipeline(job, pinned, shardings)
            except (ConstraintError, NoPlanError) as fault:
                faults.append(fault)
                continue
            assert plan.prediction is not None
            plans.append(plan)
            here.append((plan.prediction.step_s, name))
        if here:
            step_s, name = min(here)
            words.append(f"pp={degree}{name and ' ' + name}: {step_s:.4g} s")
        elif not late:
            words.append(f"pp={degree}: nothing")
    if not plans:
        raise next((each for each in faults if not isinstance(each, ConstraintError)), faults[-1])
    best = min(plans, key=lambda plan: plan.prediction.step_s if plan.prediction is not None else float("inf"))
    note = f"pipelines of every degree were simulated, with the fastest schedule of each: {', '.join(words)}{late}"
    return msgspec.structs.replace(best, notes=(*best.notes, note))
