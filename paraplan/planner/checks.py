"""What is looked at before a search: rates and tiers of the cluster, and where states may be if nothing was said."""

from __future__ import annotations

import itertools

import msgspec

from paraplan.cost_models.catalog import devices_with
from paraplan.ir.errors import ConstraintError
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints


def with_states(job: Job, constraints: Constraints) -> tuple[Constraints, tuple[str, ...]]:
    """Where states and parameters may be is the planner's choice if nothing else was said; a note where that cannot be
    priced."""
    if constraints.offload_states is not None or not constraints.tiers:
        return constraints, ()
    rated = all(group.host_memory_bytes_per_s for group in job.cluster.groups)
    roomy = job.cluster.has_room("host", tuple(range(job.cluster.num_devices)))
    note = f"optimizer states stay on the device: {job.cluster.name} does not say host_memory_bytes_per_s"
    chosen = msgspec.structs.replace(constraints, offload_states="any" if rated and roomy else "none")
    return chosen, () if rated else (note,)


def check_rates(job: Job) -> None:
    """Whether all devices multiply in float8, where the program is to.

    Raises:
        ConstraintError: one does not.
    """
    if job.program.precision != "fp8":
        return
    dtypes = {spec.dtype for kind in job.program.kinds for spec in kind.graph.values.values()}
    eight = sorted(dtype for dtype in dtypes if dtype.startswith("float8"))
    for dtype, group in itertools.product(eight, job.cluster.groups):
        if dtype not in group.device.flops_per_s:
            raise ConstraintError(
                f"precision='fp8' multiplies in {dtype}, for which {group.device.kind} has no rate (it has "
                f"{', '.join(group.device.flops_per_s)}); plan with precision='bf16', or for a device that has one: "
                f"{', '.join(devices_with(dtype))}"
            )


def check_tiers(job: Job, constraints: Constraints) -> None:
    """The cluster has what may be used.

    Raises:
        ConstraintError: no link to a tier, or no room there.
    """
    devices = tuple(range(job.cluster.num_devices))
    updated_there = any(place.states and not place.fetched for place in constraints.every_place)
    if updated_there and not all(group.host_memory_bytes_per_s for group in job.cluster.groups):
        raise ConstraintError(
            f"states off the device are updated on the host, but {job.cluster.name} does not say how fast its memory "
            "is; give its groups host_memory_bytes_per_s, or offload_states='fetched' or 'none'"
        )
    for tier in dict.fromkeys((*constraints.tiers, *constraints.state_tiers)):
        if not job.cluster.has_room(tier, devices):
            pinned = f"offload={constraints.offload}" if tier in constraints.tiers else f"states on the {tier}"
            field = "host_memory_bytes" if tier == "host" else "disk and disk_bytes"
            raise ConstraintError(
                f"{pinned}: {job.cluster.name} describes no room on {tier} for every device; give its groups {field}"
            )
