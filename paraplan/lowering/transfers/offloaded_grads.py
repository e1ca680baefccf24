"""Gradients that wait where states live: written there as they are made, measured as they pass.

Of a class with a `grad_tier` (Rajbhandari et al. 2021, ZeRO-Infinity, whose gradients go to disk too) the gradient has
a home on that tier, as its states have. Once it is in the optimizer's layout it is copied there; the copy is waited
for, and the gradient's memory given back, when the backward has passed the next segment, or at the end. It comes to its
update with the states (`streamed_update.py`).

Nobody needs to read it in between: what clipping and the check of a loss scale ask for, the sum of its squares and its
largest absolute value, is taken while it is still on the device, and what they multiply gradients by is multiplied in
the update (`runtime.optimizers.waiting_grads`). Padding of an uneven shard is made zero for that.
"""

from __future__ import annotations

import msgspec

from paraplan.ir.execution.rank_program import MAGNITUDE, Block, BlockRole, Instr
from paraplan.ir.machine.mesh import Layout, padded_dims
from paraplan.ir.model.strides import is_dense
from paraplan.ir.model.tensor import DTYPE_BYTES, TensorSpec
from paraplan.lowering.blocks.finish import finish_block
from paraplan.lowering.transfers.copies import Copy, issue_block, local_value

Dims = tuple[int, ...]

CHUNK = 1 << 16
"""Elements of which a norm is taken at a time."""


def measured_block(name: str, copy: Copy, spec: TensorSpec, layout: Layout, mesh_shape: Dims) -> Block:
    """Issues the copy of a gradient over the one that waits, and measures it; gives the copy under way and the two
    numbers.

    These are left out where padding would have to be overwritten in elements that share memory.

    Args:
        name: of the block.
        copy: of the gradient.
        spec, layout, mesh_shape: the whole gradient, and how it is sharded.
    """
    block, value = issue_block(name, (copy,), BlockRole.STORE), copy.source
    known, instrs = dict(block.values), list(block.instrs)
    source, padded = value.base, padded_dims(spec.shape, layout, mesh_shape)
    if padded and not (is_dense(value.shape, value.strides) and all(value.shape[dim] > 1 for dim, _ in padded)):
        return msgspec.structs.replace(block, outputs=(*block.outputs, None))
    for dim, axis in padded:
        args = ("%" + source, dim, spec.shape[dim], f"#{axis}:{value.shape[dim]}", 0)
        source = f"{source}^tail{dim}"
        known[source] = msgspec.structs.replace(value, storage_bytes=0)
        instrs.append(Instr(target="paraplan.fill_tail_", args=args, outs=(source,)))
    known["magnitude"] = local_value("magnitude", "float64", (2,))
    norms = -(-value.nbytes // DTYPE_BYTES[value.dtype] // CHUNK) * 16
    instrs.append(Instr(target=MAGNITUDE, args=("%" + source,), outs=("magnitude",), workspace_bytes=norms + 32))
    return finish_block(name, block.inputs, (*block.outputs, "magnitude"), (), known, instrs, block.role)
