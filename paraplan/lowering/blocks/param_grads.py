"""The gradients of parameters as a backward block, or a part of one, gives them."""

from __future__ import annotations

from collections.abc import Collection

from paraplan.ir.machine.mesh import P, R, layout_text
from paraplan.ir.model.program import SegmentKind
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.bundle import bundle_key, local_bytes
from paraplan.lowering.blocks.emit import BlockEmitter
from paraplan.lowering.blocks.forward import KindContext, Path
from paraplan.rules.storage_roots import storage_roots

LATE_BYTES = 512 << 20
"""The most, on a rank, that a gradient yet to be reduced may hold beyond the block that made it."""


def param_grads_of(
    backward: BlockEmitter, kind: SegmentKind, context: KindContext, wanted: frozenset[str]
) -> tuple[tuple[Path, ...], tuple[str | None, ...]]:
    """The gradients of the parameters, and the moves left to those that leave the block as they were made: small ones,
    which go with others, and the last one made, for which the block would have to wait.

    Args:
        backward: of the block.
        kind, context: whose parameters they are, and the mesh.
        wanted: those that the block gives.
    """
    found: list[str | None] = []
    left: list[Path] = []
    last = _last_scattered(backward, kind, context, wanted)
    for grad, placements, wanted_dtype in zip(kind.param_grads, context.param_grads, context.grad_dtypes, strict=True):
        if grad is None or grad not in wanted:
            found.append(None)
            left.append(())
            continue
        layout = (P if context.num_microbatches > 1 else R, *placements)
        path = backward.path(grad, layout)
        if context.grouped and path:
            summed = (layout[0], *backward.home(grad)[1:])  # what is alike in all microbatches counts in one of them
            later = backward.path(grad, layout, summed)
            if later:
                found.append(backward.get(grad, summed))
                left.append(later)
                continue
        is_last = grad == last
        if context.reduce_dtype and any(move.reduction for move in path):
            grad = _as_summed(backward, grad, context.reduce_dtype)
        leaves = is_last or bundle_key(backward.specs[grad], path, backward.mesh_shape)
        if path and not path[0].is_gather and leaves:
            found.append(backward.get(grad, backward.home(grad)))
            left.append(path)
            continue
        local = backward.get(grad, layout)
        if wanted_dtype not in ("", backward.values[local].dtype):
            local = backward.cast(local, wanted_dtype, f"{grad}@{layout_text(layout)}^{wanted_dtype}")
        found.append(local)
        left.append(())
    return tuple(left), tuple(found)


def _last_scattered(
    backward: BlockEmitter, kind: SegmentKind, context: KindContext, wanted: frozenset[str]
) -> str | None:
    """The gradient of a matrix that a backward makes last, where it is scattered by itself, as it is: what is added up
    in place may be handed on as well. None where it is too large to be held for longer, and where the plan has no room
    for what is under way from one segment to the next."""
    layouts = dict(zip(kind.param_grads, context.param_grads, strict=True))
    made = (out for op in reversed(kind.graph.ops) for out in op.outs if out is not None and out in layouts)
    grad = next((each for each in made if len(kind.graph.values[each].shape) > 1), None)
    if grad not in wanted or grad is None or context.reduce_dtype or not context.ahead:
        return None
    roots = storage_roots(kind)
    if roots[grad] in {roots.get(each, each) for each in kind.input_grads if each is not None}:
        return None
    if local_bytes(backward.specs[grad], backward.home(grad), backward.mesh_shape) > LATE_BYTES:
        return None
    path = backward.path(grad, (P if context.num_microbatches > 1 else R, *layouts[grad]))
    alone = bundle_key(backward.specs[grad], path, backward.mesh_shape) is None
    return grad if path and path[0].split_dim >= 0 and alone else None


def grads_beside(kind: SegmentKind, first: Collection[int]) -> frozenset[str]:
    """Gradients of matrices that ops make, or that view what they make.

    Args:
        kind: whose.
        first: the ops, by position.
    """
    made = {out for index in first for out in kind.graph.ops[index].outs}
    roots = storage_roots(kind)
    matrices = (grad for grad in kind.param_grads if grad is not None and len(kind.graph.values[grad].shape) > 1)
    return frozenset(grad for grad in matrices if roots.get(grad, grad) in made)


def _as_summed(backward: BlockEmitter, grad: str, dtype: str) -> str:
    """The graph's name of a gradient in the dtype in which it is summed over ranks."""
    home, spec = backward.home(grad), backward.specs[grad]
    if spec.dtype == dtype:
        return grad
    cast = backward.cast(backward.get(grad, home), dtype, f"{grad}^{dtype}")
    backward.define(cast, TensorSpec(dtype, spec.shape), home)
    return cast
