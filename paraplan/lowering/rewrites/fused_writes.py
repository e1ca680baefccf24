"""What is written over parameters and buffers at a step's end, by one launch.

Stored copies in half precision take the masters' new values, buffers those that forward made: a call of a small block
each, that does nothing but write. Calls that follow each other become one whose block writes all of them, as many as
have a pair of dtypes, lie alike and are on the device. Nothing is allocated in either, so memory is as before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import (
    WRITE_MANY,
    Block,
    BlockRole,
    Instr,
    LocalValue,
    RankProgram,
    Step,
    StepKind,
)
from paraplan.ir.model.graph import Arg
from paraplan.ir.model.strides import is_dense
from paraplan.lowering.blocks.finish import finish_block

_WRITE = "paraplan.write"

Pair = tuple[LocalValue, LocalValue]


def write_together(program: RankProgram) -> RankProgram:
    """The program with writes that follow each other as one; itself where none do."""
    steps: list[Step] = []
    blocks = dict(program.blocks)
    run: list[Step] = []
    overwritten: set[Name] = set()
    touched: set[Name] = set()

    def end() -> None:
        steps.extend(_joined(run, blocks))
        for of in (run, overwritten, touched):
            of.clear()

    for step in program.steps:
        pair = _pair(program, step)
        if pair is None:
            end()
            steps.append(step)
            continue
        over, value = _written(blocks, step)
        alike = not run or (_place(step), over.role) == (_place(run[0]), _written(blocks, run[0])[0].role)
        if not alike or over in touched or value in overwritten:
            end()
        run.append(step)
        overwritten.add(over)
        touched.update((over, value))
    end()
    if len(steps) == len(program.steps):
        return program
    used = {step.block for step in steps}
    kept = {name: block for name, block in blocks.items() if name in used}
    return msgspec.structs.replace(program, steps=tuple(steps), blocks=kept)


def _pair(program: RankProgram, step: Step) -> Pair | None:
    """What a step overwrites and with what, if that is all it does, in one place and order."""
    if step.kind is not StepKind.CALL:
        return None
    block = program.blocks[step.block]
    if len(block.instrs) != 1 or block.instrs[0].target != _WRITE or len(block.inputs) != 2:
        return None
    over, value = (block.values[str(arg)[1:]] for arg in block.instrs[0].args)
    alike = (over.shape, over.strides, over.tier) == (value.shape, value.strides, value.tier)
    return (over, value) if alike and not over.tier and is_dense(over.shape, over.strides) else None


def _written(blocks: Mapping[str, Block], step: Step) -> tuple[Name, Name]:
    """Outer names of what a write overwrites and of its value."""
    block = blocks[step.block]
    given = dict(zip(block.inputs, step.args, strict=True))
    over, value = (given[str(arg)[1:]] for arg in block.instrs[0].args)
    return over, value


def _place(step: Step) -> tuple[str, int, int]:
    """What writes that are done as one agree in; a fitted step tells buffers from parameters besides."""
    return step.action, step.microbatch, step.segment


def _joined(run: Sequence[Step], blocks: dict[str, Block]) -> list[Step]:
    """A run of writes, as one step for every pair of dtypes."""
    groups: dict[tuple[str, str], list[Step]] = {}
    for step in run:
        block = blocks[step.block]
        over, value = (block.values[str(arg)[1:]].dtype for arg in block.instrs[0].args)
        groups.setdefault((over, value), []).append(step)
    found = []
    for steps in groups.values():
        if len(steps) == 1:
            found += steps
            continue
        name = f"writes.{sum(each.role is BlockRole.WRITES for each in blocks.values())}"
        blocks[name] = _block(name, [blocks[step.block] for step in steps])
        args = tuple(arg for step in steps for arg in step.args)
        drops = tuple(dict.fromkeys(drop for step in steps for drop in step.drops))
        found.append(msgspec.structs.replace(steps[0], block=name, args=args, drops=drops))
    return found


def _block(name: str, blocks: Sequence[Block]) -> Block:
    """The writes of some blocks in one."""
    values: dict[str, LocalValue] = {}
    over: list[Arg] = []
    value: list[Arg] = []
    inputs: list[str] = []
    for index, block in enumerate(blocks):
        for local in block.inputs:
            own = block.values[local]
            values[f"{local}.{index}"] = msgspec.structs.replace(own, base=f"{own.base}.{index}")
            inputs.append(f"{local}.{index}")
        for found, arg in zip((over, value), block.instrs[0].args, strict=True):
            found.append(f"{arg}.{index}")
    instr = Instr(target=WRITE_MANY, args=(tuple(over), tuple(value)), outs=(), origin=-1, layout_change=True)
    return finish_block(name, tuple(inputs), (), (), values, [instr], BlockRole.WRITES)
