"""A plan's prediction: the simulation said in the terms of `ir.plan.Prediction`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from paraplan.cost_models.clocks import with_clocks
from paraplan.cost_models.costs import Costs
from paraplan.cost_models.ops.roofline import OpWork, op_cost, rate_of, registered_work_of
from paraplan.cost_models.profiles.measured import INTERPOLATED, MEASURED, MODELLED
from paraplan.cost_models.simulator.allocator_replay import reserved_bytes
from paraplan.cost_models.simulator.rank_trace import Simulation
from paraplan.cost_models.simulator.simulate import simulate
from paraplan.ir.errors import CostModelError, PlanMismatchError
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.execution.schedule import split_classes
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.model.graph import Graph, Op, Phase
from paraplan.ir.model.program import Program, SegmentKind
from paraplan.ir.plan import Plan, Prediction
from paraplan.ir.process.memo import SESSION, Lately, Same
from paraplan.ir.profile import UPDATE, VIEW
from paraplan.ir.sizes import say_size
from paraplan.rules.carried_rules import registered_work

_COSTS: Lately[Costs] = SESSION.lately("predict.costs", 32)


def forward_flops(program: Program) -> dict[str, int]:
    """Flops of every matrix product of the model's forward over the global batch, each counted once, by the dtype of
    its operands: what runs, be it by precision, by autocast or by the model's own casts."""
    per_kind = [_forward_flops(kind.graph) for kind in program.kinds]
    return dict(sum((per_kind[segment.kind] for segment in program.segments), Counter()))


def _forward_flops(graph: Graph) -> Counter[str]:
    total: Counter[str] = Counter()
    for op in graph.ops:
        if op.phase is Phase.FORWARD and (work := _work(graph, op)).flops:
            total[work.dtype] += work.flops
    return total


def _work(graph: Graph, op: Op) -> OpWork:
    inputs = tuple(graph.values[name] for name in op.tensors)
    outputs = tuple(None if name is None else graph.values[name] for name in op.outs)
    registered = registered_work(op, [spec.shape for spec in inputs])
    if registered is None:
        return op_cost(op.target, op.args, op.kwargs, inputs, outputs)
    return registered_work_of(registered, inputs, outputs)


def most_rows(program: Program) -> float:
    """The most rows of the global batch that a product of the forward takes a weight to: of a token each, or of a place
    of an image; 0 where no weight is in a product."""
    return max((_most_rows(kind) for kind in program.kinds), default=0.0)


def _most_rows(kind: SegmentKind) -> float:
    graph, weights, most = kind.graph, set(kind.params), 0.0
    for op in graph.ops:
        if op.phase is not Phase.FORWARD:
            continue
        own = [name for name in op.tensors if name in weights]
        if len(own) == len(op.tensors):
            weights.update(name for name in op.outs if name is not None)
        elif sizes := [graph.values[name].numel for name in own if len(graph.values[name].shape) > 1]:
            most = max(most, _work(graph, op).flops / (2 * max(sizes)))
    return most


def priced_on(
    plan: Plan, programs: Sequence[RankProgram], cluster: ClusterSpec
) -> tuple[Plan, tuple[RankProgram, ...]]:
    """A plan's decisions on another cluster of as many devices, priced anew; nothing is proved of it.

    Args:
        plan: whose decisions.
        programs: its programs.
        cluster: of as many devices.
    Raises:
        PlanMismatchError: it has another number of devices.
    """
    if cluster.num_devices != plan.cluster.num_devices:
        raise PlanMismatchError(
            f"the plan is for {plan.cluster.num_devices} devices ({plan.cluster.name}), "
            f"{cluster.name} has {cluster.num_devices}; plan again for it"
        )
    cluster = with_clocks(cluster, plan.program, plan.optimizer)
    old = plan.schedule
    schedule = split_classes(old, cluster.device_kinds())
    first = [schedule.rank_class.index(index) for index in range(len(schedule.classes))]
    moved = msgspec.structs.replace(
        plan, cluster=cluster, schedule=schedule, prediction=None, certificate=None, profile=None
    )
    there = tuple(programs[old.rank_class[rank]] for rank in first)
    return msgspec.structs.replace(moved, prediction=predict(moved, there)), there


def model_flops(program: Program) -> int:
    """Flops the model needs per step: three times the forward's (Chowdhery et al. 2022, appendix B).

    Nothing a plan adds (recomputation, work done on several ranks) counts.
    """
    return 3 * sum(forward_flops(program).values())


def plan_costs(plan: Plan) -> tuple[Costs, ...]:
    """Per rank class of the schedule, what things cost on its stage's mesh; plans alike share them."""
    return _costs_by_class(
        plan,
        lambda mesh, new: _COSTS.get(
            (Same(plan.cluster), mesh, Same(plan.profile), plan.optimizer.timed_as, plan.compiled), new
        ),
    )


def _costs_by_class(plan: Plan, made: Callable[[Mesh, Callable[[], Costs]], Costs]) -> tuple[Costs, ...]:
    meshes = dict.fromkeys(mesh for stage in plan.stages for mesh in stage.meshes)
    per_mesh = {
        mesh: made(mesh, partial(Costs, plan.cluster, mesh, plan.profile, plan.optimizer.timed_as, plan.compiled))
        for mesh in meshes
    }
    mesh_of = {device: mesh for mesh in meshes for device in mesh.devices}
    first_rank: dict[int, int] = {}
    for rank, rank_class in enumerate(plan.schedule.rank_class):
        first_rank.setdefault(rank_class, rank)
    anywhere = plan.stages[0].mesh
    return tuple(
        per_mesh[mesh_of.get(first_rank.get(index, 0), anywhere)] for index in range(len(plan.schedule.classes))
    )


def simulate_plan(plan: Plan, programs: Sequence[RankProgram]) -> Simulation:
    """Simulate a plan's lowered programs, one per rank class of its schedule.

    Raises:
        CostModelError: see `simulate`.
    """
    return simulate(programs, plan_costs(plan), plan.schedule.rank_class)


def check_room(plan: Plan, simulation: Simulation) -> None:
    """What waits on tiers fits there.

    Raises:
        CostModelError: it does not; says what is missing.
    """
    for tier, size in sorted(simulation.tier_peak_bytes.items()):
        room = _room_bytes(plan, tier)
        if size > room:
            raise CostModelError(
                f"the plan has {say_size(size)} per device wait on {tier}, where {plan.cluster.name} has room for "
                f"{say_size(room)}: {say_size(size - room)} are missing; offload less, or describe more "
                f"({', '.join(kind.room for kind in TIERS.values())} of a node)"
            )


def _room_bytes(plan: Plan, tier: str) -> int:
    devices = tuple(device for stage in plan.stages for mesh in stage.meshes for device in mesh.devices)
    return plan.cluster.room_bytes(tier, devices)


def predict(plan: Plan, programs: Sequence[RankProgram], simulation: Simulation | None = None) -> Prediction:
    """What the simulator says of a plan.

    mfu = Σ over dtypes of (model_flops / Σ over the cluster's devices of the dtype's peak rate) / step_s

    Args:
        plan: the plan; its own prediction is not read.
        programs: its lowered programs, one per rank class.
        simulation: of these programs, where it was already made.
    Raises:
        CostModelError: see `simulate`; or a device has no rate for a dtype that runs, or no room on a tier.
    """
    result = simulation or simulate_plan(plan, programs)
    check_room(plan, result)
    program = plan.program
    tokens = math.prod(next(iter(program.step_batch.values())).spec.shape[:2]) if program.batch else 0
    step, at_peak_s = result.step_s, program.apart * _at_peak_s(program, plan.cluster)
    return Prediction(
        step_s=step,
        peak_bytes=result.peak_bytes,
        compute_s=result.compute_s,
        exposed_comm_s=result.exposed_comm_s,
        tokens_per_s=tokens / step if step else 0.0,
        mfu=at_peak_s / step if step else 0.0,
        tier_peak_bytes=result.tier_peak_bytes,
        exposed_copy_s=result.exposed_copy_s,
    )


def _at_peak_s(program: Program, cluster: ClusterSpec) -> float:
    """Seconds the model's flops take the whole cluster at the peak rate of the dtype that each is in."""
    return sum(
        3 * flops / sum(group.nodes * group.devices_per_node * rate_of(group.device, dtype) for group in cluster.groups)
        for dtype, flops in forward_flops(program).items()
    )


def with_reserved(plan: Plan, programs: Sequence[RankProgram], room: int | tuple[int, ...] | None = None) -> Plan:
    """The plan whose prediction says what allocators reserve, where its devices have a caching one (CUDA's).

    Args:
        plan, programs, room: as of `reserved_of`.
    Raises:
        CostModelError: a program names what does not exist.
    """
    reserved = reserved_of(plan, programs, room)
    if plan.prediction is None or not reserved:
        return plan
    return msgspec.structs.replace(plan, prediction=msgspec.structs.replace(plan.prediction, reserved_bytes=reserved))


def reserved_of(
    plan: Plan, programs: Sequence[RankProgram], room: int | tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Per rank class, what its allocator reserves; nothing where devices have no caching one. What it caches it gives
    back before it takes more than there is room for, so that less room may make it reserve less.

    Args:
        plan: what is run.
        programs: per rank class; of a plan of many microbatches maybe those of the first ones.
        room: bytes that any device has for the plan, or per device what each has; None for what the plan says
            (`Plan.room_bytes`).
    Raises:
        CostModelError: a program names what does not exist.
    """
    if any(group.device.backend != "cuda" for group in plan.cluster.groups):
        return ()
    rooms = plan.room_bytes if room is None else [room] * plan.cluster.num_devices if isinstance(room, int) else room
    least: dict[int, int] = {}  # per rank class
    for of, here in zip(plan.schedule.rank_class, rooms, strict=True):
        least[of] = min(least.get(of, here), here)
    found: dict[tuple[int, int], int] = {}
    for of, program in enumerate(programs):
        key = id(program), least[of]
        found[key] = found[key] if key in found else reserved_bytes(program, least[of])
    return tuple(found[id(program), least[of]] for of, program in enumerate(programs))


def with_used_profile(plan: Plan, programs: Sequence[RankProgram]) -> Plan:
    """The plan with no more of its profile than its price rests on, and a note of what was measured.

    The plan's own simulation is then the same without the profile's file.

    Raises:
        CostModelError: see `simulate`.
    """
    if plan.profile is None:
        return plan
    costs = _costs_by_class(plan, lambda mesh, new: new())  # that know of no other plan's ops
    simulate(programs, costs, plan.schedule.rank_class)
    used = {op.full_key: (op, how) for each in costs for op, how in each.used}
    counts = Counter(how for _, how in used.values())
    groups = {(link.size, link.local_size) for each in costs for link in each.moves.links}
    kept = tuple(op for _, (op, how) in sorted(used.items()) if how != MODELLED)
    always = tuple(
        op for op in plan.profile.ops if op.target in (VIEW, UPDATE + plan.optimizer.timed_as) and op not in kept
    )
    collectives = tuple(each for each in plan.profile.collectives if (each.size, each.local_size) in groups)
    profile = msgspec.structs.replace(plan.profile, ops=(*kept, *always), collectives=collectives)
    modelled = sorted({op.target for op, how in used.values() if how == MODELLED})
    note = (
        f"times of {counts[MEASURED]} of {len(used)} local ops are measured ({profile.source}: {profile.name}, torch "
        f"{profile.torch}), {counts[INTERPOLATED]} interpolated, {counts[MODELLED]} modelled"
        + (f" ({', '.join(modelled[:8])})" if modelled else "")
        + (
            "; collectives are measured"
            if collectives
            else "; collectives are modelled"
            if any(size > 1 for size, _ in groups)
            else ""
        )
    )
    return msgspec.structs.replace(plan, profile=profile, notes=(*plan.notes, note))
