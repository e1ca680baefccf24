"""What is legal: graphs, programs and plans, checked between passes and on every load.

Every fault is an `InvalidPlanError` that names the place.
"""

from __future__ import annotations

from paraplan.ir.cluster import check_cluster
from paraplan.ir.errors import ClusterError, InvalidPlanError
from paraplan.ir.graph import Graph, Phase
from paraplan.ir.lower import lower
from paraplan.ir.lower.remat import remat_of
from paraplan.ir.mesh import PADDED_SHARE, Mesh, Partial, is_shardable, parse_layout
from paraplan.ir.plan import PLAN_VERSION, STATE_TIERS, ParamLayouts, Plan, Stage
from paraplan.ir.program import Program, SegmentKind, trained_params
from paraplan.ir.rank_program import RankProgram
from paraplan.ir.reshard import only_gathers
from paraplan.ir.rules.carried import rule_fault
from paraplan.ir.tensor import DTYPE_BYTES, TensorSpec
from paraplan.ir.verify_schedule import verify_schedule


def verify_graph(graph: Graph, where: str) -> None:
    """Every value is made once, before it is read; forward ops come before backward ops.

    Raises:
        InvalidPlanError: otherwise.
    """
    known = set(graph.inputs)
    for name, spec in graph.values.items():
        if spec.dtype not in DTYPE_BYTES or any(size < 0 for size in spec.shape):
            raise InvalidPlanError(f"{where}: value {name} has an impossible spec {spec}")
    backward = False
    for index, op in enumerate(graph.ops):
        at = f"{where}, op {index} ({op.target})"
        if op.phase is Phase.FORWARD and backward:
            raise InvalidPlanError(f"{at}: a forward op after a backward one")
        backward = op.phase is Phase.BACKWARD
        if not -1 <= op.source < len(graph.sources):
            raise InvalidPlanError(f"{at}: source {op.source} is none of its {len(graph.sources)} lines")
        for name in op.tensors:
            if name not in known:
                raise InvalidPlanError(f"{at}: reads {name!r} before it is made")
        for out in op.outs:
            if out is not None and (out in known or out not in graph.values):
                raise InvalidPlanError(f"{at}: {out!r} is made twice or has no spec")
        if op.rule is not None and (fault := rule_fault(op, graph.values)):
            raise InvalidPlanError(f"{at}: its own rule is wrong: {fault}")
        known.update(name for name in op.outs if name is not None)
    missing = [
        name
        for name in (*graph.inputs, *(o for o in graph.outputs if o))
        if name not in known or name not in graph.values
    ]
    if missing:
        raise InvalidPlanError(f"{where}: {missing[0]!r} is an input or output but no value")


def verify_program(program: Program) -> None:
    """Kinds are sound and segments read only what exists.

    Raises:
        InvalidPlanError: otherwise.
    """
    for kind in program.kinds:
        verify_graph(kind.graph, f"kind {kind.name}")
        _verify_kind(kind)
    known = {f"batch:{name}" for name in program.batch} | {f"buffer:{name}" for name in program.buffers}
    for index, segment in enumerate(program.segments):
        if not 0 <= segment.kind < len(program.kinds):
            raise InvalidPlanError(f"segment {index}: no kind {segment.kind}")
        kind = program.kinds[segment.kind]
        pairs = (
            ("parameters", segment.params, kind.params),
            ("inputs", segment.inputs, kind.inputs),
            ("outputs", segment.outputs, kind.outputs),
            ("asides", segment.asides, kind.asides),
        )
        for what, outer, inner in pairs:
            if len(outer) != len(inner):
                raise InvalidPlanError(f"segment {index}: {len(outer)} {what} for the {len(inner)} of kind {kind.name}")
        for name in segment.params:
            if name not in program.params:
                raise InvalidPlanError(f"segment {index}: no parameter {name!r}")
        for name in segment.inputs:
            if name not in known:
                raise InvalidPlanError(f"segment {index}: reads {name!r} before any segment makes it")
        known.update(segment.outputs)
    for term in program.loss:
        if term.numerator not in known or not (
            term.denominator is None or 0 <= term.denominator < len(program.denominators)
        ):
            raise InvalidPlanError(
                f"the loss reads {term.numerator!r} over denominator {term.denominator}, which do not exist"
            )
    if not program.loss:
        raise InvalidPlanError("the program has no loss")
    _verify_outputs(program, known)
    _verify_updates(program)


def _verify_outputs(program: Program, known: set[str]) -> None:
    """What the model returns beside its loss is made of values that exist."""
    known = known | {name for segment in program.segments for name in segment.asides}
    known |= {f"param:{name}" for segment in program.segments for name in segment.params}
    for name, output in program.outputs.items():
        verify_graph(output.graph, f"output {name}")
        if len(output.inputs) != len(output.graph.inputs) or len(output.graph.outputs) != 1:
            raise InvalidPlanError(
                f"output {name}: {len(output.inputs)} inputs for {len(output.graph.inputs)}, or no result"
            )
        missing = [source for source in output.inputs if source not in known]
        if missing:
            raise InvalidPlanError(f"output {name} reads {missing[0]!r}, which does not exist")


def _verify_updates(program: Program) -> None:
    """Every buffer that is written is one, and so is its new value, of the same spec."""
    specs: dict[str, TensorSpec] = {}
    for segment in program.segments:
        kind = program.kinds[segment.kind]
        specs.update((outer, kind.graph.values[n]) for outer, n in zip(segment.outputs, kind.outputs, strict=True))
    for name, value in program.buffer_updates.items():
        if name not in program.buffers:
            raise InvalidPlanError(f"buffer_updates: no buffer {name!r}")
        if value not in specs:
            raise InvalidPlanError(f"buffer_updates: buffer {name!r} becomes {value!r}, which no segment makes")
        if specs[value] != program.buffers[name]:
            raise InvalidPlanError(
                f"buffer_updates: buffer {name!r} is {program.buffers[name]}, its new value {value} is {specs[value]}"
            )


def _verify_kind(kind: SegmentKind) -> None:
    lengths = (
        ("tangents", kind.tangents, kind.outputs), ("input_grads", kind.input_grads, kind.inputs),
        ("param_grads", kind.param_grads, kind.params),
    )  # fmt: skip
    for what, left, right in lengths:
        if len(left) != len(right):
            raise InvalidPlanError(f"kind {kind.name}: {len(left)} {what} for {len(right)} values")
    for name in (
        *kind.params,
        *kind.inputs,
        *kind.outputs,
        *kind.asides,
        *(n for n in (*kind.tangents, *kind.input_grads, *kind.param_grads) if n),
    ):
        if name not in kind.graph.values:
            raise InvalidPlanError(f"kind {kind.name}: {name!r} is no value of its graph")


def verify_plan(plan: Plan) -> tuple[RankProgram, ...]:
    """Check a whole plan.

    Returns:
        Its rank programs: a plan that lowers is one that can be simulated and run.
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
    if plan.num_microbatches < 1 or plan.program.batch_size % plan.num_microbatches:
        raise InvalidPlanError(
            f"a batch of {plan.program.batch_size} does not divide into {plan.num_microbatches} microbatches"
        )
    if plan.bundle_bytes < 0:
        raise InvalidPlanError(f"bundle_bytes is {plan.bundle_bytes}: at least 0")
    if plan.reducing_bytes < 0:
        raise InvalidPlanError(f"reducing_bytes is {plan.reducing_bytes}: at least 0")
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
    return lower(plan)


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
    for role, tier in (("state_tier", layouts.state_tier), ("stored_tier", layouts.stored_tier)):
        if tier not in STATE_TIERS:
            known = ", ".join(repr(each) for each in STATE_TIERS)
            raise InvalidPlanError(f"{where}: {role} is {tier!r}; it can be {known}")
    if layouts.fetched and not layouts.state_tier:
        raise InvalidPlanError(
            f"{where}: its state is to be fetched to the device, where it is already; give it a state_tier"
        )
    if layouts.grad_tier and not (layouts.staged and layouts.grad_tier == layouts.state_tier):
        raise InvalidPlanError(
            f"{where}: grad_tier is {layouts.grad_tier!r}; a gradient waits where its parameter is updated (''), or on "
            "the tier of states that come to their update: those on disk, or fetched ones"
        )
    if layouts.stored_tier and name in trained_params(plan.program):
        if layouts.state_tier != layouts.stored_tier or layouts.state != layouts.stored:
            raise InvalidPlanError(
                f"{where}: stored on the {layouts.stored_tier} as {layouts.stored}, but its state is "
                f"{layouts.state} on the {layouts.state_tier or 'device'}; give the state the same layout and tier"
            )


def _verify_layout(text: str, shape: tuple[int, ...], mesh_shape: tuple[int, ...], where: str, partial: bool) -> None:
    layout = parse_layout(text)
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
