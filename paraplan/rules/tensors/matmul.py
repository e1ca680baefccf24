"""Products of matrices: rules in einsum form.

`paraplan.linear*` keep the leading dims apart (no batch*seq flattening), so batch and sequence stay dims.
Products accumulate no workspace that torch's allocator sees. Any dim may be uneven: a contracted one is padded with
zeros.
"""

from __future__ import annotations

from paraplan.ir.model.graph import Op
from paraplan.rules.dims import WHOLE, OpDims, Specs, dim_names, register, sizes_of, uneven
from paraplan.rules.expansions.pieces import product_in_pieces
from paraplan.rules.workspace import workspace


@register("aten.mm.default")
def mm(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`m k, k n -> m n`."""
    m, k, n = inputs[0].shape[0], inputs[0].shape[1], inputs[1].shape[1]
    return uneven(OpDims((("m", "k"), ("k", "n")), (("m", "n"),), {"m": m, "k": k, "n": n}, {"k": "sum"}, ((0,), (1,))))


@register("aten.addmm.default")
def addmm(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`n, m k, k n -> m n`; the bias is one of the addends, so with k sharded only one rank may hold it."""
    (m, k), n = inputs[1].shape, inputs[2].shape[1]
    lead = 2 - len(inputs[0].shape)
    bias = tuple(
        name if size == full else WHOLE
        for name, size, full in zip("mn"[lead:], inputs[0].shape, (m, n)[lead:], strict=True)
    )
    return uneven(
        OpDims(
            (bias, ("m", "k"), ("k", "n")),
            (("m", "n"),),
            {"m": m, "k": k, "n": n},
            {"k": "sum"},
            ((0, 1), (0, 2)),
            (0,),
        )
    )


@register("aten.bmm.default")
def bmm(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`b m k, b k n -> b m n`."""
    (b, m, k), n = inputs[0].shape, inputs[1].shape[2]
    sizes = {"b": b, "m": m, "k": k, "n": n}
    return uneven(OpDims((("b", "m", "k"), ("b", "k", "n")), (("b", "m", "n"),), sizes, {"k": "sum"}, ((0,), (1,))))


@register("paraplan.batched_product", workspace=workspace.batched_product)
def batched_product(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`[a b m n,] a b m k, a b k n -> a b m n`; the first, which may be broadcast, is one of the addends."""
    *added, left, right = inputs
    lead = dim_names(len(left.shape) - 2, skip="kmn")
    a, b, out = (*lead, "m", "k"), (*lead, "k", "n"), (*lead, "m", "n")
    sizes = sizes_of((a, left.shape), (b, right.shape))
    if not added:
        return uneven(OpDims((a, b), (out,), sizes, {"k": "sum"}, ((0,), (1,))))
    given = zip(out, added[0].shape, outputs[0].shape, strict=True)
    first = tuple(name if size == full else WHOLE for name, size, full in given)
    return uneven(OpDims((first, a, b), (out,), sizes, {"k": "sum"}, ((0, 1), (0, 2)), (0,)))


@register("paraplan.mergeable", strides="view")
def mergeable(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b -> a b`: a copy where the dims before the last two do not merge in a view."""
    names = dim_names(len(inputs[0].shape))
    return uneven(OpDims((names,), (names,), sizes_of((names, inputs[0].shape)), {}, ((0,),)))


def _weight(transposed: bool) -> tuple[str, str]:
    return ("k", "n") if transposed else ("n", "k")


@register("paraplan.linear", workspace=workspace.linear, expand=product_in_pieces)
def linear(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b k, n k[, n] -> a b n`."""
    lead = dim_names(len(inputs[0].shape) - 1, skip="kn")
    weight = _weight(bool(op.args[3]))
    dims = ((*lead, "k"), weight) + ((("n",),) if len(inputs) == 3 else ())
    sizes = sizes_of((dims[0], inputs[0].shape), (weight, inputs[1].shape))
    partial = ((0,), (1,)) if len(inputs) == 2 else ((0, 2), (1, 2))
    return uneven(OpDims(dims, ((*lead, "n"),), sizes, {"k": "sum"}, partial, (2,) if len(inputs) == 3 else ()))


@register("paraplan.linear_grad_input", workspace=workspace.linear_grad_input, expand=product_in_pieces)
def linear_grad_input(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b n, n k -> a b k`."""
    lead = dim_names(len(inputs[0].shape) - 1, skip="kn")
    weight = _weight(bool(op.args[2]))
    sizes = sizes_of(((*lead, "n"), inputs[0].shape), (weight, inputs[1].shape))
    return uneven(OpDims(((*lead, "n"), weight), ((*lead, "k"),), sizes, {"n": "sum"}, ((0,), (1,))))


@register("paraplan.linear_grad_weight", workspace=workspace.linear_grad_weight)
def linear_grad_weight(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b n, a b k -> n k`: the leading dims are contracted."""
    lead = dim_names(len(inputs[0].shape) - 1, skip="kn")
    sizes = sizes_of(((*lead, "n"), inputs[0].shape), ((*lead, "k"), inputs[1].shape))
    return uneven(
        OpDims(
            ((*lead, "n"), (*lead, "k")), (_weight(bool(op.args[2])),), sizes, dict.fromkeys(lead, "sum"), ((0,), (1,))
        )
    )


@register("aten.baddbmm.default")
def baddbmm(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`b m n, b m k, b k n -> b m n`; the first, which may be broadcast, is one of the addends."""
    (b, m, k), n = inputs[1].shape, inputs[2].shape[2]
    added, lead = inputs[0].shape, 3 - len(inputs[0].shape)
    bias = tuple(
        name if size == full else WHOLE for name, size, full in zip("bmn"[lead:], added, (b, m, n)[lead:], strict=True)
    )
    sizes = {"b": b, "m": m, "k": k, "n": n}
    dims = (bias, ("b", "m", "k"), ("b", "k", "n"))
    return uneven(OpDims(dims, (("b", "m", "n"),), sizes, {"k": "sum"}, ((0, 1), (0, 2)), (0,)))


@register("aten.mv.default")
def mv(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`m k, k -> m`."""
    m, k = inputs[0].shape
    return uneven(OpDims((("m", "k"), ("k",)), (("m",),), {"m": m, "k": k}, {"k": "sum"}, ((0,), (1,))))


@register("aten.dot.default")
def dot(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`k, k -> `."""
    partial = () if op.tensors[0] == op.tensors[1] else ((0,), (1,))
    return uneven(OpDims((("k",), ("k",)), ((),), {"k": inputs[0].shape[0]}, {"k": "sum"}, partial))
