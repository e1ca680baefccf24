"""A plan told to people: facts, layouts, where time and memory go. Text, HTML and terminal read the same rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paraplan.cost_models.predict import plan_costs
from paraplan.cost_models.simulator.rank_trace import RankTrace, Simulation
from paraplan.ir.execution.memory_actions import Act, Actions, parse_actions
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.mesh import parse_layout
from paraplan.ir.model.program import Program
from paraplan.ir.plan import Plan, Prediction, Stage
from paraplan.report.breakdown import CollectiveRow, TimeRow, time_breakdown
from paraplan.report.layouts import KindRow, float8_params, generic_name, kind_rows, layout_words, merged_rows
from paraplan.report.memory_report import MemoryTold, class_told
from paraplan.report.units import show_bytes, show_count, show_seconds, show_share

MOST_STAGES = 4
"""That have a line each where a plan is told in short."""

Fact = tuple[str, str]
Card = tuple[str, str, str]
"""A label, its value, and what is said beside it."""


@dataclass(frozen=True)
class Explanation:
    """Everything the faces show.

    Attributes:
        title: model and cluster in one line.
        facts: labelled lines: what is planned, for what.
        verdict: labelled lines: time, memory, certificate.
        cards: of these, what a page shows largest.
        kinds: per stage, its kinds.
        batch: labelled lines: how each batch input lies.
        times, collectives: of the busiest rank.
        memory: of the rank class with the highest peak.
        memory_bytes: what a device has.
        trace: the busiest rank's.
        notes: the plan's.
    """

    title: str
    facts: tuple[Fact, ...]
    verdict: tuple[Fact, ...]
    cards: tuple[Card, ...]
    kinds: tuple[tuple[KindRow, ...], ...]
    batch: tuple[Fact, ...]
    times: tuple[TimeRow, ...]
    collectives: tuple[CollectiveRow, ...]
    memory: MemoryTold
    memory_bytes: int
    trace: RankTrace
    notes: tuple[str, ...]


def explain(plan: Plan, programs: Sequence[RankProgram], simulation: Simulation) -> Explanation:
    """Tell a plan.

    Args:
        plan: any legal plan.
        programs: its rank programs.
        simulation: of these.
    """
    busiest = simulation.busiest
    fullest = max(range(len(programs)), key=lambda index: simulation.peak_bytes[index])
    times, collectives = time_breakdown(programs[busiest], simulation.traces[busiest], plan_costs(plan)[busiest])
    stage = plan.stages[0]
    return Explanation(
        title=title(plan),
        facts=facts(plan),
        verdict=verdict(plan, simulation),
        cards=_cards(plan, simulation),
        kinds=tuple(kind_rows(plan.program, each) for each in plan.stages),
        batch=tuple((name, layout_words(parse_layout(text), stage.mesh)) for name, text in stage.batch.items()),
        times=times,
        collectives=collectives,
        memory=class_told(plan, programs, simulation, fullest),
        memory_bytes=device_memory(plan),
        trace=simulation.traces[busiest],
        notes=plan.notes,
    )


def title(plan: Plan) -> str:
    """Model and cluster in one line."""
    return f"{plan.model.display} on {plan.cluster.name}"


HELD = "; weights cast once a step and held"


def facts(plan: Plan) -> tuple[Fact, ...]:
    """What is planned, for what."""
    program = plan.program
    micro = f"{plan.num_microbatches} microbatch{'es' if plan.num_microbatches > 1 else ''}"
    micro += ", each a batch by itself" if program.apart > 1 else ""
    pieces = f"{len(program.segments)} segments of {len(program.kinds)} kinds"
    batch = ", ".join(f"{name} {entry.spec}" for name, entry in program.step_batch.items())
    cluster = plan.cluster
    return (
        ("model", f"{plan.model.display}: {show_count(num_params(program))} parameters, {pieces}"),
        ("batch", batch),
        ("computes in", f"{program.precision}{_summed_in(plan)}, optimizer {plan.optimizer.name}"),
        *((("float8", float8_words(program) + HELD * plan.hold_casts),) if program.precision == "fp8" else ()),
        ("cluster", f"{cluster.name}: {_devices(cluster)}"),
        *((_stage_name(plan, index), _stage_text(plan, stage)) for index, stage in enumerate(plan.stages)),
        ("schedule", f"{plan.schedule.name}, {micro}"),
        ("parameters", "; ".join(dict.fromkeys(layer_words(plan)))),
        ("activations", _activation_words(plan)),
    )


def _summed_in(plan: Plan) -> str:
    return f", gradients summed over ranks in {plan.reduce_dtype}" if plan.reduce_dtype else ""


def float8_words(program: Program) -> str:
    """Which weights are multiplied in float8, forward and backward, and which matrices are not."""
    cast = float8_params(program)
    other = [name for name, param in program.params.items() if len(param.spec.shape) == 2 and name not in cast]
    names = Counter(generic_name(name) for name in cast)
    said = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items()) or "no weight"
    rest = f"; in bfloat16: {', '.join(dict.fromkeys(map(generic_name, other)))}" if other else ""
    return f"{said}: forward, input and weight gradients (values in e4m3, gradients of outputs in e5m2){rest}"


def _activation_words(plan: Plan) -> str:
    """`kept but for what is recomputed: 12 x (h.*: ln_2, mlp): gelu, dropout`, and what waits elsewhere likewise."""
    if plan.memory_actions is not None:
        return _schedule_words(parse_actions(plan.memory_actions))
    rows = merged_rows(plan.program, plan.stages)
    made = [f"{row.instances} x ({row.label}): {row.recomputed}" for row in rows if row.recomputed]
    away = [f"{row.instances} x ({row.label}): {row.away}" for row in rows if row.away]
    cut = [f"{row.instances} x ({row.label}): {row.chunks}" for row in rows if row.chunks]
    parts = [("what is recomputed", made), ("what waits elsewhere", away), ("what runs in chunks", cut)]
    said = [f"{what}: {'; '.join(each)}" for what, each in parts if each]
    return "kept" if not said else "kept but for " + "; and for ".join(said)


def _schedule_words(actions: Actions) -> str:
    """`by a schedule of 136 ops, 12 of them executed again`, and what is copied."""
    runs = [action.index for action in actions if action.act is Act.RUN]
    backs = sum(action.act is Act.BACK for action in actions)
    text = f"by a schedule of {len(set(runs))} ops, {len(runs) - len(set(runs))} executions again"
    return f"{text}, {backs} tensors brought back from elsewhere" if backs else text


def _devices(cluster: ClusterSpec) -> str:
    """`16 x A100-80 with 79.1 GiB, 16 x H100 with 79.1 GiB`."""
    counts: dict[tuple[str, int], int] = {}
    for group in cluster.groups:
        named = (group.device.kind, group.device.memory_bytes)
        counts[named] = counts.get(named, 0) + group.nodes * group.devices_per_node
    return ", ".join(f"{count} x {kind} with {show_bytes(size)}" for (kind, size), count in counts.items())


def stages_in_short(plan: Plan) -> tuple[Fact, ...]:
    """The stages in one line where they are many on meshes of one shape; else a line each."""
    sizes = [stage.stop - stage.first for stage in plan.stages]
    if len(sizes) <= MOST_STAGES or len({mesh_text(stage) for stage in plan.stages}) > 1:
        return tuple((_stage_name(plan, index), _stage_text(plan, stage)) for index, stage in enumerate(plan.stages))
    positions = len({stage.mesh for stage in plan.stages})
    each = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else str(sizes[0])
    groups = f"on {positions} groups of devices, " if positions < len(sizes) else ""
    return (("stages", f"{len(sizes)} of {each} segments {groups}each on {mesh_text(plan.stages[0])}"),)


def _stage_name(plan: Plan, index: int) -> str:
    return "mesh" if len(plan.stages) == 1 else f"stage {index}"


def _stage_text(plan: Plan, stage: Stage) -> str:
    if len(plan.stages) == 1:
        return mesh_text(stage)
    kinds = dict.fromkeys(plan.cluster.group_of(device).device.kind for device in stage.mesh.devices)
    of = f" of {' and '.join(kinds)}" if len(plan.cluster.groups) > 1 else ""
    return f"segments {stage.first}:{stage.stop} on {mesh_text(stage)}{of}"


def mesh_text(stage: Stage) -> str:
    """`dp 2 x tp 4`; one device has no axes."""
    return (
        " x ".join(f"{axis} {size}" for axis, size in zip(stage.mesh.axes, stage.mesh.shape, strict=True))
        or "one device"
    )


def layer_words(plan: Plan) -> list[str]:
    """How most parameter bytes lie: "split over tp (dim 1) 61 %"."""
    sizes: dict[str, int] = {}
    for stage in plan.stages:
        for kind in kind_rows(plan.program, stage):
            for row in kind.params:
                total = row.count
                for size in row.shape:
                    total *= size
                sizes[row.words] = sizes.get(row.words, 0) + total
    whole = sum(sizes.values())
    return [f"{words} {show_share(size, whole)}" for words, size in sorted(sizes.items(), key=lambda item: -item[1])]


def _reserved_facts(plan: Plan) -> tuple[Fact, ...]:
    """What the allocator reserves, where that was predicted, and who has what is left."""
    if plan.prediction is None:
        return ()
    reserved, memory = max(plan.prediction.reserved_bytes, default=0), device_memory(plan)
    beyond = "" if reserved <= memory else "; more than there is: expandable segments may be needed"
    left = memory - (reserved or max(plan.prediction.peak_bytes))
    others = plan.cluster.reserves_of(min((each.device for each in plan.cluster.groups), key=lambda x: x.memory_bytes))
    who = ", ".join(f"{show_bytes(each.nbytes)} for the {each.what}" for each in others if each.nbytes)
    short = "" if left >= sum(each.nbytes for each in others) else "; less than that"
    return (
        *((("reserved", f"{show_bytes(reserved)} by torch's caching allocator{beyond}"),) if reserved else ()),
        *((("left free", f"{show_bytes(max(left, 0))}, of which {who}{short}"),) if who else ()),
    )


def verdict(plan: Plan, priced: Simulation | Prediction) -> tuple[Fact, ...]:
    """Time, memory, and what was proved.

    Args:
        plan: what is told.
        priced: what it comes to: priced now, or what was predicted as it was planned.
    """
    peak, memory = max(priced.peak_bytes), device_memory(plan)
    copies = f", exposed copies {show_seconds(priced.exposed_copy_s)}" if priced.tier_peak_bytes else ""
    found = [
        ("step", show_seconds(priced.step_s)),
        (
            "of it",
            f"compute {show_seconds(priced.compute_s)}, exposed communication {show_seconds(priced.exposed_comm_s)}"
            f"{copies}",
        ),
        ("peak memory", f"{show_bytes(peak)} per device of {show_bytes(memory)} ({show_share(peak, memory)})"),
        *_reserved_facts(plan),
        *(_tier_fact(plan, tier, size) for tier, size in sorted(priced.tier_peak_bytes.items())),
    ]
    if plan.prediction is not None:
        found.append(
            (
                "throughput",
                f"{show_count(plan.prediction.tokens_per_s)} tokens/s, mfu {100 * plan.prediction.mfu:.1f} %",
            )
        )
    if plan.certificate is not None:
        c = plan.certificate
        said = f"{show_seconds(c.bound_s)}, gap {100 * c.gap:.1f} %, {c.status} (fixed: {c.bound_scope})"
        found.append(("bound", said if c.bound_s > 0 else "none: nothing is proved of faster plans"))
    return tuple(found)


def _cards(plan: Plan, simulation: Simulation) -> tuple[Card, ...]:
    """Of the verdict, what a page shows largest."""
    peak, memory = max(simulation.peak_bytes), device_memory(plan)
    found = [
        ("step", show_seconds(simulation.step_s), ""),
        ("peak memory", show_bytes(peak), f"of {show_bytes(memory)} ({show_share(peak, memory)})"),
    ]
    if (told := plan.prediction) is not None:
        found.append(("throughput", f"{show_count(told.tokens_per_s)} tokens/s", f"mfu {100 * told.mfu:.1f} %"))
    if (proved := plan.certificate) is not None:
        gap = (f"gap {100 * proved.gap:.1f} %", show_seconds(proved.bound_s)) if proved.bound_s > 0 else ("–", "none")
        found.append(("to the bound", *gap))
    return tuple(found)


def _tier_fact(plan: Plan, tier: str, size: int) -> Fact:
    room = min(plan.cluster.room_bytes(tier, stage.mesh.devices) for stage in plan.stages)
    return f"on {tier}", f"{show_bytes(size)} per device of {show_bytes(room)} ({show_share(size, room)})"


def device_memory(plan: Plan) -> int:
    """Bytes the smallest device has."""
    return min(group.device.memory_bytes for group in plan.cluster.groups)


def summary(plan: Plan, priced: Prediction) -> str:
    """A plan in a few lines of plain text.

    Args:
        plan, priced: as for `verdict`.
    """
    rows = [*facts(plan), *verdict(plan, priced), *(("note", note) for note in plan.notes)]
    width = max(len(label) for label, _ in rows)
    return "\n".join(
        [
            f"Plan: {plan.model.display} on {plan.cluster.name}",
            *(f"  {label:<{width}}  {value}" for label, value in rows),
        ]
    )


def num_params(program: Program) -> int:
    """Elements of all parameters."""
    return sum(param.spec.numel for param in program.params.values())
