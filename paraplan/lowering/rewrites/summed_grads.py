"""Gradients of weights added up by the products that make them.

Of several microbatches, or of segments that share a weight, a gradient after the first is a product and an addition:
the product writes it, the addition reads it and its accumulator and writes that. A product that adds to what is there
(`SUM`) leaves out the gradient itself, its memory and two of the passes over it; what is added has the rounding of the
sum alone (Megatron-LM's gradient accumulation fusion). It is the same block with the accumulator among its inputs, in
place of the ACCUMULATE that followed.

So is done where the block's gradient is the product's result as it was made, and of the accumulator's dtype, or in half
where the device's products take sums in float32.
"""

from __future__ import annotations

from functools import partial

import msgspec

from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import SUM, SUMMED, Block, LocalValue, RankProgram, StepKind
from paraplan.ir.model.graph import refs
from paraplan.ir.process.memo import SESSION, Lately, Same

_MADE: Lately[dict[int, str]] = SESSION.lately("summed_grads.made", 1 << 16, len)
_ADDING: Lately[Block] = SESSION.lately("summed_grads.adding", 1 << 16, lambda made: len(made.instrs))

Sums = tuple[tuple[int, LocalValue], ...]
"""Outputs of a block, by position, that grow accumulators like these."""

Done = dict[str, dict[tuple[int, Sums], Block]]
"""By the label that blocks have in common, they by the id of what they were made from and what they add to."""


def sum_products(program: RankProgram, backend: str, done: Done) -> RankProgram:
    """The program with gradients added by the products that make them.

    Args:
        program: as lowered.
        backend: of its devices, "cpu" or "cuda".
        done: shared by a plan's programs; added to.
    """
    ends = _added(program)
    totals = {program.steps[end].args[0] for found in ends.values() for _, end in found}
    addends = {step.args[1] for step in program.steps if step.kind is StepKind.ACCUMULATE and step.args[0] in totals}
    blocks, steps = dict(program.blocks), list(program.steps)
    held: dict[Name, LocalValue] = {}
    dropped: set[int] = set()
    for at, step in enumerate(program.steps):
        if step.kind is StepKind.CALL:
            block = program.blocks[step.block]
            sums = {
                place: total
                for place, end in ends.get(at, ())
                if (total := program.steps[end].args[0]) in held
                and _may_add(block, place, held[total], backend)
                and not any(
                    total in (*each.args, *each.drops) and each.kind is not StepKind.ACCUMULATE
                    for each in program.steps[at + 1 : end]
                )
            }
            if sums:
                dropped |= {end for place, end in ends[at] if place in sums}
                adding = _adding(block, tuple((place, held[total]) for place, total in sums.items()), done)
                blocks[adding.name] = adding
                outs = tuple(None if place in sums else out for place, out in enumerate(step.outs))
                args = (*step.args, *sums.values())
                steps[at] = msgspec.structs.replace(step, block=adding.name, args=args, outs=outs)
            if not addends.isdisjoint(step.outs):
                for out, local in zip(step.outs, (*block.outputs, *block.saved), strict=True):
                    if out in addends and local is not None:
                        held[out] = block.values[local]
        elif step.kind is StepKind.ACCUMULATE:
            total, addend = step.args
            if total in totals and total not in held and total not in program.outer and addend in held:
                held[total] = held[addend]
        for name in step.drops:
            held.pop(name, None)
    if not dropped:
        return program
    kept = tuple(step for at, step in enumerate(steps) if at not in dropped)
    used = {step.block for step in kept if step.kind is StepKind.CALL}
    return msgspec.structs.replace(
        program, steps=kept, blocks={name: block for name, block in blocks.items() if name in used}
    )


def _added(program: RankProgram) -> dict[int, list[tuple[int, int]]]:
    """Calls, by their place, with the outputs that a product of theirs makes for an ACCUMULATE alone, by position, and
    which that is."""
    products = {name: _MADE.get((Same(block),), partial(_products, block)) for name, block in program.blocks.items()}
    calls = [(at, step) for at, step in enumerate(program.steps) if step.kind is StepKind.CALL and products[step.block]]
    made = {step.outs[place] for _, step in calls for place in products[step.block]}
    readers: dict[Name, list[int]] = {}
    of: dict[tuple[int, Name], list[int]] = {}  # who reads what a step gives, until something else has its name
    for at in range(len(program.steps) - 1, -1, -1):
        step = program.steps[at]
        for out in step.outs:
            if out in made and out is not None:
                of[at, out] = readers.pop(out, [])
        for name in (*step.args, *step.drops):
            if name in made:
                readers.setdefault(name, []).append(at)
    found: dict[int, list[tuple[int, int]]] = {}
    for at, step in calls:
        for place in sorted(products[step.block]):
            out = step.outs[place]
            read = of[at, out] if out is not None else []
            adds = program.steps[read[0]] if len(read) == 1 else step
            if adds.kind is StepKind.ACCUMULATE and adds.args[1] == out and not adds.drops:
                found.setdefault(at, []).append((place, read[0]))
    return found


def _may_add(block: Block, place: int, total: LocalValue, backend: str) -> bool:
    """Whether an output that a product makes is for an accumulator that a product can add to."""
    value = block.values[_MADE.get((Same(block),), lambda: _products(block))[place]]
    alike = value.dtype == total.dtype or (backend == "cuda" and total.dtype == "float32")
    return alike and (total.shape, total.strides) == (value.shape, value.strides) and not total.tier


def _products(block: Block) -> dict[int, str]:
    """Outputs of a block that products alone make and nothing in it reads, by position."""
    names = (*block.outputs, *block.saved)
    read = {name for instr in block.instrs for name in refs((instr.args, tuple(instr.kwargs.values())))}
    made = {out for instr in block.instrs if instr.target == SUMMED and not instr.kwargs for out in instr.outs}
    return {
        place: name
        for place, name in enumerate(names)
        if name is not None and name in made and name not in read and names.count(name) == 1
    }


def _adding(block: Block, sums: Sums, done: Done) -> Block:
    """The block with accumulators among its inputs, that grow by these outputs."""
    phase, key = f".{block.role.value}", (id(block), sums)
    stem = block.name[: -len(phase)]
    alike = done.setdefault(stem, {})
    if key not in alike:
        name = f"{stem}+{len(alike)}{phase}"
        alike[key] = _ADDING.get((name, Same(block), sums), lambda: _made(name, block, sums))
    return alike[key]


def _made(name: str, block: Block, sums: Sums) -> Block:
    outputs, values, instrs, inputs = list(block.outputs), dict(block.values), list(block.instrs), list(block.inputs)
    for place, like in sums:
        made = str(outputs[place])
        outputs[place], total = None, f"{made}.sum"
        values[total] = msgspec.structs.replace(like, base=total, storage_bytes=like.nbytes)
        del values[made]
        at = next(index for index, instr in enumerate(instrs) if made in instr.outs)
        instrs[at] = msgspec.structs.replace(
            instrs[at], target=SUM, args=("%" + total, *instrs[at].args), outs=(), frees=(*instrs[at].frees, total)
        )
        inputs.append(total)
    return msgspec.structs.replace(
        block, name=name, inputs=tuple(inputs), outputs=tuple(outputs), values=values, instrs=tuple(instrs)
    )
