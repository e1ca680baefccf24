"""Programs that keep what torch's pipelines keep: the logits of every microbatch, until the step's end.

`torch.distributed.pipelining` appends what the last stage returns to `output_chunks` (stage.py, `forward_one_chunk`)
and joins the chunks when the schedule is through, wanted or not; under torchtitan these are logits. Our programs drop
them with the microbatch's loss, or at its backward. Here the forward block that makes them hands them out as well, so
that simulator and allocator count them. Limits: the joining is left out.
"""

from __future__ import annotations

import msgspec

from paraplan.ir.rank_program import Block, RankProgram, Step


def with_logits_kept(program: RankProgram, vocab: int) -> RankProgram:
    """The program with every microbatch's logits alive to the end; itself where it makes none.

    Args:
        program: of a training step.
        vocab: global size of the vocabulary.
    """
    widths = [vocab // size for size in (1, *program.mesh_shape)]
    logits = {name: found for name, block in program.blocks.items() if (found := _logits(name, block, widths))}
    if not logits:
        return program
    blocks = {
        name: _handing(block, logits[name]) if name in logits else block for name, block in program.blocks.items()
    }
    steps = tuple(_taking(step) if step.block in logits else step for step in program.steps)
    return msgspec.structs.replace(program, blocks=blocks, steps=steps)


def _logits(name: str, block: Block, widths: list[int]) -> str:
    """What a forward block that makes a loss makes with a matrix as wide as the vocabulary; "" for none."""
    values = block.values
    if not name.endswith(".F") or all(out is None or values[out].shape for out in block.outputs):
        return ""
    made = [out for instr in block.instrs if "linear" in instr.target for out in instr.outs if out]
    return next((out for out in made if values[out].shape[-1] in widths), "")


def _handing(block: Block, value: str) -> Block:
    """The block with a value among what it hands out."""
    instrs = tuple(
        msgspec.structs.replace(instr, frees=tuple(name for name in instr.frees if name != value))
        for instr in block.instrs
    )
    return msgspec.structs.replace(block, instrs=instrs, saved=(*block.saved, value))


def _taking(step: Step) -> Step:
    return msgspec.structs.replace(step, outs=(*step.outs, f"logits:{step.segment}@{step.microbatch}"))
