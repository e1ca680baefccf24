"""Choosing the kernels of a rank's program for the kind of device it runs on.

Lowering writes what is computed; this pass writes as which kernel (`Instr.kernel`), with the workspace of that one: of
those that take a call the quickest in the plan's profile, where it has times of its devices, else the first that all
devices of its cluster have.
What one kernel does together is joined before (`whole_norms`, `wide_grads`, `fused_writes`). A plan for a CPU is left
alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from paraplan.ir.execution.rank_program import Block, Instr, InstrKind, RankProgram
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.kernel_choice import OpCall, chosen, has_choice
from paraplan.ir.model.graph import refs
from paraplan.ir.plan import Plan
from paraplan.ir.process.memo import SESSION, Lately, Same
from paraplan.ir.profile import Measured, detail_of, odd_strides
from paraplan.lowering.rewrites.fused_writes import write_together
from paraplan.lowering.rewrites.whole_norms import join_norms
from paraplan.lowering.rewrites.wide_grads import widen_grads
from paraplan.rules.device_kernels import cuda  # noqa: F401  (records its kernels)

Key = tuple[str, str, tuple[Measured, ...], tuple[Measured | None, ...]]
"""Target, detail (which names the kernel), inputs, outputs."""
Times = Mapping[Key, float]
_TIMES: Lately[Times] = SESSION.lately("implement.times", 2)
"""Of the last profiles: a search lowers hundreds of plans with one."""
Done = dict[int, tuple[Block, Block]]
"""By the id of a block, that block, which keeps the id its own, and it with kernels."""


def implement(program: RankProgram, plan: Plan, times: Times, done: Done) -> RankProgram:
    """The program with kernels chosen.

    Args:
        program: as lowered.
        plan: whose devices run it.
        times: measured seconds of ops that have several kernels.
        done: shared by the programs of a plan; added to.
    """
    if plan.cluster.backend == "cpu":
        return program
    program = write_together(program)
    blocks = {}
    for name, block in program.blocks.items():
        if id(block) not in done:
            done[id(block)] = block, _with_kernels(block, plan, times)
        blocks[name] = done[id(block)][1]
    return msgspec.structs.replace(program, blocks=blocks)


def implement_all(programs: Mapping[tuple[str, ...], RankProgram], plan: Plan) -> tuple[RankProgram, ...]:
    """Per rank class of the plan's schedule, its program (by its actions) with kernels chosen."""
    done: Done = {}
    times = times_of(plan)
    made = {actions: implement(program, plan, times, done) for actions, program in programs.items()}
    return tuple(made[actions] for actions in plan.schedule.classes)


def times_of(plan: Plan) -> Times:
    """Times of a plan's profile, where all its devices are of the kind that they were taken on."""
    profile = plan.profile
    if (
        plan.cluster.backend == "cpu"
        or profile is None
        or any(group.device.kind != profile.device for group in plan.cluster.groups)
    ):
        return {}
    timed = (op for op in profile.ops if op.samples and has_choice(op.target))
    return _TIMES.get(
        Same(profile), lambda: {(op.target, op.detail, op.inputs, op.outputs): op.seconds for op in timed}
    )


def _with_kernels(block: Block, plan: Plan, times: Times) -> Block:
    block = widen_grads(join_norms(block), products=plan.sum_products, together=not plan.compiled)
    instrs = tuple(_with_kernel(block, instr, plan.cluster, times) for instr in block.instrs)
    return msgspec.structs.replace(block, instrs=instrs)


def call_of(block: Block, instr: Instr) -> OpCall:
    """An instruction as an op on local values."""
    inputs = [block.values[name] for name in refs((instr.args, tuple(instr.kwargs.values())))]
    return OpCall(inputs, [None if name is None else block.values[name] for name in instr.outs], instr.args)


def _with_kernel(block: Block, instr: Instr, cluster: ClusterSpec, times: Times) -> Instr:
    if instr.kind is not InstrKind.OP:
        return instr
    call = call_of(block, instr)

    def seconds(name: str) -> float | None:
        detail = detail_of(instr.target, instr.args, instr.kwargs, name)
        return times.get((instr.target, detail, *_tensors(call)))

    kernel = chosen(cluster.backend, cluster.capability, instr.target, call, seconds if times else None)
    if kernel is None:
        return instr
    return msgspec.structs.replace(instr, kernel=kernel.name, workspace_bytes=kernel.workspace(call))


def _tensors(call: OpCall) -> tuple[tuple[Measured, ...], tuple[Measured | None, ...]]:
    """A call's tensors as profiles have them."""
    inputs = tuple(Measured(x.dtype, x.shape, odd_strides(x.shape, x.strides)) for x in call.inputs if x is not None)
    return inputs, tuple(None if x is None else Measured(x.dtype, x.shape) for x in call.outputs)
