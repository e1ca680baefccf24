"""Memory told to people: each rank class at its peak, the largest tensors alive then, and bytes over the step.

The numbers are `cost_models.simulator.peak_attribution`'s; here they get words: the segment kind's name, how a tensor
lies, which op made it on whose line, who reads it next. Terminal, HTML and JSON read the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from paraplan.cost_models.simulator.live_storages import Place
from paraplan.cost_models.simulator.peak_attribution import BytesRole, Peak, RoleBytes, Tensor, peak_of
from paraplan.cost_models.simulator.rank_trace import RankTrace, Simulation
from paraplan.ir.execution.name import Name
from paraplan.ir.execution.name import Role as OuterRole
from paraplan.ir.execution.rank_program import Block, Instr, InstrKind, RankProgram, StepKind
from paraplan.ir.machine.mesh import Layout, parse_layout
from paraplan.ir.model.graph import target_parts
from paraplan.ir.model.program import Program
from paraplan.ir.model.sources import UNKNOWN, graph_of_block, source_lines
from paraplan.ir.plan import Plan, Stage
from paraplan.ir.struct import Value
from paraplan.report.layouts import generic_name, kind_rows, layout_words, made_layouts

_STEPS = {
    StepKind.ACCUMULATE: "gradient accumulation",
    StepKind.UPDATE: "the optimizer's update",
    StepKind.SEND: "sent to another stage",
    StepKind.RECV: "received from another stage",
    StepKind.AWAIT: "wait for a message",
    StepKind.UPDATED: "wait for the host's update",
}
_BETWEEN = "values between steps"
_OUTPUTS = {BytesRole.BOUNDARY: "output", BytesRole.BOUNDARY_GRADIENTS: "gradient of the input"}


class PartRow(Value, frozen=True, kw_only=True):
    """Bytes of one role: `what` in words, `of` the segments whose they are, how many tensors."""

    what: str
    of: str
    nbytes: int
    count: int


class TensorRow(Value, frozen=True, kw_only=True):
    """Equal tensors alive at the peak: those of one name in equal layers and microbatches.

    Attributes:
        name: the parameter's, input's or value's, with `*` for the layer's number.
        count: how many.
        what, of: their role, and the segments (and microbatches) whose they are.
        tier: "" for the device.
        nbytes, dtype, shape: of one, as the rank holds it.
        layout: in words; "" where it is no value of the model (a bundle, a buffer).
        made_by, source: the op, and the user's line; "" where there is none.
        read_by, read_source: who reads the first of them next, likewise; "" for nobody in this step.
        reads_now: whether that is what runs at the peak.
    """

    name: str
    count: int
    what: str
    of: str
    tier: str
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    layout: str
    made_by: str
    source: str
    read_by: str
    read_source: str
    reads_now: bool


class MemoryTold(Value, frozen=True, kw_only=True):
    """Memory of a rank class.

    Attributes:
        ranks: of the class.
        peak_bytes: of the device; `parts` add up to it.
        memory_bytes: what the device has.
        at_s, running, source: when the peak is, what runs then, in words, and whose line that is.
        parts: bytes by role; tiers: the same at that instant, per tier.
        tier_peak_bytes: the most each tier has at any instant.
        largest: tensors, the largest first; count: how many there are in all.
        rounding_bytes: what the device's allocator adds to these tensors by rounding them up.
        curve: of equal stretches of the step, the most bytes alive in each.
        step_s: length of the step.
    """

    ranks: tuple[int, ...]
    peak_bytes: int
    memory_bytes: int
    at_s: float
    running: str
    source: str
    parts: tuple[PartRow, ...]
    tiers: dict[str, tuple[PartRow, ...]]
    tier_peak_bytes: dict[str, int]
    largest: tuple[TensorRow, ...]
    count: int
    rounding_bytes: int
    curve: tuple[int, ...]
    step_s: float

    def by_role(self) -> tuple[PartRow, ...]:
        """The device's parts, kinds together."""
        found: dict[str, tuple[int, int]] = {}
        for row in self.parts:
            nbytes, count = found.get(row.what, (0, 0))
            found[row.what] = nbytes + row.nbytes, count + row.count
        return tuple(PartRow(what=w, of="", nbytes=b, count=c) for w, (b, c) in found.items())


CURVE = 96
"""Stretches of `MemoryTold.curve`."""


def memory_told(
    plan: Plan, programs: Sequence[RankProgram], simulation: Simulation, largest: int = 10
) -> tuple[MemoryTold, ...]:
    """Memory of every rank class.

    Args:
        plan: any legal plan.
        programs, simulation: of it.
        largest: how many rows of tensors to tell of each class.
    """
    return tuple(class_told(plan, programs, simulation, index, largest) for index in range(len(programs)))


def class_told(
    plan: Plan, programs: Sequence[RankProgram], simulation: Simulation, index: int, largest: int = 10
) -> MemoryTold:
    """Memory of one rank class.

    Args:
        plan, programs, simulation: of a plan.
        index: the rank class.
        largest: how many tensors are told one by one.
    """
    program, trace = programs[index], simulation.traces[index]
    ranks = tuple(rank for rank, of in enumerate(simulation.rank_class) if of == index)
    device = plan.cluster.groups[plan.cluster.device_kinds()[ranks[0]] if ranks else 0].device
    words = _Words(plan, program, ranks[0] if ranks else 0)
    peak = peak_of(program, trace, plan.program, device.backend)
    running, source = words.running(peak)
    tiers = sorted({row.tier for row in peak.roles} - {""})
    return MemoryTold(
        ranks=ranks,
        peak_bytes=peak.nbytes,
        memory_bytes=device.memory_bytes,
        at_s=peak.at_s,
        running=running,
        source=source,
        parts=words.parts(peak.roles, ""),
        tiers={tier: words.parts(peak.roles, tier) for tier in tiers},
        tier_peak_bytes=trace.tier_peak_bytes,
        largest=words.largest(peak, largest),
        count=len(peak.tensors),
        rounding_bytes=peak.rounding_bytes,
        curve=curve(trace),
        step_s=trace.step_s,
    )


def curve(trace: RankTrace, stretches: int = CURVE) -> tuple[int, ...]:
    """The most bytes alive in each of equal stretches of the step."""
    found = [0] * stretches
    begin, before = 0.0, trace.start_bytes
    scale = stretches / trace.step_s if trace.step_s else 0.0
    for point in trace.memory:
        top = max(point.peak_bytes, before)
        for at in range(min(int(begin * scale), stretches - 1), min(int(point.end_s * scale), stretches - 1) + 1):
            found[at] = max(found[at], top)
        begin, before = point.end_s, point.live_bytes
    for at in range(min(int(begin * scale), stretches - 1), stretches):
        found[at] = max(found[at], before)
    return tuple(found)


class _Words:
    """Words for what one rank class has alive."""

    def __init__(self, plan: Plan, program: RankProgram, rank: int) -> None:
        self.plan, self.program, self.model = plan, program, plan.program
        self.stages = [stage for stage in plan.stages if any(rank in mesh.devices for mesh in stage.meshes)]
        self.stages = self.stages or [plan.stages[0]]
        self.mesh = next((mesh for mesh in self.stages[0].meshes if rank in mesh.devices), self.stages[0].mesh)
        self.locate, self.graphs = source_lines(plan.program), graph_of_block(plan.program)
        self.layouts = cache(self._layouts)
        self.labels = {kind: label for stage in self.stages for kind, label in _labels(plan.program, stage).items()}

    def parts(self, roles: Sequence[RoleBytes], tier: str) -> tuple[PartRow, ...]:
        """Rows of the device or a tier."""
        return tuple(
            PartRow(what=row.role.value, of=self._kind(row.kind), nbytes=row.nbytes, count=row.count)
            for row in roles
            if row.tier == tier
        )

    def running(self, peak: Peak) -> tuple[str, str]:
        """What runs at the peak, and the user's line."""
        at, instr = peak.place
        if at < 0:
            return "nothing yet: it is before the step", ""
        step = self.program.steps[at]
        op, source = self._place((at, instr))
        where = self._kind(self.model.segments[step.segment].kind) if step.segment >= 0 else ""
        what = " ".join((op or _BETWEEN, *((f"of {where},",) if where else ()), f"in action {step.action}"))
        return what, source

    def largest(self, peak: Peak, rows: int) -> tuple[TensorRow, ...]:
        """The largest tensors, equal ones in one row."""
        groups: dict[object, list[Tensor]] = {}
        for each in peak.tensors:
            key = (generic_name(self._name(each)), each.role, each.kind, each.tier, each.nbytes, each.dtype, each.shape)
            if key not in groups and len(groups) == rows:
                continue
            groups.setdefault(key, []).append(each)
        return tuple(self._row(group, peak.place) for group in groups.values())

    def _row(self, group: list[Tensor], now: Place) -> TensorRow:
        readers = [each for each in group if each.reader is not None]
        each = min(readers, key=lambda each: each.reader or now) if readers else group[0]
        made_by, source = self._place(each.maker) if each.maker[0] >= 0 else ("", "")
        read_by, read_source = ("", "") if each.reader is None else self._place(each.reader)
        name = self._name(each)
        return TensorRow(
            name=generic_name(name) if len(group) > 1 else name,
            count=len(group),
            what=each.role.value,
            of=self._of(group),
            tier=each.tier,
            nbytes=each.nbytes,
            dtype=each.dtype,
            shape=each.shape,
            layout=self._layout(each),
            made_by=made_by,
            source=source,
            read_by=read_by,
            read_source=read_source,
            reads_now=each.reader == now,
        )

    def _place(self, place: tuple[int, int]) -> tuple[str, str]:
        """An instruction's op in words, and the user's line."""
        at, index = place
        step = self.program.steps[at]
        if step.kind is not StepKind.CALL or index < 0:
            return _STEPS.get(step.kind, ""), ""
        block = self.program.blocks[step.block]
        instr = block.instrs[index]
        line = self.locate(block, instr.origin)
        return self._op(block, instr), "" if line == UNKNOWN else line

    def _op(self, block: Block, instr: Instr) -> str:
        """`linear`; of what moves an op's value, `all_gather over tp, of linear`."""
        name = _short(instr.target)
        if instr.kind is InstrKind.COPY:
            return f"{instr.target} {'to' if instr.target in ('offload', 'store') else 'from'} {instr.tier}"
        if instr.kind is InstrKind.COLLECTIVE and self.program.mesh_axes:
            name = f"{instr.target} over {self.program.mesh_axes[instr.axis]}"
        graph = self.graphs(block)
        known = graph is not None and 0 <= instr.origin < len(graph.ops)
        if graph is None or not known or not (instr.layout_change or instr.kind is not InstrKind.OP):
            return name
        return f"{name}, of {_short(graph.ops[instr.origin].target)}"

    def _name(self, each: Tensor) -> str:
        """The parameter's or input's name; else what the program calls the value."""
        if each.role in _OUTPUTS:
            return _OUTPUTS[each.role]
        name = each.name if each.holder is None else self._held(each.holder)
        return f"{name} and {each.others} more in one buffer" if each.others and each.shape else name

    def _held(self, name: Name) -> str:
        """What people call a value of the outer namespace."""
        if name in self.program.outer:
            return self.program.outer[name].source
        match name.role:
            case OuterRole.ACCUMULATOR | OuterRole.GRADIENT | OuterRole.TIED:
                return f"gradient of {name.source}"
            case OuterRole.UNDER_WAY:
                return "a bundle under way"
            case OuterRole.GATHERED:
                return f"{self.model.segments[name.segment].params[name.number]}, gathered"
            case OuterRole.FETCHED:
                return f"{self.model.segments[name.segment].params[name.number]}, fetched"
            case OuterRole.SAVED:
                return name.source
        return str(name)

    def _of(self, group: list[Tensor]) -> str:
        """`segments 1, 3 (h.*: mlp), microbatch 0`."""
        steps = [self.program.steps[each.maker[0]] for each in group if each.maker[0] >= 0]
        if group[0].kind < 0 or not steps:
            return ""
        micro = sorted({step.microbatch for step in steps if step.microbatch >= 0})
        of = "" if self.program.num_microbatches == 1 else _several(", microbatch", "es", micro)
        segments = _several("segment", "s", sorted({step.segment for step in steps}))
        return f"{segments} ({self._kind(group[0].kind)}){of}"

    def _kind(self, kind: int) -> str:
        return self.labels.get(kind, self.model.kinds[kind].name) if kind >= 0 else ""

    def _layout(self, each: Tensor) -> str:
        """How it lies, where that is known: values there before the step, gradients, and what ops made."""
        if self.mesh.size == 1:
            return ""
        if each.holder is not None and each.holder in self.program.outer:
            return layout_words(parse_layout(self.program.outer[each.holder].layout), self.mesh)
        at, index = each.maker
        step = self.program.steps[at]
        if index < 0 or step.segment < 0 or each.others:
            return ""
        block = self.program.blocks[step.block]
        instr, graph = block.instrs[index], self.graphs(block)
        if graph is None or not 0 <= instr.origin < len(graph.ops) or instr.layout_change:
            return ""
        op = graph.ops[instr.origin]
        if instr.kind is not InstrKind.OP or instr.target != op.target or each.out >= len(op.outs):
            return ""
        found = self.layouts(step.segment).get(op.outs[each.out] or "")
        return "" if found is None else layout_words(found, self.mesh)

    def _layouts(self, segment: int) -> dict[str, Layout]:
        stage = next(each for each in self.stages if each.first <= segment < each.stop)
        choice = stage.choices[stage.segment_choice[segment - stage.first]]
        return made_layouts(self.model.kinds[choice.kind].graph, choice)


def _labels(program: Program, stage: Stage) -> dict[int, str]:
    """Kind -> what it holds."""
    numbers = {kind.name: index for index, kind in enumerate(program.kinds)}
    return {numbers[row.name]: row.label for row in kind_rows(program, stage)}


def _several(word: str, plural: str, numbers: list[int]) -> str:
    """`segments 1, 3`, or "" for none."""
    if not numbers:
        return ""
    text = ", ".join(map(str, numbers)) if len(numbers) < 9 else f"{numbers[0]} to {numbers[-1]} ({len(numbers)})"
    return f"{word}{plural if len(numbers) > 1 else ''} {text}"


def _short(target: str) -> str:
    """`aten.mm.default` as "mm"."""
    return target_parts(target).name or target
