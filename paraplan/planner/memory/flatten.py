"""The memory problem of a rank's program: its ops and storages (`lowering.flat`), timed as the simulator times it.

So what is planned is what would run. The base's storages are always there and vanish from what ops read.
"""

from __future__ import annotations

from dataclasses import dataclass

from paraplan.cost_models.costs import Costs
from paraplan.cost_models.simulator.simulate import RankEngine
from paraplan.ir.execution.memory_actions import Actions
from paraplan.ir.execution.rank_program import RankProgram, StepKind
from paraplan.ir.model.sources import UNKNOWN, Locate
from paraplan.lowering.flat import FlatOp, FlatProgram
from paraplan.lowering.flat import flatten as flat_program
from paraplan.planner.memory.problem import MemOp, MemoryProblem, MemTensor


@dataclass(frozen=True)
class Flattened:
    """A program flattened.

    Attributes:
        problem: its ops and storages.
        flat: the same without times, numbered alike.
    """

    problem: MemoryProblem
    flat: FlatProgram

    @property
    def actions(self) -> Actions:
        """The program's own order, each storage freed where the program lets go of it."""
        return self.flat.actions


def flatten(program: RankProgram, costs: Costs, locate: Locate | None = None) -> Flattened:
    """The memory problem of a rank's program.

    Args:
        program: of one device.
        costs: of its mesh.
        locate: where ops come from (`ir.model.sources`).
    Raises:
        InvalidPlanError: the program communicates.
    """
    flat = flat_program(program)
    seconds = _seconds(program, costs, flat)
    tensor = [storage.tensor for storage in flat.storages]
    ops = tuple(
        MemOp(
            op.name,
            time_s,
            tuple(tensor[s] for s in op.reads if tensor[s] >= 0),
            tuple(tensor[s] for s in op.makes),
            op.workspace_bytes,
            op.repeatable,
            op.backward,
            _source(program, op, locate),
        )
        for op, time_s in zip(flat.ops, seconds, strict=True)
    )
    written = {storage for op in flat.ops for storage in op.writes}
    tensors = tuple(
        MemTensor(s.nbytes, s.maker, s.kept, number in written)
        for number, s in ((number, flat.storages[number]) for number in flat.tensors)
    )
    return Flattened(MemoryProblem(ops, tensors, flat.base_bytes, in_order=True), flat)


def _source(program: RankProgram, op: FlatOp, locate: Locate | None) -> str:
    if locate is None or op.instr < 0:
        return ""
    block = program.blocks[program.steps[op.step].block]
    line = locate(block, block.instrs[op.instr].origin)
    return "" if line == UNKNOWN else line


def _seconds(program: RankProgram, costs: Costs, flat: FlatProgram) -> list[float]:
    """Per op, what it takes: a step that is no call, what the simulator takes it to."""
    engine, ends = RankEngine(program, costs), [0.0]
    for _ in program.steps:
        engine.advance()
        ends.append(engine.time.end_s)
    found = []
    for op in flat.ops:
        step = program.steps[op.step]
        if step.kind is StepKind.CALL:
            block = program.blocks[step.block]
            found.append(costs.instr_s(block, block.instrs[op.instr]))
        else:
            found.append(ends[op.step + 1] - ends[op.step])
    return found
