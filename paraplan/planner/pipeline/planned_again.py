"""A pipeline planned again in its own sharding, for other bytes: cut and recomputed anew, not sharded."""

from __future__ import annotations

from dataclasses import replace

from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.plan import Plan
from paraplan.planner.assemble import Job, decided
from paraplan.planner.checks import with_states
from paraplan.planner.constraints import Constraints
from paraplan.planner.pipeline.first_devices import first_devices
from paraplan.planner.pipeline.pipeline_search import Start, search_from
from paraplan.planner.pipeline.stage_prices import Sharding
from paraplan.planner.pipeline.stage_sharding import Shardings
from paraplan.planner.recompute.presets import in_layers


def planned_again(job: Job, constraints: Constraints, plan: Plan, shardings: Shardings) -> Plan:
    """A pipeline in the sharding of one that was planned for the same job.

    Args:
        job: what is planned.
        constraints: with the plan's degree, schedule and microbatches; what differs is what devices may hold.
        plan: a pipeline.
        shardings: of one stage's devices, which are not asked.
    Raises:
        ConstraintError: the constraints contradict each other.
        SolverLimitError: it does not fit so.
    """
    job, constraints = in_layers(job, constraints)
    job = replace(job, compiled=constraints.compiled, reduce_dtype=constraints.reduce_dtype)
    constraints, _ = with_states(job, constraints)
    assert constraints.pp is not None
    part, like = replace(job, cluster=first_devices(job.cluster, constraints.pp)), plan.stages[0].mesh
    mesh = Mesh(axes=like.axes, shape=like.shape, devices=tuple(range(like.size)))
    found = search_from(job, constraints, shardings, Start(Sharding(part, decided(plan, mesh)), is_only=True))
    assert isinstance(found, Plan)  # no other's step was to be kept below
    return found
