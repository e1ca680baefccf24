"""Programs that keep what other software keeps, which ours drop as soon as nothing reads it any more.

    torch's pipelines       the logits of every microbatch, to the step's end: what the last stage returns is appended
                            to `output_chunks` and joined when the schedule is through (`torch.distributed.pipelining`,
                            stage.py, `forward_one_chunk`; the joining is left out); what is received, for which
                            every microbatch has buffers of its own (`_create_grad_recv_info`); and what a stage
                            returned, to its backward (`fwd_cache`)
    selective checkpoints   what a policy says is saved, whether the backward reads it or not: of torchtitan's every
                            second product the last of a layer, which is only added (`CachingTorchDispatchMode` of
                            torch/utils/checkpoint.py; compilers leave it out)

The forward block that makes a value hands it out as well, so that simulator and allocator count it.
"""

from __future__ import annotations

import msgspec

from paraplan.ir.execution.names import saved
from paraplan.ir.execution.rank_program import Block, BlockRole, RankProgram, StepKind
from paraplan.ir.execution.schedule import Action, ActionKind, parse_action


def with_logits_kept(program: RankProgram, vocab: int) -> RankProgram:
    """The program with every microbatch's logits alive to the end; itself where it makes none.

    Args:
        program: of a training step.
        vocab: global size of the vocabulary.
    """
    widths = [vocab // size for size in (1, *program.mesh_shape)]
    logits = {name: found for name, block in program.blocks.items() if (found := _logits(block, widths))}
    return _keeping(program, logits, {})


def with_messages_kept(program: RankProgram) -> RankProgram:
    """The program with every message that is received alive to the end, and what a stage sends on alive to the stage's
    backward."""
    received = {step.outs[0] for step in program.steps if step.kind is StepKind.RECV}
    received |= {
        step.args[0]
        for step in program.steps
        if step.kind is StepKind.ACCUMULATE and step.args[1] in received  # a gradient that takes its message's place
    }
    sent = {
        step.args[0]: str(Action(stage=parse_action(step.action).stage, kind=ActionKind.B, microbatch=step.microbatch))
        for step in program.steps
        if step.kind is StepKind.SEND and step.phase in (ActionKind.F, ActionKind.SEND_F)
    }
    steps = [
        msgspec.structs.replace(step, drops=tuple(name for name in step.drops if name not in received | sent.keys()))
        for step in program.steps
    ]
    ends = {step.action: place for place, step in enumerate(steps) if step.kind is StepKind.CALL}
    for name, action in sent.items():
        if action in ends and name not in received:
            end = steps[ends[action]]
            steps[ends[action]] = msgspec.structs.replace(end, drops=(*end.drops, name))
    return msgspec.structs.replace(program, steps=tuple(steps))


def with_last_products_kept(program: RankProgram) -> RankProgram:
    """The program with the last product of every layer that makes some again alive to the layer's backward."""
    last = {
        name: next((out for instr in reversed(block.instrs) if instr.target == LINEAR for out in instr.outs if out), "")
        for name, block in program.blocks.items()
        if block.role is BlockRole.FORWARD and not _is_loss(block)
    }
    backwards = {
        (step.segment, step.microbatch): place
        for place, step in enumerate(program.steps)
        if step.segment >= 0 and program.role_of(step) is BlockRole.BACKWARD
    }
    return _keeping(program, {name: value for name, value in last.items() if value}, backwards)


LINEAR = "paraplan.linear"


def _keeping(program: RankProgram, kept: dict[str, str], until: dict[tuple[int, int], int]) -> RankProgram:
    """The program with a value of each of these blocks alive to the step that is given for its segment and microbatch,
    or to the end; itself where there is none."""
    if not kept:
        return program
    blocks = {name: _handing(block, kept[name]) if name in kept else block for name, block in program.blocks.items()}
    steps = list(program.steps)
    for place, step in enumerate(program.steps):
        if step.block in kept:
            name = saved(step.segment, "kept", step.microbatch)
            ends = until.get((step.segment, step.microbatch))
            steps[place] = msgspec.structs.replace(steps[place], outs=(*step.outs, name))
            if ends is not None:
                steps[ends] = msgspec.structs.replace(steps[ends], drops=(*steps[ends].drops, name))
    return msgspec.structs.replace(program, blocks=blocks, steps=tuple(steps))


def _logits(block: Block, widths: list[int]) -> str:
    """What a forward block that makes a loss makes with a matrix as wide as the vocabulary; "" for none."""
    values = block.values
    if block.role is not BlockRole.FORWARD or not _is_loss(block):
        return ""
    made = [out for instr in block.instrs if "linear" in instr.target for out in instr.outs if out]
    return next((out for out in made if values[out].shape[-1] in widths), "")


def _is_loss(block: Block) -> bool:
    return any(out is not None and not block.values[out].shape for out in block.outputs)


def _handing(block: Block, value: str) -> Block:
    """The block with a value among what it hands out."""
    instrs = tuple(
        msgspec.structs.replace(instr, frees=tuple(name for name in instr.frees if name != value))
        for instr in block.instrs
    )
    return msgspec.structs.replace(block, instrs=instrs, saved=(*block.saved, value))
