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

from paraplan.ir.execution.rank_program import MAGNITUDE, Block, BlockRole, Instr, InstrKind, LocalValue
from paraplan.ir.machine.mesh import Layout, padded_dims
from paraplan.ir.model.strides import contiguous_strides, is_dense
from paraplan.ir.model.tensor import DTYPE_BYTES, TensorSpec
from paraplan.lowering.blocks.finish import finish_block

Dims = tuple[int, ...]

CHUNK = 1 << 16
"""Elements of which a norm is taken at a time."""


def keep_block(name: str, value: LocalValue, tier: str, spec: TensorSpec, layout: Layout, mesh_shape: Dims) -> Block:
    """Measures a gradient, `x`, and begins to copy it over `home`; gives the copy under way and the two numbers.

    These are left out where padding would have to be overwritten in elements that share memory.

    Args:
        name: of the block.
        value: the gradient as it lies.
        tier: where it waits.
        spec, layout, mesh_shape: the whole gradient, and how it is sharded.
    """
    x = msgspec.structs.replace(value, base="x")
    known = {"x": x, "home": _home(value, tier)}
    known["home^!"] = msgspec.structs.replace(known["home"], storage_bytes=0)
    instrs = [Instr(kind=InstrKind.COPY, target="keep", args=("%x", ":" + tier, "%home"), outs=("home^!",))]
    source, padded = "x", padded_dims(spec.shape, layout, mesh_shape)
    if padded and not (is_dense(value.shape, value.strides) and all(value.shape[dim] > 1 for dim, _ in padded)):
        return finish_block(name, ("x", "home"), ("home^!", None), (), known, instrs, BlockRole.STORE)
    for dim, axis in padded:
        args = ("%" + source, dim, spec.shape[dim], f"#{axis}:{value.shape[dim]}", 0)
        source = f"{source}^tail{dim}"
        known[source] = msgspec.structs.replace(x, storage_bytes=0)
        instrs.append(Instr(target="paraplan.fill_tail_", args=args, outs=(source,)))
    known["magnitude"] = LocalValue(
        dtype="float64", shape=(2,), strides=(1,), base="magnitude", storage_bytes=2 * DTYPE_BYTES["float64"]
    )
    norms = -(-value.nbytes // DTYPE_BYTES[value.dtype] // CHUNK) * 16
    instrs.append(Instr(target=MAGNITUDE, args=("%" + source,), outs=("magnitude",), workspace_bytes=norms + 32))
    return finish_block(name, ("x", "home"), ("home^!", "magnitude"), (), known, instrs, BlockRole.STORE)


def kept_block(name: str, value: LocalValue, tier: str) -> Block:
    """Waits for the copy.

    Args:
        name: of the block.
        value: the gradient.
        tier: where it is copied to.
    """
    x, home = msgspec.structs.replace(value, base="x"), _home(value, tier)
    issued = msgspec.structs.replace(home, base="home^!")
    known = {"home^!": issued, "x": x, "home^.": msgspec.structs.replace(issued, storage_bytes=0)}
    instrs = [Instr(kind=InstrKind.WAIT, target="wait", args=("%home^!", "%x"), outs=("home^.",))]
    return finish_block(name, ("home^!", "x"), ("home^.",), (), known, instrs, BlockRole.STORE)


def _home(value: LocalValue, tier: str) -> LocalValue:
    return LocalValue(
        dtype=value.dtype,
        shape=value.shape,
        strides=contiguous_strides(value.shape),
        base="home",
        storage_bytes=value.nbytes,
        tier=tier,
    )
