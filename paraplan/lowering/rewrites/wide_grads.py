"""Gradients of half precision that accumulate in float32, without a cast of each.

A block leaves the gradients of its parameters in the dtype they accumulate in (`backward`), so it ends in casts. One of
a product's result goes into the product, which takes its sums in float32 anyway: the half is neither written nor read,
nor is it there beside the other. One of a table that is larger than what is added to it takes that as float32: rows are
cast instead of the table, and their sums are rounded once less. What is left of small tensors is cast by one call: a
launch counts for more there than the bytes, and the halves, which are alive until all are cast, are few.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from paraplan.ir.execution.rank_program import CAST_MANY, SUMMED, Block, Instr, LocalValue
from paraplan.ir.model.graph import Arg, refs
from paraplan.ir.model.strides import elementwise_strides, is_dense
from paraplan.lowering.blocks.finish import with_frees

MOST_BYTES = 8 << 20
"""Of a tensor that is cast with others."""

_CAST, _WIDE = "aten._to_copy.default", {"dtype": ":float32"}
_HALVES = frozenset({"bfloat16", "float16"})
_TABLES = frozenset({"paraplan.embedding_grad", "paraplan.embedding_tables_grad"})


def widen_grads(block: Block, products: bool, together: bool) -> Block:
    """The block with fewer casts of halves to float32; itself where a memory schedule says when values are freed.

    Args:
        block: as lowered.
        products: whether products and tables make results in float32.
        together: whether small tensors are cast by one call.
    """
    kept = {name for name in (*block.outputs, *block.saved) if name is not None}
    casts = [at for at, instr in enumerate(block.instrs) if _is_cast(block, instr)]
    if not casts or with_frees(kept, list(block.instrs)) != block.instrs:
        return block
    instrs: list[Instr | None] = list(block.instrs)
    rows = _into_makers(block, instrs, casts, kept) if products else {}
    if together:
        _as_one(block, instrs, casts)
    left = [each for at, instr in enumerate(instrs) for each in (rows.get(at), instr) if each is not None]
    names = {*block.inputs, *kept, *(out for instr in left for out in instr.outs)}
    values = {name: value for name, value in block.values.items() if name in names}
    values |= {str(cast.outs[0]): _widened(block.values[_source(cast)], str(cast.outs[0])) for cast in rows.values()}
    return msgspec.structs.replace(block, values=values, instrs=with_frees(kept, left))


def _is_cast(block: Block, instr: Instr) -> bool:
    """Whether lowering itself casts a dense half to float32."""
    if instr.target != _CAST or instr.kwargs != _WIDE or not instr.layout_change:
        return False
    value = block.values[_source(instr)]
    return value.dtype in _HALVES and is_dense(value.shape, value.strides) and not value.tier


def _source(instr: Instr) -> str:
    return str(instr.args[0])[1:]


def _into_makers(block: Block, instrs: list[Instr | None], casts: list[int], kept: set[str]) -> dict[int, Instr]:
    """Casts that alone read a product or a table's gradient become its result; per table, the cast of its rows."""
    makers = {out: at for at, instr in enumerate(block.instrs) for out in instr.outs if out is not None}
    read = Counter(name for instr in block.instrs for name in refs((instr.args, tuple(instr.kwargs.values()))))
    rows: dict[int, Instr] = {}
    for at in casts:
        name = _source(block.instrs[at])
        if name not in makers or read[name] > 1 or name in kept:
            continue
        maker = block.instrs[makers[name]]
        made = str(block.instrs[at].outs[0])
        if block.values[made].strides != block.values[name].strides:
            continue
        if maker.target == SUMMED and not maker.kwargs:
            instrs[makers[name]] = msgspec.structs.replace(maker, outs=(made,))
            instrs[at] = None
        elif maker.target in _TABLES and _is_larger(block.values[name], block.values[_source(maker)]):
            wide = f"{made}.rows"
            rows[makers[name]] = msgspec.structs.replace(block.instrs[at], args=maker.args[:1], outs=(wide,))
            instrs[makers[name]] = msgspec.structs.replace(maker, args=(f"%{wide}", *maker.args[1:]), outs=(made,))
            instrs[at] = None
    return rows


def _is_larger(table: LocalValue, rows: LocalValue) -> bool:
    """Whether a table's cast moves more than that of the rows added to it, which are then read twice as float32."""
    return rows.dtype in _HALVES and table.nbytes > 3 * rows.nbytes


def _widened(value: LocalValue, name: str) -> LocalValue:
    """A half as a float32 of its own."""
    strides = elementwise_strides(value.shape, [(value.shape, value.strides)])
    return msgspec.structs.replace(value, dtype="float32", strides=strides, base=name, storage_bytes=2 * value.nbytes)


def _as_one(block: Block, instrs: list[Instr | None], casts: list[int]) -> None:
    """Of casts that follow each other, those of small tensors become one at their end."""
    runs: list[list[int]] = []
    left = {at for at in casts if instrs[at] is not None}
    for at in sorted(left):
        begins = not runs or any(instrs[i] is not None and i not in left for i in range(runs[-1][-1] + 1, at))
        runs += [[]] if begins else []
        runs[-1].append(at)
    for run in runs:
        made = {out for at in run for out in block.instrs[at].outs}
        for dtype in sorted(_HALVES):
            small = [
                at for at in run if _is_small(block, block.instrs[at], dtype) and _source(block.instrs[at]) not in made
            ]
            if len(small) > 1:
                sources: Arg = tuple(block.instrs[at].args[0] for at in small)
                outs = tuple(block.instrs[at].outs[0] for at in small)
                for at in small:
                    instrs[at] = None
                instrs[small[-1]] = msgspec.structs.replace(
                    block.instrs[small[-1]], target=CAST_MANY, args=(sources, ":float32"), kwargs={}, outs=outs
                )


def _is_small(block: Block, instr: Instr, dtype: str) -> bool:
    value = block.values[_source(instr)]
    return value.dtype == dtype and value.nbytes <= MOST_BYTES
