"""Pipelines with pinned stages and schedule.

The stages' meshes are equal in shape. Sharding is chosen once for one stage's devices as if they held the whole model,
with memory left out; the stages then take the choices of their segments. Stages not given are cut so that the slowest
takes as little time as can be: a dynamic program over segments in order, each as long as simulated. Memory is what the
simulation of the pipeline says; where it does not fit, "selective" and "full" recomputation are tried before giving up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from paraplan.cost_models.bound import rank_bound
from paraplan.cost_models.predict import predict, simulate_plan, with_used_profile
from paraplan.cost_models.simulate import Simulation
from paraplan.ir.cluster import ClusterSpec
from paraplan.ir.errors import ConstraintError, InfeasibleError
from paraplan.ir.lower import lower
from paraplan.ir.micro import splittable
from paraplan.ir.plan import Certificate, Plan
from paraplan.ir.program import Program
from paraplan.planner.assemble import Decisions, Job, assemble
from paraplan.planner.constraints import Constraints
from paraplan.planner.overlap import in_pieces, piece_counts
from paraplan.planner.pipeline import pipelined
from paraplan.planner.recompute.stage import preset_activations
from paraplan.planner.schedules.named import NAMED, named_orders
from paraplan.planner.schedules.problem import holders_of
from paraplan.planner.schedules.transfers import complete

Choose = Callable[[Job, Constraints], Decisions]
UNLIMITED = 1 << 60
SCOPE = "these stages, this schedule and this sharding: the work of the busiest stream of any rank"


def search_pipeline(job: Job, constraints: Constraints, choose_sharding: Choose) -> Plan:
    """The pipeline the constraints ask for.

    Args:
        job: what is planned.
        constraints: with `pp`.
        choose_sharding: of one stage's devices, with everything kept.
    Raises:
        ConstraintError: the devices, segments or microbatches cannot be divided so.
        InfeasibleError: it does not fit; says which rank, and by how much.
    """
    positions, name = constraints.pp or 1, constraints.schedule or "1f1b"
    part = replace(job, cluster=first_devices(job.cluster, positions))
    micros = _microbatches(job.program, constraints, positions)
    num_stages = _num_stages(constraints, positions, name, len(job.program.segments))
    orders = named_orders(name, positions, micros, num_stages // positions)
    budget = _budget(job, constraints)
    inner = msgspec.structs.replace(
        constraints, pp=None, schedule=None, stages=None, microbatches=micros, memory_bytes=None,
        memory_reserve_bytes=0, recompute="none",
    )  # fmt: skip
    decisions = choose_sharding(part, inner)
    tried = []
    for recompute in (constraints.recompute,) if constraints.recompute else ("none", "selective", "full"):
        activations = () if recompute == "none" else preset_activations(job.program, recompute)
        whole = assemble(part, replace(decisions, activations=activations))
        bounds = constraints.stages or even_stages(whole, num_stages)
        schedule = complete(name, orders, num_replicas=NAMED[name].num_replicas)
        plan = pipelined(whole, job.cluster, bounds, schedule, holders_of(orders))
        plan = _priced(plan)
        assert plan.prediction is not None
        if max(plan.prediction.peak_bytes) <= budget:
            return _overlapped(plan, constraints, budget)
        tried.append((recompute, plan.prediction.peak_bytes))
    raise InfeasibleError(_overflow(tried, budget, positions))


def _overlapped(plan: Plan, constraints: Constraints, budget: int) -> Plan:
    """The plan with products in the pieces that make it fastest."""
    best = plan
    for count in piece_counts(constraints.overlap):
        tried = _priced(msgspec.structs.replace(in_pieces(plan, count), notes=()))
        assert tried.prediction is not None and best.prediction is not None
        if tried.prediction.step_s < best.prediction.step_s and max(tried.prediction.peak_bytes) <= budget:
            best = msgspec.structs.replace(tried, notes=plan.notes)
    return best


def _overflow(tried: Sequence[tuple[str | None, tuple[int, ...]]], budget: int, positions: int) -> str:
    each = "; ".join(
        f"recompute={how}: rank class {peaks.index(max(peaks))} peaks at {max(peaks) / 2**30:.3g} GiB"
        for how, peaks in tried
    )
    return (
        f"a pipeline of {positions} stages needs more than the {budget / 2**30:.3g} GiB a device may hold ({each}); "
        "use more stages, more microbatches, or a sharding that holds less (zero, tp)"
    )


def _budget(job: Job, constraints: Constraints) -> int:
    device = min(group.device.memory_bytes for group in job.cluster.groups)
    return min(device, constraints.memory_bytes or device) - constraints.memory_reserve_bytes


def first_devices(cluster: ClusterSpec, positions: int) -> ClusterSpec:
    """The devices of a pipeline's first position, as a cluster of unlimited memory.

    Raises:
        ConstraintError: the devices do not divide, or not along nodes.
    """
    n = cluster.num_devices
    if positions < 1 or n % positions:
        raise ConstraintError(f"pp={positions} does not divide the cluster's {n} devices")
    size, group = n // positions, cluster.groups[0]
    per_node = min(size, group.devices_per_node)
    if size % per_node or group.devices_per_node % per_node or size > group.nodes * group.devices_per_node:
        raise ConstraintError(
            f"pp={positions}: {size} devices a stage do not lie along nodes of {group.devices_per_node}; use a pp that "
            "makes stages of whole nodes, or of equal parts of one"
        )
    device = msgspec.structs.replace(group.device, memory_bytes=UNLIMITED)
    part = msgspec.structs.replace(group, nodes=size // per_node, devices_per_node=per_node, device=device)
    return msgspec.structs.replace(cluster, groups=(part,))


def _microbatches(program: Program, constraints: Constraints, positions: int) -> int:
    """The pinned count, or the first of 4, 2 and 1 times the positions, and of fewer, that the batch divides into."""
    if constraints.microbatches is not None:
        return constraints.microbatches
    counts = (4 * positions, 2 * positions, *range(positions, 0, -1))
    return next(count for count in counts if program.batch_size % count == 0 and splittable(program, count))


def _num_stages(constraints: Constraints, positions: int, name: str, segments: int) -> int:
    each = NAMED[name].stages if name in NAMED else 1
    count = len(constraints.stages) if constraints.stages else positions * each
    if count % positions:
        raise ConstraintError(f"{count} stages cannot lie on pp={positions} positions; give a multiple of {positions}")
    if count > segments:
        raise ConstraintError(
            f"{count} stages (schedule={name}, pp={positions}) are more than the model's {segments} segments; use fewer"
        )
    for index, (first, stop) in enumerate(constraints.stages or ()):
        before = constraints.stages[index - 1][1] if index and constraints.stages else 0
        if first != before or stop <= first or stop > segments:
            raise ConstraintError(
                f"stages: stage {index} is {first}:{stop}; it starts at {before}, holds one segment at least, and the "
                f"model has {segments}"
            )
    if constraints.stages and constraints.stages[-1][1] != segments:
        raise ConstraintError(f"stages end at segment {constraints.stages[-1][1]}, the model has {segments}")
    return count


def even_stages(plan: Plan, num_stages: int) -> tuple[tuple[int, int], ...]:
    """Stages whose slowest takes as little time as can be: [first, stop) each.

    Args:
        plan: of one stage; its simulation says what each segment takes.
        num_stages: at most as many as segments.
    """
    seconds = segment_seconds(plan)
    total = [0.0]
    for each in seconds:
        total.append(total[-1] + each)
    n = len(seconds)
    best = [[float("inf")] * (n + 1) for _ in range(num_stages + 1)]
    cut = [[0] * (n + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for stages in range(1, num_stages + 1):
        for stop in range(stages, n + 1):
            for first in range(stages - 1, stop):
                slowest = max(best[stages - 1][first], total[stop] - total[first])
                if slowest < best[stages][stop]:
                    best[stages][stop], cut[stages][stop] = slowest, first
    found, stop = [], n
    for stages in range(num_stages, 0, -1):
        first = cut[stages][stop]
        found.append((first, stop))
        stop = first
    return tuple(reversed(found))


def segment_seconds(plan: Plan) -> list[float]:
    """What every segment's blocks take in a simulated step of a plan of one stage, waits included."""
    seconds = [0.0] * len(plan.program.segments)
    for span in simulate_plan(plan, lower(plan)).traces[0].spans:
        if span.segment >= 0 and span.stream == "compute":
            seconds[span.segment] += span.end_s - span.start_s
    return seconds


def _priced(plan: Plan) -> Plan:
    programs = lower(plan)
    simulation: Simulation = simulate_plan(plan, programs)
    bound = min(rank_bound(trace.work for trace in simulation.traces), simulation.step_s)
    certificate = Certificate(
        status="feasible", objective_s=simulation.step_s, bound_s=bound, bound_scope=SCOPE,
        gap=(simulation.step_s - bound) / simulation.step_s,
    )  # fmt: skip
    note = (
        f"a pipeline of {len(plan.stages)} stages, schedule {plan.schedule.name}; sharding was chosen for one stage's "
        "devices as if they held the whole model"
    )
    prediction = predict(plan, programs, simulation)
    plan = msgspec.structs.replace(plan, prediction=prediction, certificate=certificate, notes=(*plan.notes, note))
    return plan if plan.profile is None else with_used_profile(plan, programs)
