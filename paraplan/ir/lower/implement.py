"""Choosing the kernels of a rank's program for the kind of device it runs on.

Lowering writes what is computed; this pass writes as which kernel (`Instr.kernel`), with the workspace of that one.
What one kernel does together is joined before (`whole_norms`, `wide_grads`, `writes`). A plan for a CPU is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from paraplan.ir.graph import refs
from paraplan.ir.kernel_choice import Call, chosen
from paraplan.ir.lower.whole_norms import join_norms
from paraplan.ir.lower.wide_grads import widen_grads
from paraplan.ir.lower.writes import write_together
from paraplan.ir.plan import Plan
from paraplan.ir.rank_program import Block, Instr, InstrKind, RankProgram
from paraplan.ir.rules import cuda  # noqa: F401  (records its kernels)

Done = dict[int, tuple[Block, Block]]
"""By the id of a block, that block, which keeps the id its own, and it with kernels."""


def implement(program: RankProgram, backend: str, done: Done, compiled: bool = False) -> RankProgram:
    """The program with kernels chosen.

    Args:
        program: as lowered.
        backend: of its devices, "cpu" or "cuda".
        done: shared by the programs of a plan; added to.
        compiled: whether a compiler fuses what its blocks do elementwise.
    """
    if backend == "cpu":
        return program
    program = write_together(program)
    blocks = {}
    for name, block in program.blocks.items():
        if id(block) not in done:
            done[id(block)] = block, _with_kernels(block, backend, compiled)
        blocks[name] = done[id(block)][1]
    return msgspec.structs.replace(program, blocks=blocks)


def implement_all(programs: Mapping[tuple[str, ...], RankProgram], plan: Plan) -> tuple[RankProgram, ...]:
    """Per rank class of the plan's schedule, its program (by its actions) with kernels chosen."""
    done: Done = {}
    made = {
        actions: implement(program, plan.cluster.backend, done, plan.compiled) for actions, program in programs.items()
    }
    return tuple(made[actions] for actions in plan.schedule.classes)


def _with_kernels(block: Block, backend: str, compiled: bool) -> Block:
    block = widen_grads(join_norms(block), products=True, together=not compiled)
    return msgspec.structs.replace(block, instrs=tuple(_with_kernel(block, instr, backend) for instr in block.instrs))


def call_of(block: Block, instr: Instr) -> Call:
    """An instruction as an op on local values."""
    inputs = [block.values[name] for name in refs((instr.args, tuple(instr.kwargs.values())))]
    return Call(inputs, [None if name is None else block.values[name] for name in instr.outs], instr.args)


def _with_kernel(block: Block, instr: Instr, backend: str) -> Instr:
    if instr.kind is not InstrKind.OP:
        return instr
    call = call_of(block, instr)
    kernel = chosen(backend, instr.target, call)
    if kernel is None:
        return instr
    return msgspec.structs.replace(instr, kernel=kernel.name, workspace_bytes=kernel.workspace(call))
