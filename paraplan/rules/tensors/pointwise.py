"""Elementwise ops: every dim of the output has a name; a broadcast dim has none.

Which inputs may be partial sums follows from linearity: a sum in all its addends together, a product in
one factor at a time, a quotient in its numerator. Any dim may be uneven: padding makes padding.
"""

from __future__ import annotations

from dataclasses import replace

from paraplan.ir.model.graph import Op
from paraplan.rules.dims import WHOLE, OpDims, Specs, dim_names, register, replicated, sizes_of, uneven

SUMS = ("aten.add.Tensor", "aten.sub.Tensor")
PRODUCTS = ("aten.mul.Tensor",)
QUOTIENTS = ("aten.div.Tensor", "aten.div.Scalar", "aten.mul.Scalar", "aten.neg.default", "aten._conj_physical.default")
NONLINEAR = (
    "aten.pow.Tensor_Scalar",
    "aten.pow.Tensor_Tensor",
    "aten.rsqrt.default",
    "aten.sqrt.default",
    "aten.reciprocal.default",
    "aten.exp.default",
    "aten.log.default",
    "aten.log1p.default",
    "aten.expm1.default",
    "aten.tanh.default",
    "aten.sigmoid.default",
    "aten.silu.default",
    "aten.gelu.default",
    "aten.relu.default",
    "aten.erf.default",
    "aten.erfinv.default",
    "aten.cos.default",
    "aten.sin.default",
    "aten.abs.default",
    "aten.sign.default",
    "aten.sgn.default",
    "aten.softplus.default",
    "aten.elu.default",
    "aten.leaky_relu.default",
    "aten.hardtanh.default",
    "aten.mish.default",
    "aten.maximum.default",
    "aten.minimum.default",
    "aten.clamp.default",
    "aten.clamp_min.default",
    "aten.clamp_max.default",
    "aten.clamp.Tensor",
    "aten.add.Scalar",
    "aten.sub.Scalar",
    "aten.rsub.Scalar",
    "aten.eq.Tensor",
    "aten.eq.Scalar",
    "aten.ne.Tensor",
    "aten.ne.Scalar",
    "aten.ge.Tensor",
    "aten.ge.Scalar",
    "aten.gt.Tensor",
    "aten.gt.Scalar",
    "aten.le.Tensor",
    "aten.le.Scalar",
    "aten.lt.Tensor",
    "aten.lt.Scalar",
    "aten.logical_not.default",
    "aten.logical_and.default",
    "aten.logical_or.default",
    "aten.bitwise_not.default",
    "aten.bitwise_and.Tensor",
    "aten.bitwise_or.Tensor",
    "aten.__and__.Tensor",
    "aten.__or__.Tensor",
    "aten.floor_divide.default",
    "aten.remainder.Scalar",
    "aten.isnan.default",
    "aten.isinf.default",
    "aten.floor.default",
    "aten.round.default",
    "aten.atan2.default",
    "aten.xlogy.Tensor",
)
GRADIENTS = (
    "aten.tanh_backward.default",
    "aten.sigmoid_backward.default",
    "aten.silu_backward.default",
    "aten.gelu_backward.default",
    "aten.softplus_backward.default",
    "aten.elu_backward.default",
    "aten.hardtanh_backward.default",
    "aten.mish_backward.default",
)
DIVISIONS = ("aten.floor_divide.default",)
ROW_MAJOR = ("aten.pow.Scalar",)
"""Elementwise, but their results never follow their inputs' order."""


def _broadcast(inputs: Specs, outputs: Specs) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...], dict[str, int]]:
    shape = outputs[0].shape
    names = dim_names(len(shape))
    per_input = tuple(
        tuple(
            name if size == out else WHOLE
            for name, size, out in zip(
                names[len(shape) - len(spec.shape) :], spec.shape, shape[len(shape) - len(spec.shape) :], strict=True
            )
        )
        for spec in inputs
    )
    return per_input, names, sizes_of((names, shape))


def _dims(inputs: Specs, outputs: Specs, linear: tuple[tuple[int, ...], ...]) -> OpDims:
    per_input, names, sizes = _broadcast(inputs, outputs)
    return uneven(OpDims(inputs=per_input, outputs=(names,) * len(outputs), sizes=sizes, linear=linear))


@register(*SUMS, strides="elementwise")
def sums(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """x + y is linear in both together; with a number it is not linear at all."""
    return _dims(inputs, outputs, ((0, 1),) if len(inputs) == 2 else ())


@register(*PRODUCTS, strides="elementwise")
def products(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """x * y is linear in each factor alone (x * x, one value twice, in none)."""
    if len(inputs) == 2 and op.tensors[0] == op.tensors[1]:
        return _dims(inputs, outputs, ())
    return _dims(inputs, outputs, tuple((index,) for index in range(len(inputs))))


@register(*QUOTIENTS, strides="elementwise")
def quotients(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """x / y is linear in x."""
    return _dims(inputs, outputs, () if len(set(op.tensors)) < len(op.tensors) else ((0,),))


@register("aten.where.self", strides="elementwise")
def where(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """where(c, x, y) is linear in x and y together."""
    return _dims(inputs, outputs, ((1, 2),) if len(inputs) == 3 else ())


@register("aten._to_copy.default", "aten.clone.default", strides="elementwise")
def casts(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """A cast to a wider float (or of counts) commutes with sums; to a narrower one it rounds: partial sums stop."""
    counts = inputs[0].dtype in ("int64", "int32")
    wider = outputs[0].is_float and (counts or (inputs[0].is_float and outputs[0].real_bytes >= inputs[0].real_bytes))
    return _dims(inputs, outputs, ((0,),) if wider else ())


@register("aten.mse_loss_backward.default")
def mse_loss_backward(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """Elementwise, save that a mean divides by the number of elements it sees: then all of them."""
    return replicated(inputs, outputs) if op.args[3] == 1 else _dims(inputs, outputs, ())


@register("aten.binary_cross_entropy.default", strides="elementwise")
def binary_cross_entropy(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """Elementwise (capture writes sums and means out); refuses padding, which may be no probability."""
    whole = len(inputs) > 2 or _reduction(op, 3)
    return replicated(inputs, outputs) if whole else replace(_dims(inputs, outputs, ()), uneven=frozenset())


@register("aten.binary_cross_entropy_backward.default", strides="elementwise_second")
def binary_cross_entropy_backward(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """Likewise, and linear in the gradient; torch lays the result out after the probabilities."""
    return replicated(inputs, outputs) if len(inputs) > 3 or _reduction(op, 4) else _dims(inputs, outputs, ((0,),))


def _reduction(op: Op, place: int) -> bool:
    """Whether a loss reduces; by default it takes the mean."""
    return op.kwargs.get("reduction", op.args[place] if len(op.args) > place else 1) != 0


@register(*ROW_MAJOR)
@register(*NONLINEAR, strides="elementwise")
def nonlinear(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """Elementwise and linear in nothing; integers are not divided by padding."""
    dims = _dims(inputs, outputs, ())
    return replace(dims, uneven=frozenset()) if op.target in DIVISIONS and len(inputs) == 2 else dims


@register("aten.masked_fill.Scalar")
def masked_fill(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """Linear in what is filled with zeros; row-major like `ROW_MAJOR`."""
    return _dims(inputs, outputs, ((0,),) if op.args[2] == 0 and type(op.args[2]) is not bool else ())


@register(*GRADIENTS, strides="elementwise")
@register("aten.threshold_backward.default", "aten.leaky_relu_backward.default", strides="elementwise_reversed")
def gradients(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """A gradient times a derivative is linear in the gradient; of some torch lays the result out after the input."""
    return _dims(inputs, outputs, () if len(set(op.tensors)) < len(op.tensors) else ((0,),))
