"""Memory over time: what is alive at one op of one segment, as a row of the sharding problem.

At op p of segment i, in one phase, a rank holds

    parameters, optimizer states, accumulators; parameters stored elsewhere that i and the segment after it in the phase
    read; in the backward of a step without microbatches also the gradients of
    every later segment;  +  what segments saved for their backward: those before i, and in the backward what i still
    reads;  +  values of the kind made at or before p and read at or after it;  +  copies in other layouts of values
    whose readers, in this phase, lie on both sides of p, those of parameters from the segment's begin on.

Which instants matter is only known once a plan is simulated: the rows come one by one, each where the last plan peaked.
A row is told what the simulation found more than it (workspace, what passes between blocks) and its limit is that much
lower, so the plan that peaked there does not fit again. What is gathered ahead for the next segment is not in a row:
a plan that does not fit with it is tried without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paraplan.cost_models.realised_plan import Realised
from paraplan.ir.execution.rank_program import StepKind
from paraplan.ir.execution.schedule import ActionKind
from paraplan.ir.model.graph import Phase
from paraplan.ir.model.program import Program, SegmentKind
from paraplan.planner.sharding.formulate import Formulation
from paraplan.planner.sharding.network.cost_network import Floats, Row
from paraplan.planner.sharding.space import Space
from paraplan.rules.storage_roots import storage_roots


@dataclass(frozen=True)
class Instant:
    """An op of a segment, in one of its phases."""

    segment: int
    position: int
    phase: Phase


def peak_instant(made: Realised) -> Instant | None:
    """Where the simulated memory peaks; None where that is not inside a segment."""
    programs, simulation = made.programs, made.simulation
    worst = max(range(len(simulation.traces)), key=lambda index: simulation.traces[index].peak_bytes)
    trace = simulation.traces[worst]
    if trace.peak_step < 0 or trace.peak_instr < 0:
        return None
    step = programs[worst].steps[trace.peak_step]
    if step.kind is not StepKind.CALL or step.segment < 0:
        return None
    origins = [i.origin for i in programs[worst].blocks[step.block].instrs[: trace.peak_instr + 1] if i.origin >= 0]
    if not origins:
        return None
    return Instant(step.segment, origins[-1], Phase.BACKWARD if step.phase is ActionKind.B else Phase.FORWARD)


def instant_row(space: Space, program: Program, problem: Formulation, at: Instant, limit: float) -> Row:
    """What is alive at an instant, in units of the limit.

    Args:
        space: of the mesh.
        program: that is planned.
        problem: the network of the space.
        at: the instant.
        limit: bytes on the device.
    """
    held: dict[int, Floats] = {}
    moved: dict[int, Floats] = {}

    def hold(decider: int, nbytes: Sequence[int], count: float = 1.0) -> None:
        if count:
            amount = np.array(nbytes, float) * (count / limit)
            held[decider] = held.get(decider, np.zeros(len(amount))) + amount

    for decider, nbytes in space.kept:
        hold(decider, nbytes)
    later = program.segments[at.segment + 1 :] if at.phase is Phase.BACKWARD else ()
    done = {name for segment in later for name in segment.params}
    for decider, nbytes, cls in space.comes:
        hold(decider, nbytes, sum(name in cls.params for segment in _fetched(program, at) for name in segment))
    for decider, nbytes, cls in space.grads:
        hold(decider, nbytes, sum(name in done for name in cls.params))
    kind_index = program.segments[at.segment].kind
    kind = program.kinds[kind_index]
    needed = _read_from(kind, at)
    for segment in program.segments[: at.segment]:
        for (index, _), (decider, nbytes) in space.saved.items():
            if index == segment.kind:
                hold(decider, nbytes)
    roots = storage_roots(kind)
    for name in _live(kind, at, roots, needed):
        spec, end = kind.graph.values[name], space.made[kind_index, name]
        hold(end.decider, [space.prices.nbytes(spec, layout) for layout in end.layouts])
    for number in _copies(space, kind, kind_index, at):
        moved[problem.factors[number]] = _copied(space, problem, number) / limit
    return Row(f"{kind.name}.{kind.graph.ops[at.position].target}[{at.position}]", 1.0, held, moved)


def _fetched(program: Program, at: Instant) -> list[tuple[str, ...]]:
    """What the segment and the one after it in the phase read of parameters."""
    following = at.segment + (1 if at.phase is Phase.FORWARD else -1)
    return [program.segments[i].params for i in (at.segment, following) if 0 <= i < len(program.segments)]


def _read_from(kind: SegmentKind, at: Instant) -> set[str]:
    """Values that ops of the phase read at the instant or after it."""
    ops = kind.graph.ops[at.position :]
    return {name for op in ops if op.phase is at.phase for name in op.tensors}


def _live(kind: SegmentKind, at: Instant, roots: dict[str, str], needed: set[str]) -> list[str]:
    """Storages alive at the instant: made before it and read from it on, saved for later, or results."""
    results = {name for name in (*kind.input_grads, *kind.param_grads, *kind.outputs) if name is not None}
    if at.phase is Phase.FORWARD:
        results |= {name for op in kind.graph.ops if op.phase is Phase.BACKWARD for name in op.tensors}
    wanted = {roots[name] for name in needed | results if name in roots}
    found: dict[str, None] = {}
    for position, op in enumerate(kind.graph.ops):
        for out in op.outs:
            if out is None or roots.get(out) != out:
                continue
            reached = position <= at.position if op.phase is at.phase else op.phase is Phase.FORWARD
            if reached and (out in wanted or position == at.position):
                found[out] = None
    return list(found)


def _copies(space: Space, kind: SegmentKind, index: int, at: Instant) -> Iterator[int]:
    """Transfers of the segment's own, by number, whose copies are there."""
    where = {decider: position for (of, position), decider in space.op_decider.items() if of == index}
    for number, transfer in enumerate(space.transfers):
        if transfer.kind != index or transfer.phase is not at.phase or transfer.lean:
            continue
        reads = [where.get(end.decider, 1 << 30) for end in transfer.readers if end.decider != transfer.saved]
        first = -1 if transfer.name in kind.params else min(reads)
        if first <= at.position <= max(reads):
            yield number


def _copied(space: Space, problem: Formulation, number: int) -> Floats:
    """[have, want] bytes of a value in another layout than it is made in."""
    makes, asks = problem.makes[number], problem.asks[number]
    sizes = [space.prices.nbytes(space.transfers[number].spec, want) for want in asks]
    copies = [[0 if have == want else size for want, size in zip(asks, sizes, strict=True)] for have in makes]
    return np.array(copies, float)
