"""A pipeline planned again in its own sharding, for other bytes: cut and recomputed anew, not sharded.

Where the cut is the planner's, it is the one that the estimate of the pipeline finds for these bytes (`estimate`): with
less memory, positions that hold more take fewer segments before any makes its own again. Where nothing comes of that,
the cut stays.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from paraplan.ir.errors import SolverLimitError
from paraplan.ir.plan import Plan
from paraplan.planner.assemble import Job, decided
from paraplan.planner.checks import with_states
from paraplan.planner.constraints import Constraints, device_budget
from paraplan.planner.joint.combinations import Combination
from paraplan.planner.joint.estimate import Pricer
from paraplan.planner.pipeline.draft import Draft
from paraplan.planner.pipeline.first_devices import first_devices
from paraplan.planner.pipeline.pipeline_search import Start, search_from
from paraplan.planner.pipeline.prices.stage_prices import Sharding
from paraplan.planner.pipeline.stage_sharding import Shardings
from paraplan.planner.recompute.presets import in_layers
from paraplan.planner.schedules.named import NAMED


def planned_again(job: Job, constraints: Constraints, plan: Plan, shardings: Shardings, cut_anew: bool = False) -> Plan:
    """A pipeline in the sharding of one that was planned for the same job.

    Args:
        job: what is planned.
        constraints: with the plan's degree, schedule and microbatches; what differs is what devices may hold.
        plan: a pipeline.
        shardings: of one stage's devices, which are not asked.
        cut_anew: whether stages may be others than those that the constraints have.
    Raises:
        ConstraintError: the constraints contradict each other.
        SolverLimitError: it does not fit so.
    """
    job, constraints = in_layers(job, constraints)
    job = replace(job, compiled=constraints.compiled, reduce_dtype=constraints.reduce_dtype)
    constraints, _ = with_states(job, constraints)
    assert constraints.pp is not None
    part, like = replace(job, cluster=first_devices(job.cluster, constraints.pp)), plan.stages[0].mesh
    mesh = like.over(range(like.size))
    sharding = Sharding(part, decided(plan, mesh))
    starts = [(constraints, Start(sharding, is_only=True))]
    if cut_anew and constraints.recompute is None and plan.schedule.name in NAMED:
        starts = [*_recut(job, constraints, plan, sharding), *starts]
    for number, (pinned, start) in enumerate(starts, 1):
        try:
            found = search_from(job, pinned, shardings, start)
            assert isinstance(found, Draft)  # no other's step was to be kept below
            return found.made()
        except SolverLimitError:
            if number == len(starts):
                raise
    raise AssertionError("a pipeline was planned, or said not to fit")


def _recut(job: Job, constraints: Constraints, plan: Plan, sharding: Sharding) -> list[tuple[Constraints, Start]]:
    """The pipeline as it is estimated for these bytes, if that fits."""
    assert isinstance(constraints.pp, int)
    shape, each = plan.stages[0].mesh.shape, len(plan.stages) // constraints.pp
    combination = Combination(constraints.pp, shape, plan.num_microbatches, plan.schedule.name, each)
    pricer = Pricer(job.cluster, device_budget(job.cluster, constraints))
    found = pricer.estimate(combination, sharding.prices, shape)
    if found is None or found.over_bytes:
        return []
    pinned = msgspec.structs.replace(constraints, stages=found.bounds)
    return [(pinned, Start(sharding, found.taken, is_only=True))]
