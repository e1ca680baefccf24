"""Which plans are legal, checked between passes and on every load; `verify_program` says which programs are.

Every fault is an `InvalidPlanError` that names the place.
"""

from __future__ import annotations

import math

import msgspec

from paraplan.ir.errors import ClusterError, InvalidPlanError
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.machine.cluster import check_cluster
from paraplan.ir.machine.mesh import PADDED_SHARE, Mesh, Partial, is_shardable, parse_layout
from paraplan.ir.machine.reshard import only_gathers
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.model.program import HALVES, trained_params
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.param_layouts import ParamLayouts
from paraplan.ir.plan import PLAN_VERSION, REDUCE_DTYPES, Plan, Stage
from paraplan.lowering import lower
from paraplan.lowering.blocks.remat import remat_of
from paraplan.lowering.verification.verify_program import verify_program
from paraplan.lowering.verification.verify_schedule import verify_schedule


def verify_plan(plan: Plan) -> tuple[RankProgram, ...]:
    """Check a whole plan.

    Returns:
        Its rank programs: a plan that lowers is one that can be simulated and run.
    Raises:
        InvalidPlanError: the first fault found, with its place.
    """
    check_plan(plan)
    return lower(plan)


def check_plan(plan: Plan) -> None:
    """Check what a plan says, but for whether it lowers.

    Raises:
        InvalidPlanError: the first fault found, with its place.
    """
    if plan.version != PLAN_VERSION:
        raise InvalidPlanError(f"plan version {plan.version}: this paraplan reads version {PLAN_VERSION}")
    try:
        check_cluster(plan.cluster)
    except ClusterError as fault:
        raise InvalidPlanError(f"the plan's cluster: {fault}") from None
    verify_program(plan.program)
    if plan.num_microbatches < 1 or plan.program.rows % plan.num_microbatches:
        raise InvalidPlanError(
            f"a batch of {plan.program.rows} does not divide into {plan.num_microbatches} microbatches"
        )
    if plan.bundle_bytes < 0:
        raise InvalidPlanError(f"bundle_bytes is {plan.bundle_bytes}: at least 0")
    if plan.reducing_bytes < 0:
        raise InvalidPlanError(f"reducing_bytes is {plan.reducing_bytes}: at least 0")
    if plan.reduce_every < 1:
        raise InvalidPlanError(f"reduce_every is {plan.reduce_every}: at least 1")
    _verify_optimizer(plan)
    _verify_reduce_dtype(plan)
    if plan.hold_casts and plan.program.precision != "fp8":
        raise InvalidPlanError(f"hold_casts in {plan.program.precision}: only a plan in fp8 casts weights")
    position = 0
    for index, stage in enumerate(plan.stages):
        if stage.first != position or stage.stop <= stage.first:
            raise InvalidPlanError(
                f"stage {index} holds segments [{stage.first}, {stage.stop}); expected to start at {position}"
            )
        position = stage.stop
        _verify_stage(plan, stage, f"stage {index}")
    if position != len(plan.program.segments):
        raise InvalidPlanError(f"the stages end at segment {position} of {len(plan.program.segments)}")
    _verify_delay(plan)
    verify_schedule(plan.schedule, len(plan.stages), plan.num_microbatches, _stage_of_rank(plan))
    _verify_classes(plan)
    _verify_prediction(plan)


def _verify_optimizer(plan: Plan) -> None:
    """It is one of those with torch classes behind them, and keeps what they keep."""
    known = OPTIMIZERS.get(plan.optimizer.name)
    if known is None:
        raise InvalidPlanError(f"optimizer {plan.optimizer.name!r} is unknown; choose one of {', '.join(OPTIMIZERS)}")
    given = plan.optimizer  # fused or not, torch has it
    known = msgspec.structs.replace(known, fused=given.fused, accumulates=given.accumulates)
    if plan.optimizer != known:
        wrong = next(each for each in known.__struct_fields__ if getattr(plan.optimizer, each) != getattr(known, each))
        raise InvalidPlanError(
            f"optimizer {known.name}: {wrong} is {getattr(plan.optimizer, wrong)}, torch's has {getattr(known, wrong)}"
        )


def _verify_reduce_dtype(plan: Plan) -> None:
    """It is known, and the plan computes in a half precision."""
    if plan.reduce_dtype not in REDUCE_DTYPES:
        known = ", ".join(repr(each) for each in REDUCE_DTYPES)
        raise InvalidPlanError(f"reduce_dtype is {plan.reduce_dtype!r}: one of {known}")
    if plan.reduce_dtype and plan.program.precision not in HALVES:
        raise InvalidPlanError(
            f"reduce_dtype is {plan.reduce_dtype!r}, but gradients of {plan.program.precision} are summed as they are; "
            "leave it empty"
        )


def _verify_prediction(plan: Plan) -> None:
    """Every class of ranks has a peak, and nothing is less than nothing."""
    found, classes = plan.prediction, len(plan.schedule.classes)
    if found is None:
        return
    for name, sizes in (("peak_bytes", found.peak_bytes), ("reserved_bytes", found.reserved_bytes)):
        if len(sizes) != classes and (sizes or name == "peak_bytes"):
            raise InvalidPlanError(f"prediction.{name} has {len(sizes)} sizes for {classes} classes of ranks")
    sizes = (*found.peak_bytes, *found.reserved_bytes, *found.tier_peak_bytes.values())
    if min(sizes) < 0 or not 0 <= found.step_s < math.inf:
        raise InvalidPlanError(
            f"the prediction has sizes {sizes} and a step of {found.step_s} s: at least 0, and finite"
        )


def _verify_delay(plan: Plan) -> None:
    """Something can be updated late, and what several stages hold is so in all of them."""
    if plan.delayed_update is None:
        return
    if plan.delayed_update < 0:
        raise InvalidPlanError(
            f"delayed_update is {plan.delayed_update}: at least 0 steps come before the first late one"
        )
    trained, late = set(trained_params(plan.program)), dict[str, bool]()
    for index, stage in enumerate(plan.stages):
        for name, layouts in stage.params.items():
            if name in trained and late.setdefault(name, plan.is_late(layouts)) != plan.is_late(layouts):
                raise InvalidPlanError(
                    f"stage {index}: parameter {name} is {layouts.text}, and of the stages that hold it the host "
                    "updates it late in some alone (delayed_update); give it one place in all of them"
                )
    if not any(late.values()):
        raise InvalidPlanError(
            f"delayed_update is {plan.delayed_update}, but no parameter's states are where the host updates them "
            "beside the device's work ('@host'); leave it out, or put states there"
        )


def _stage_of_rank(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Per rank, the stages whose mesh holds it."""
    ranks = plan.cluster.num_devices
    held = [{device for mesh in stage.meshes for device in mesh.devices} for stage in plan.stages]
    return tuple(tuple(i for i, devices in enumerate(held) if rank in devices) for rank in range(ranks))


def _verify_classes(plan: Plan) -> None:
    """Ranks of a class sit on equal devices."""
    first: dict[int, tuple[int, int]] = {}
    for rank, (of, kind) in enumerate(zip(plan.schedule.rank_class, plan.cluster.device_kinds(), strict=True)):
        other, expected = first.setdefault(of, (rank, kind))
        if kind != expected:
            kinds = [plan.cluster.group_of(each).device.kind for each in (other, rank)]
            raise InvalidPlanError(
                f"schedule class {of} holds rank {other} on {kinds[0]} and rank {rank} on {kinds[1]}; give the "
                "ranks of each kind of device a class of their own"
            )


def _verify_stage(plan: Plan, stage: Stage, where: str) -> None:
    _verify_mesh(plan, stage.mesh, where)
    _verify_replicas(plan, stage, where)
    program, shape = plan.program, stage.mesh.shape
    if len(stage.segment_choice) != stage.stop - stage.first:
        raise InvalidPlanError(
            f"{where}: {len(stage.segment_choice)} segment choices for {stage.stop - stage.first} segments"
        )
    for offset, chosen in enumerate(stage.segment_choice):
        segment = stage.first + offset
        if not 0 <= chosen < len(stage.choices):
            raise InvalidPlanError(f"{where}, segment {segment}: no choice {chosen}")
        choice = stage.choices[chosen]
        if choice.kind != program.segments[segment].kind:
            raise InvalidPlanError(f"{where}, segment {segment}: choice {chosen} is for kind {choice.kind}")
        if len(choice.input_grads) != len(program.kinds[choice.kind].inputs):
            raise InvalidPlanError(
                f"{where}, choice {chosen}: {len(choice.input_grads)} input_grads for the kind's inputs"
            )
        remat_of(program.kinds[choice.kind], choice.activations)
    for name, layouts in stage.params.items():
        if name not in program.params:
            raise InvalidPlanError(f"{where}: no parameter {name!r}")
        _verify_param(name, layouts, program.params[name].spec.shape, shape, where)
        _verify_tiers(plan, name, layouts, f"{where}, parameter {name}")
    for name, text in stage.batch.items():
        if name not in program.batch:
            raise InvalidPlanError(f"{where}: no batch input {name!r}")
        _verify_layout(text, program.batch[name].spec.shape, shape, f"{where}, batch input {name}", partial=False)


def _verify_replicas(plan: Plan, stage: Stage, where: str) -> None:
    """Meshes that hold one stage are of one shape, as its layouts are."""
    for mesh in stage.replicas:
        _verify_mesh(plan, mesh, f"{where}, replica")
        if (mesh.axes, mesh.shape) != (stage.mesh.axes, stage.mesh.shape):
            raise InvalidPlanError(
                f"{where}: it lies on a mesh {stage.mesh.shape} with axes {stage.mesh.axes} and on one {mesh.shape} "
                f"with axes {mesh.axes}; give its replicas meshes of one shape"
            )
    if len(stage.replicas) >= plan.schedule.num_replicas:
        raise InvalidPlanError(
            f"{where}: {1 + len(stage.replicas)} meshes hold it, schedule {plan.schedule.name} is for "
            f"{plan.schedule.num_replicas}; give as many, or another schedule"
        )


def _verify_mesh(plan: Plan, mesh: Mesh, where: str) -> None:
    if len(mesh.axes) != len(mesh.shape) or any(size < 1 for size in mesh.shape) or mesh.size != len(mesh.devices):
        raise InvalidPlanError(
            f"{where}: mesh of shape {mesh.shape} with axes {mesh.axes} over {len(mesh.devices)} devices"
        )
    if len(set(mesh.devices)) != len(mesh.devices) or not all(
        0 <= device < plan.cluster.num_devices for device in mesh.devices
    ):
        raise InvalidPlanError(f"{where}: mesh devices repeat or lie outside the cluster's {plan.cluster.num_devices}")


def _verify_param(
    name: str, layouts: ParamLayouts, shape: tuple[int, ...], mesh_shape: tuple[int, ...], where: str
) -> None:
    for role, text in (("stored", layouts.stored), ("grad", layouts.grad), ("state", layouts.state)):
        _verify_layout(text, shape, mesh_shape, f"{where}, parameter {name}, {role}", partial=role == "grad")
    if layouts.ahead:
        lies, rests = parse_layout(layouts.stored), parse_layout(layouts.state)
        if layouts.state_tier or layouts.stored_tier or not only_gathers(shape, rests, lies, mesh_shape):
            raise InvalidPlanError(
                f"{where}, parameter {name}: ahead, but gathers alone do not lead from state {layouts.state!r} to "
                f"stored {layouts.stored!r} on the device; leave ahead out, or shard the state further than the stored "
                "copy"
            )


def _verify_tiers(plan: Plan, name: str, layouts: ParamLayouts, where: str) -> None:
    for role in ("state_tier", "stored_tier", "grad_tier"):
        tier = getattr(layouts, role)
        if tier and tier not in TIERS:
            known = ", ".join(repr(each) for each in ("", *TIERS))
            raise InvalidPlanError(f"{where}: {role} is {tier!r}; it can be {known}")
    if layouts.fetched and not layouts.state_tier:
        raise InvalidPlanError(
            f"{where}: its state is to be fetched to the device, where it is already; give it a state_tier"
        )
    if layouts.grad_tier and layouts.grad_tier == layouts.update_tier:
        raise InvalidPlanError(f"{where}: grad_tier is {layouts.grad_tier!r}, where its update is done; leave it out")
    if name not in trained_params(plan.program):
        return
    for fault in layouts.place.contradictions():
        raise InvalidPlanError(f"{where}: {fault}")
    if layouts.stored_tier and layouts.state != layouts.stored:
        raise InvalidPlanError(
            f"{where}: stored {TIERS[layouts.stored_tier].where} as {layouts.stored}, in the storage of its state, "
            f"which is {layouts.state}; give both the same layout"
        )


def _verify_layout(text: str, shape: tuple[int, ...], mesh_shape: tuple[int, ...], where: str, partial: bool) -> None:
    try:
        layout = parse_layout(text)
    except InvalidPlanError as fault:
        raise InvalidPlanError(f"{where}: {fault}") from None
    if len(layout) != len(mesh_shape):
        raise InvalidPlanError(f"{where}: layout {text!r} on a mesh of {len(mesh_shape)} axes")
    if not partial and any(isinstance(placement, Partial) for placement in layout):
        raise InvalidPlanError(f"{where}: {text!r} must not be partial")
    if any(isinstance(placement, Partial) and placement.op != "sum" for placement in layout):
        raise InvalidPlanError(f"{where}: {text!r}: gradients can be partial sums only")
    if not is_shardable(shape, layout, mesh_shape):
        raise InvalidPlanError(
            f"{where}: shape {shape} cannot lie as {text!r} on mesh {mesh_shape}; a dim must divide or be sharded by "
            f"one axis with one element of padding for {PADDED_SHARE} at most"
        )
