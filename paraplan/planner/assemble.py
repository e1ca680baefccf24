"""From decisions per kind and class to a plan."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import msgspec

from paraplan.cost_models.clocks import with_clocks
from paraplan.ir.errors import MixedSamples
from paraplan.ir.execution.schedule import accumulate, split_classes
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.model.op_rule import DISCOVERED
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import Optimizer
from paraplan.ir.param_layouts import ParamLayouts
from paraplan.ir.plan import KindChoice, ModelRef, Plan, Split, Stage
from paraplan.ir.profile import Profile
from paraplan.ir.step_options import ROOMY, StepOptions
from paraplan.planner.decision_classes import param_classes
from paraplan.rules.choices import axis_parts
from paraplan.rules.dims import ROUTING
from paraplan.rules.expansions.route import ROUTED
from paraplan.rules.strategies import kept_whole
from paraplan.rules.time_axis import ProgramMicro, program_micro, smallest_divisor


@dataclass(frozen=True)
class Job:
    """What is planned for: everything but the decisions.

    Attributes:
        program, cluster, optimizer: as in the plan; the cluster with the clocks of this job (`cost_models.clocks`).
        model: which model, for the plan's readers.
        versions: what the plan is made with.
        profile: measured times of the cluster's device, if there are any.
        compiled, reduce_dtype, sum_products: as in the plan.
    """

    program: Program
    cluster: ClusterSpec
    optimizer: Optimizer
    model: ModelRef
    versions: dict[str, str]
    profile: Profile | None = None
    compiled: bool = False
    reduce_dtype: str = ""
    sum_products: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "cluster", with_clocks(self.cluster, self.program, self.optimizer))

    @property
    def launched_s(self) -> float:
        """What the launches of a microbatch's forward take, however many samples it has and whoever shares them."""
        num_ops = sum(len(self.program.kinds[segment.kind].graph.ops) for segment in self.program.segments)
        return num_ops * max(group.device.launch_s for group in self.cluster.groups)


@dataclass(frozen=True)
class Decisions:
    """One choice per kind, one layout per class.

    Attributes:
        mesh: logical mesh.
        num_microbatches: microbatches per step.
        ops: per kind, the strategy key of every op.
        input_grads: per kind, per boundary input, the layout its gradient is handed over in.
        params: per parameter class (order of `param_classes`).
        batch: layout of each batch input.
        activations: per segment, what becomes of values not simply kept for the backward; empty where all are kept.
        splits: per segment, what runs in chunks; empty where nothing does.
        options: of the whole step, as far as they are decided with layouts.
        fixed: whether layouts of parameters are pinned by name, and to be left as they are.
    """

    mesh: Mesh
    num_microbatches: int
    ops: tuple[tuple[str, ...], ...]
    input_grads: tuple[tuple[str | None, ...], ...]
    params: tuple[ParamLayouts, ...]
    batch: dict[str, str]
    activations: tuple[dict[str, str], ...] = ()
    splits: tuple[Split | None, ...] = ()
    options: StepOptions = ROOMY
    fixed: bool = False

    @property
    def key(self) -> Hashable:
        """Equal for equal decisions."""
        fates = tuple(tuple(sorted(each.items())) for each in self.activations)
        batch = tuple(sorted(self.batch.items()))
        layouts = self.ops, self.input_grads, self.params, batch, self.fixed
        return self.mesh, self.num_microbatches, *layouts, fates, self.splits, self.options


def assemble(job: Job, decisions: Decisions) -> Plan:
    """The plan these decisions make; not yet priced."""
    program = job.program
    classes = param_classes(program)
    layouts = {name: lay for cls, lay in zip(classes, decisions.params, strict=True) for name in cls.params}
    choices, chosen = _choices(program, decisions)
    stage = Stage(
        first=0,
        stop=len(program.segments),
        mesh=decisions.mesh,
        choices=choices,
        segment_choice=chosen,
        batch=decisions.batch,
        params={name: layouts[name] for name in program.params if name in layouts},
    )
    kinds, micro = job.cluster.device_kinds(), program_micro(program, decisions.num_microbatches)
    schedule = split_classes(
        accumulate(
            decisions.num_microbatches,
            decisions.mesh.size,
            forwards_first=micro.has_tail,
        ),
        tuple(kinds[device] for device in decisions.mesh.devices),
    )
    return Plan(
        made_with=job.versions,
        model=job.model,
        program=program,
        cluster=job.cluster,
        num_microbatches=decisions.num_microbatches,
        optimizer=job.optimizer,
        **msgspec.structs.asdict(decisions.options),
        stages=(stage,),
        schedule=schedule,
        profile=job.profile,
        compiled=job.compiled,
        reduce_dtype=job.reduce_dtype,
        sum_products=job.sum_products,
        notes=(*_notes(program), *_routing(program, choices), *_apart(program), *_once(micro)),
    )


def decided(plan: Plan, mesh: Mesh) -> Decisions:
    """The decisions of a plan whose stages are sharded alike, without what it recomputes and splits.

    Args:
        plan: of one stage or of a pipeline that one was cut into.
        mesh: of one position's devices, of the shape of its stages'.
    """
    program = plan.program
    choices = {choice.kind: choice for stage in plan.stages for choice in stage.choices}
    layouts = {name: layout for stage in plan.stages for name, layout in stage.params.items()}
    classes = [layouts[cls.params[0]] for cls in param_classes(program)]
    batch = {name: layout for stage in plan.stages for name, layout in stage.batch.items()}
    kinds = range(len(program.kinds))
    return Decisions(
        mesh=mesh,
        num_microbatches=plan.num_microbatches,
        ops=tuple(choices[kind].ops for kind in kinds),
        input_grads=tuple(choices[kind].input_grads for kind in kinds),
        params=tuple(classes),
        batch=batch,
        options=plan.options.before_passes,
    )


def _routing(program: Program, choices: tuple[KindChoice, ...]) -> tuple[str, ...]:
    """What is assumed of mixtures whose tokens go to the ranks of their experts."""
    pairs = (pair for c in choices for pair in zip(c.ops, program.kinds[c.kind].graph.ops, strict=True))
    if not any(ROUTING in [part.does for part in axis_parts(key)] for key, op in pairs if op.target in ROUTED):
        return ()
    return ("tokens go to the ranks of their experts: time is that of even routing, memory that of the worst case",)


def _once(micro: ProgramMicro) -> tuple[str, ...]:
    """What runs on the whole batch though there are several microbatches."""
    if not micro.has_tail:
        return ()
    first, last = micro.tail, len(micro.segments) - 1
    segments = f"segment {first} runs" if first == last else f"segments {first} to {last} run"
    return (f"{segments} once a step on the whole batch, after all forwards: {micro.mixes} mixes samples",)


def _apart(program: Program) -> tuple[str, ...]:
    """What is computed in another way where microbatches are batches by themselves."""
    if program.apart == 1:
        return ()
    why = ""
    try:
        alone = msgspec.structs.replace(program, apart=1)
        why = program_micro(alone, smallest_divisor(program.batch_size)).mixes
    except MixedSamples as fault:
        why = fault.op
    seen = f"what mixes samples ({why}) sees one of them alone" if why else "no op mixes samples"
    return (
        f"each of {program.apart} microbatches of {program.batch_size} rows is a batch by itself, as per_microbatch "
        f"allows and eager gradient accumulation has it: {seen}, buffers are written after each, losses averaged",
    )


def _choices(program: Program, decisions: Decisions) -> tuple[tuple[KindChoice, ...], tuple[int, ...]]:
    """The distinct choices, and which one each segment takes."""
    fates = decisions.activations or ({},) * len(program.segments)
    splits = decisions.splits or (None,) * len(program.segments)
    found: dict[tuple[int, tuple[tuple[str, str], ...], Split | None], int] = {}
    chosen = tuple(
        found.setdefault((segment.kind, tuple(fate.items()), split), len(found))
        for segment, fate, split in zip(program.segments, fates, splits, strict=True)
    )
    choices = tuple(
        KindChoice(
            kind=kind,
            ops=decisions.ops[kind],
            input_grads=decisions.input_grads[kind],
            activations=dict(fate),
            split=split,
        )
        for kind, fate, split in found
    )
    return choices, chosen


def _notes(program: Program) -> tuple[str, ...]:
    """Ops without a written rule: what was found or said of them, and which run replicated."""
    notes: dict[str, None] = {}
    seen: set[tuple[str, str]] = set()
    for kind in program.kinds:
        for op in kind.graph.ops:
            source = kind.graph.source_of(op)
            if kept_whole(op):
                why = f"; {op.rule.reason}" if op.rule is not None and op.rule.reason else ""
                said, text = "whole", f"{op.target} has no sharding rule and runs replicated ({source}){why}"
            elif op.rule is not None:
                how = "found by running it" if op.rule.source == DISCOVERED else "registered"
                said, text = op.rule.text(), f"{op.target} has a rule that was {how}: {op.rule.text()} ({source})"
            else:
                continue
            if (op.target, said) not in seen:
                seen.add((op.target, said))
                notes[text] = None
    return tuple(notes)
