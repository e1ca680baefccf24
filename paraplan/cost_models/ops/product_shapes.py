"""The products of matrices that ops consist of: shapes, and the flops they come to."""

from __future__ import annotations

import math
from collections.abc import Callable

from paraplan.cost_models.ops.tiles import Product, product_of
from paraplan.ir.errors import CostModelError
from paraplan.ir.execution.rank_program import SUM
from paraplan.ir.model.tensor import DTYPE_BYTES
from paraplan.ir.profile import Spec

Specs = tuple[Spec, ...]


Outs = tuple[Spec | None, ...]


EXPERT_TOTALS = {"paraplan.experts": 6, "paraplan.experts_grad": 7}


def _linear(ins: Specs, outs: Outs, flag: int) -> Product:
    return product_of(math.prod(ins[0].shape[:-1]), first_of(outs).shape[-1], ins[0].shape[-1])


def _linear_grad_weight(ins: Specs, outs: Outs, flag: int) -> Product:
    return product_of(ins[0].shape[-1], ins[1].shape[-1], math.prod(ins[0].shape[:-1]))


def _turned_grad_weight(ins: Specs, outs: Outs, flag: int) -> Product:
    return product_of(ins[0].shape[0], ins[1].shape[0], math.prod(ins[0].shape[1:]))


def _linear_into(ins: Specs, outs: Outs, flag: int) -> Product:
    return product_of(math.prod(ins[1].shape[:-1]), ins[0].shape[-1], ins[1].shape[-1])


def _linear_rows(ins: Specs, outs: Outs, flag: int) -> Product:
    return product_of(math.prod(first_of(outs).shape[:-1]), first_of(outs).shape[-1], ins[0].shape[-1])


def _mm(ins: Specs, outs: Outs, flag: int) -> Product:
    (m, k), n = ins[-2].shape[-2:], ins[-1].shape[-1]
    return product_of(m, n, k, math.prod(ins[-2].shape[:-2]))


def _matmul(ins: Specs, outs: Outs, flag: int) -> Product:
    k, numel = ins[0].shape[-1], math.prod(first_of(outs).shape)
    n = ins[1].shape[-1] if len(ins[1].shape) > 1 else 1
    return Product(2 * numel * k, min(k, n, ins[0].shape[-2] if len(ins[0].shape) > 1 else 1))


def _attention(ins: Specs, outs: Outs, flag: int) -> Product:
    (b, h, s, d), (t, e) = ins[0].shape, ins[2].shape[-2:]
    return Product(b * h * _scores(s, t, flag) * (d + e), min(s, t))


def _attention_grad(ins: Specs, outs: Outs, flag: int) -> Product:
    # Scores again and dq, dk over d; dv and the probabilities' gradient over e.
    (b, h, s, d), (t, e) = ins[1].shape, ins[3].shape[-2:]
    return Product(b * h * _scores(s, t, flag) * (3 * d + 2 * e), min(s, t))


def _scores(s: int, t: int, causal: int) -> int:
    """Twice the scores computed: where one side is a rank's share of a causal sequence, those of the busiest rank."""
    return 2 * s * t - (min(s, t) ** 2 if causal else 0)


def _convolution(ins: Specs, outs: Outs, flag: int) -> Product:
    moved, weight = (ins[0] if flag else first_of(outs)), ins[1].shape
    per_element = math.prod(weight[1:])
    rows = math.prod(moved.shape) // max(moved.shape[1], 1)
    return Product(2 * math.prod(moved.shape) * per_element, min(rows, weight[0], per_element))


def _convolution_backward(ins: Specs, outs: Outs, flag: int) -> Product:
    products = sum(out is not None for out in outs[:2])
    one = _convolution((ins[1], ins[2]), (ins[0],), flag)
    return one._replace(flops=products * one.flops)


def _conv_grad_input(ins: Specs, outs: Outs, flag: int) -> Product:
    return _convolution((first_of(outs), ins[1]), (ins[0],), flag)


def _conv_grad_weight(ins: Specs, outs: Outs, flag: int) -> Product:
    return _convolution((ins[1], first_of(outs)), (ins[0],), flag)


def _experts(ins: Specs, outs: Outs, total: int) -> Product:
    # Routing is assumed even: a rank that holds some experts computes their share of the chosen rows.
    return _expert_rows(ins[1], ins[3], ins[4], total, 1, 1, 0)


def _experts_grad(ins: Specs, outs: Outs, total: int) -> Product:
    # The inner product again, its gradient in x and the outer one's in the hidden values; both stacks' where they
    # train; and a row's hidden values times their gradient, for the gradient of its weight.
    trained = len(outs) == 4 and outs[2] is not None and outs[3] is not None
    return _expert_rows(ins[2], ins[4], ins[5], total, 3 if trained else 2, 2 if trained else 1, 1)


def _expert_rows(ids: Spec, w_in: Spec, w_out: Spec, total: int, inner: int, outer: int, dots: int) -> Product:
    held, parts, width, hidden = w_in.shape
    per_expert = max(math.prod(ids.shape) // max(total, 1), 1)
    flops = 2 * per_expert * held * width * (inner * parts * hidden + outer * w_out.shape[1] + dots)
    return Product(flops, min(per_expert, width, hidden), (held, per_expert, width, hidden))


def expert_copies(ins: Specs, total: int) -> int:
    """Bytes around the products of experts: rows gathered, hidden values activated, results read to be added."""
    *rows, ids, _, w_in, w_out = ins
    held, parts, width, _ = w_in.shape
    gathered = sum(x.shape[1] for x in rows)  # with gradients, hidden values are read and written with theirs
    hidden = (parts + 1) * width * len(rows)
    added = w_out.shape[1] if len(rows) == 1 else w_in.shape[3]
    count = max(math.prod(ids.shape) // max(total, 1), 1) * held
    return count * (2 * gathered + hidden + added) * DTYPE_BYTES[w_in.dtype]


def first_of(outs: Outs) -> Spec:
    for out in outs:
        if out is not None:
            return out
    raise CostModelError("an op without any output has no matrix product to price")


PRODUCTS: dict[str, tuple[str, Callable[[Specs, Outs, int], Product]]] = {
    "paraplan.linear": ("matmul", _linear),
    "paraplan.linear_grad_input": ("matmul", _linear),
    "paraplan.linear_grad_weight": ("matmul", _linear_grad_weight),
    SUM: ("matmul", lambda ins, outs, flag: _linear_grad_weight(ins[1:], outs, flag)),
    "paraplan.batched_product": ("matmul", _mm),
    "paraplan.float8_linear": ("matmul", _linear),
    "paraplan.float8_linear_grad_input": ("matmul", _linear),
    "paraplan.float8_linear_grad_weight": ("matmul", _turned_grad_weight),
    "paraplan.linear_into_": ("matmul", _linear_into),
    "paraplan.linear_rows": ("matmul", _linear_rows),
    "paraplan.experts": ("matmul", _experts),
    "paraplan.experts_grad": ("matmul", _experts_grad),
    "aten.linear": ("matmul", _linear),
    "aten.mm": ("matmul", _mm),
    "aten.bmm": ("matmul", _mm),
    "aten.addmm": ("matmul", _mm),
    "aten.baddbmm": ("matmul", _mm),
    "aten.matmul": ("matmul", _matmul),
    "aten.convolution": ("matmul", _convolution),
    "aten.convolution_backward": ("matmul", _convolution_backward),
    "paraplan.conv": ("matmul", _convolution),
    "paraplan.conv_grad_input": ("matmul", _conv_grad_input),
    "paraplan.conv_grad_weight": ("matmul", _conv_grad_weight),
    "paraplan.attention": ("attention", _attention),
    "paraplan.attention_grad": ("attention", _attention_grad),
    "aten.scaled_dot_product_attention": ("attention", _attention),
}


# Operands of products in float8 that lie the wrong way, by whether the weight is transposed.
TURNED = {
    ("paraplan.float8_linear", True): (1,),
    ("paraplan.float8_linear_grad_input", False): (1,),
}
