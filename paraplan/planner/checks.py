"""What is looked at before a search: a cluster's rates, tiers and room, and where states may be if nothing is said."""

from __future__ import annotations

import itertools

import msgspec

from paraplan.cost_models.machine.catalog import devices_with
from paraplan.ir.errors import ConstraintError, InfeasibleError
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.model.tensor import FLOATS8
from paraplan.ir.option_words import OptionValue
from paraplan.ir.sizes import say_size
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.decision_classes import largest_param
from paraplan.planner.joint.bounding.relaxations import fits_nowhere, kept_bytes
from paraplan.planner.options.placements import ANY, ANYWHERE, ON_DEVICE
from paraplan.planner.passes.leanest import what_would_do
from paraplan.planner.pipeline.meshes import candidate_meshes


def with_states(job: Job, constraints: Constraints) -> tuple[Constraints, tuple[str, ...]]:
    """Where states and parameters may be is the planner's choice if nothing else was said; a note where that cannot be
    priced."""
    said = constraints.placing
    if not constraints.tiers:
        return constraints, ()
    if any(said):
        return constraints.placed(said._replace(params=said.params or ANY)), ()
    near = dict.fromkeys(TIERS[tier].updated_in for tier in constraints.tiers)
    unrated = [TIERS[tier].rate for tier in near if not _is_rated(job, tier)]
    roomy = all(job.cluster.has_room(tier, tuple(range(job.cluster.num_devices))) for tier in near)
    note = f"optimizer states stay on the device: {job.cluster.name} does not say {' or '.join(unrated)}"
    chosen = constraints.placed(ON_DEVICE if unrated or not roomy else ANYWHERE)
    return chosen, (note,) if unrated else ()


def _is_rated(job: Job, tier: str) -> bool:
    return all(group.update_bytes_per_s(tier) for group in job.cluster.groups)


def check_rates(job: Job) -> None:
    """Whether all devices multiply in float8, where the program is to.

    Raises:
        ConstraintError: one does not.
    """
    if job.program.precision != "fp8":
        return
    dtypes = {spec.dtype for kind in job.program.kinds for spec in kind.graph.values.values()}
    eight = sorted(dtypes & FLOATS8)
    for dtype, group in itertools.product(eight, job.cluster.groups):
        if dtype not in group.device.flops_per_s:
            raise ConstraintError(
                "{} multiplies in {}, for which {} has no rate (it has {}); plan with {}, or for a device that has "
                "one: {}",
                *(OptionValue("precision", "fp8"), dtype, group.device.kind, tuple(group.device.flops_per_s)),
                *(OptionValue("precision", "bf16"), tuple(devices_with(dtype))),
            )


def check_tiers(job: Job, constraints: Constraints) -> None:
    """The cluster has what may be used.

    Raises:
        ConstraintError: no link to a tier, or no room there.
    """
    devices = tuple(range(job.cluster.num_devices))
    for tier in dict.fromkeys(place.update_tier for place in constraints.every_place):
        if tier and not _is_rated(job, tier):
            raise ConstraintError(
                "states off the device are updated {}, but {} does not say how fast its memory is; give its groups "
                "{}, or {}, or leave states there",
                *(TIERS[tier].where, job.cluster.name, TIERS[tier].rate, OptionValue("update_on", "device")),
            )
    for tier in dict.fromkeys((*constraints.tiers, *constraints.state_tiers)):
        if not job.cluster.has_room(tier, devices):
            waits = tier in constraints.tiers
            pinned = OptionValue("offload", constraints.offload) if waits else f"states on the {tier}"
            linked = all(getattr(group, tier) for group in job.cluster.groups)
            field = TIERS[tier].room if linked else f"{tier} and {TIERS[tier].room}"
            raise ConstraintError(
                "{}: {} describes no room on {} for every device; give its groups {}",
                *(pinned, job.cluster.name, tier, field),
            )


def check_room(job: Job, constraints: Constraints, budget: int, limit_s: float) -> None:
    """Parameters and states have room, were they sharded over all devices.

    Args:
        job, constraints: what is planned, with where states may be.
        budget: bytes a device may hold.
        limit_s: of the search, of which a part is for what is advised once the fault is explained.
    Raises:
        InfeasibleError: they have none.
    """
    if not fits_nowhere(job, constraints, budget):
        return
    n = job.cluster.num_devices
    each = -int(-kept_bytes(job, False) // n)
    need = f"{say_size(each)}, {say_size(each - budget)} are missing whatever is recomputed"
    alone = msgspec.structs.replace(constraints, pp=1, schedule=None, stages=None)
    over = f", sharded over all {n} devices," if n > 1 else ""
    said = (
        f"no sharding fits {say_size(budget)} per device: parameters and optimizer states alone{over} take at least "
        f"{need}; {largest_param(job.program)}; "
        "let states and parameters leave the device (offload='host'), use more devices, or devices with more memory"
    )
    raise InfeasibleError(
        said, lambda: said + (what_would_do(job, candidate_meshes(job, alone)[0], alone, limit_s) if n == 1 else "")
    )
