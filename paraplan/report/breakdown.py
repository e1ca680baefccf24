"""Where a step's time goes: one rank class, summed over its program.

Every instruction at its price, grouped by class of op; collectives by what they do and over which axis.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from paraplan.cost_models.communication.collectives import input_bytes_of
from paraplan.cost_models.costs import Costs
from paraplan.cost_models.ops.roofline import is_free, op_name, work_of
from paraplan.cost_models.simulator.rank_trace import RankTrace
from paraplan.ir.execution.rank_program import Block, Instr, InstrKind, RankProgram, StepKind
from paraplan.ir.execution.schedule import ActionKind
from paraplan.ir.model.graph import refs
from paraplan.ir.struct import Value

_CLASS_WORDS = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory": "elementwise, norms, losses",
    "view": "layout copies",
}

UPDATE_WORK = "optimizer update"
_PURPOSES = {ActionKind.F: "forward", ActionKind.B: "backward"}
_AROUND = "gradients, update, loss"


class TimeRow(Value, frozen=True, kw_only=True):
    """Seconds of compute of one class of work, and how many kernels."""

    name: str
    seconds: float
    count: int


class CollectiveRow(Value, frozen=True, kw_only=True):
    """Collectives of one kind over one axis in a step of one rank.

    Attributes:
        name: e.g. "all_reduce".
        axis: the mesh axis.
        link: the level of links that it goes over.
        purpose: "forward", "backward", or what surrounds them.
        count: how many.
        nbytes: put in by one rank, all of them.
        seconds: on the communication stream.
    """

    name: str
    axis: str
    link: str
    purpose: str
    count: int
    nbytes: int
    seconds: float


@dataclass
class _Tally:
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    kernels: Counter[str] = field(default_factory=Counter)
    comm: dict[tuple[str, int, str], list[float]] = field(default_factory=dict)


def time_breakdown(
    program: RankProgram, trace: RankTrace, costs: Costs
) -> tuple[tuple[TimeRow, ...], tuple[CollectiveRow, ...]]:
    """Compute by class of work, longest first, and collectives by kind, axis and purpose.

    Args:
        program: of a rank class.
        trace: what the simulator says of it.
        costs: on its mesh.
    """
    calls: Counter[tuple[str, str]] = Counter()
    for step in program.steps:
        if step.kind is StepKind.CALL:
            calls[step.block, _PURPOSES.get(step.phase, _AROUND) if step.segment >= 0 else _AROUND] += 1
    tally = _Tally()
    for (name, purpose), times in calls.items():
        block = program.blocks[name]
        for instr in block.instrs:
            if instr.kind is InstrKind.OP:
                label = _class_of(block, instr)
                seconds = costs.instr_s(block, instr)
                tally.seconds[label] += times * seconds
                tally.kernels[label] += times if seconds else 0
            elif instr.kind is InstrKind.COLLECTIVE:
                key = (instr.target, instr.axis, purpose)
                sent = block.values[next(refs(instr.args))]
                held = input_bytes_of(instr.target, instr.args, sent)
                row = tally.comm.setdefault(key, [0.0, 0.0, 0.0])
                row[0] += times
                row[1] += times * held
                row[2] += times * costs.instr_s(block, instr)
    for span in trace.spans:
        if span.label in ("update", "accumulate"):
            label = UPDATE_WORK if span.label == "update" else "gradient accumulation"
            tally.seconds[label] += span.busy_s
            tally.kernels[label] += 1
    times_found = tuple(
        TimeRow(name=name, seconds=s, count=tally.kernels[name])
        for name, s in sorted(tally.seconds.items(), key=lambda item: -item[1])
        if s > 0
    )
    comm = tuple(
        CollectiveRow(
            name=name,
            axis=program.mesh_axes[axis],
            link=costs.moves.links[axis].level,
            purpose=purpose,
            count=int(row[0]),
            nbytes=int(row[1]),
            seconds=row[2],
        )
        for (name, axis, purpose), row in sorted(tally.comm.items(), key=lambda item: -item[1][2])
    )
    return times_found, comm


def _class_of(block: Block, instr: Instr) -> str:
    if is_free(instr.target) or op_name(instr.target) in ("paraplan.shard", "aten.clone", "aten.cat"):
        return _CLASS_WORDS["view"]
    values = block.values
    inputs = tuple(values[name] for name in refs((instr.args, tuple(instr.kwargs.values()))))
    outputs = tuple(None if name is None else values[name] for name in instr.outs)
    return _CLASS_WORDS[work_of(instr.target, False, inputs, outputs).kind]
