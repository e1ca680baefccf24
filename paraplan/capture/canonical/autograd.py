"""Differentiable forms of the canonical ops, which the joint trace runs through.

Each is an autograd.Function whose forward and backward call ops of `canonical`, so the recorded joint graph
holds exactly those. A function marked `random` gets the seed and its slot from the segment that runs it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paraplan.capture.canonical import experts, float8, scan
from paraplan.capture.canonical.canonical import ops

Grads = tuple[Tensor | None, ...]


def _conjugate(x: Tensor) -> Tensor:
    """What a factor's gradient is multiplied by: the other factor, of complex numbers its conjugate."""
    return x.conj() if x.is_complex() else x


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.transposed = transposed
        return ops.linear(x, w, bias, transposed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        (g,) = grads
        x, w = ctx.saved_tensors
        gx = ops.linear_grad_input(g, _conjugate(w), ctx.transposed) if ctx.needs_input_grad[0] else None
        gw = ops.linear_grad_weight(g, _conjugate(x), ctx.transposed) if ctx.needs_input_grad[1] else None
        lead = list(range(g.dim() - 1))
        gb = (torch.ops.aten.sum.dim_IntList(g, lead) if lead else g) if ctx.needs_input_grad[2] else None
        return gx, gw, gb, None


class _BatchedProduct(torch.autograd.Function):
    """Operands are made mergeable once, for the forward and the backward."""

    @staticmethod
    def forward(ctx: Any, added: Tensor | None, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
        a, b = ops.mergeable(a), ops.mergeable(b)
        ctx.save_for_backward(a, b)
        ctx.rest = (None if added is None else added.shape, beta, alpha)
        return ops.batched_product(added, a, b, beta, alpha)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        g = ops.mergeable(grads[0])
        a, b = (_conjugate(x).transpose(-1, -2) for x in ctx.saved_tensors)
        shape, beta, alpha = ctx.rest
        ga = ops.batched_product(None, g, b, 1.0, alpha) if ctx.needs_input_grad[1] else None
        gb = ops.batched_product(None, a, g, 1.0, alpha) if ctx.needs_input_grad[2] else None
        return beta * g.sum_to_size(shape) if ctx.needs_input_grad[0] else None, ga, gb, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding_idx = w.shape[0], padding_idx
        return ops.embedding(w, ids, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        (ids,) = ctx.saved_tensors
        return ops.embedding_grad(grads[0], ids, ctx.rows, ctx.padding_idx, 0), None, None


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Tensor, p: float, slot: int) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.rest = (p, slot, list(x.shape), [0] * x.dim())
        return ops.dropout(x, seed, *ctx.rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        (seed,) = ctx.saved_tensors
        return ops.dropout(grads[0], seed, *ctx.rest), None, None, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        seed: Tensor | None,
        p: float,
        slot: int,
        causal: bool,
        scale: float,
    ) -> Tensor:
        shape = [q.shape[0], q.shape[1], q.shape[2], k.shape[2]]
        ctx.rest = (p, slot, causal, scale, shape, [0, 0, 0, 0])
        out, lse = ops.attention(q, k, v, mask, seed, *ctx.rest)
        ctx.save_for_backward(q, k, v, mask, seed, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        mask_grad = bool(ctx.needs_input_grad[3])
        q, k, v, mask, seed, out, lse = ctx.saved_tensors
        made = ops.attention_grad(grads[0], q, k, v, mask, seed, out, lse, *ctx.rest, mask_grad)
        kept = [grad if ctx.needs_input_grad[index] else None for index, grad in enumerate(made)]
        return (*kept, None, None, None, None, None)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: int, w: Tensor | None, eps: float) -> Tensor:
        out, rstd = ops.rms_norm(x, dims, w, eps)
        ctx.save_for_backward(x, rstd, w)
        ctx.dims = dims
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        x, rstd, w = ctx.saved_tensors
        wanted = [True, w is not None and bool(ctx.needs_input_grad[2])]
        dx, dw = ops.rms_norm_grad(grads[0], x, ctx.dims, rstd, w, wanted)
        return dx if ctx.needs_input_grad[0] else None, None, dw if wanted[1] else None, None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        m = ops.ce_max(logits)
        s = ops.ce_sumexp(logits, m)
        t = ops.ce_target(logits, labels, ignore_index, 0)
        ctx.save_for_backward(logits, m, s, labels)
        ctx.ignore_index = ignore_index
        return ops.ce_loss(m, s, t, labels, ignore_index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        logits, m, s, labels = ctx.saved_tensors
        return ops.ce_grad(grads[0], logits, m, s, labels, ctx.ignore_index, 0), None, None


def linear(x: Tensor, w: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """`paraplan.linear`, differentiable.

    Args:
        x, w, bias, transposed: as `kernels.reference_kernels.linear` takes them.
    """
    return _Linear.apply(x, w, bias, transposed)


def batched_product(a: Tensor, b: Tensor, added: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """`paraplan.batched_product`, differentiable.

    Args:
        a, b, added, beta, alpha: as `kernels.reference_kernels.batched_product` takes them, strides being any.
    """
    return _BatchedProduct.apply(added, a, b, beta, alpha)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`torch.matmul` of matrices with the same leading dims, two of which stay two."""
    return batched_product(a, b) if a.dim() > 3 else torch.bmm(a, b)


def embedding(w: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
    """`paraplan.embedding` of a whole table, differentiable.

    Args:
        w: [v, h].
        ids: [...], row numbers.
        padding_idx: the id whose row gets no gradient; -1 for none.
    """
    return _Embedding.apply(w, ids, padding_idx)


def dropout(x: Tensor, p: float, *, seed: Tensor, slot: int) -> Tensor:
    """`paraplan.dropout` of a whole tensor, differentiable.

    Args:
        x: any shape.
        p: probability of dropping.
        seed, slot: of the segment that runs it; see `kernels.random_kernels.dropout`.
    """
    return _Dropout.apply(x, seed, p, slot)


def uniform(x: Tensor, *, seed: Tensor, slot: int) -> Tensor:
    """`paraplan.uniform`: numbers in (0, 1) of x's shape and dtype.

    Args:
        x: float32 or float64; its values are not read.
        seed, slot: as `dropout` takes them.
    """
    return ops.uniform(x, seed, slot, list(x.shape), [0] * x.dim())


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """`paraplan.attention` without dropout, differentiable.

    Args:
        q: [b, h, s, d].
        k, v: [b, g, t, d] and [b, g, t, e], h a multiple of g.
        mask: bool (True attends) or float (added), broadcastable to [b, h, s, t] with 4 dims; None for none.
        causal: whether query i attends to keys 0..i alone.
        scale: factor on q kᵀ.
    Returns:
        [b, h, s, e], stored [b, s, h, e].
    """
    return _Attention.apply(q, k, v, mask, None, 0.0, 0, causal, scale)


def attention_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    p: float,
    *,
    seed: Tensor,
    slot: int,
) -> Tensor:
    """`paraplan.attention` with dropout on the probabilities, differentiable.

    Args:
        q, k, v, mask, causal, scale: as `attention` takes them.
        p: probability of dropping.
        seed, slot: as `dropout` takes them.
    """
    return _Attention.apply(q, k, v, mask, seed, p, slot, causal, scale)


def rms_norm(x: Tensor, dims: int, w: Tensor | None, eps: float) -> Tensor:
    """`paraplan.rms_norm`, differentiable; the result alone.

    Args:
        x, dims, w, eps: as `kernels.norm_kernels.rms_norm` takes them.
    """
    return _RMSNorm.apply(x, dims, w, eps)


def cross_entropy_sum(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Sum of the cross-entropies of valid labels, differentiable: [], float32 at least.

    Args:
        logits: [..., v].
        labels: [...], classes.
        ignore_index: the label of rows that count for nothing.
    """
    return _CrossEntropy.apply(logits, labels, ignore_index)


RANDOM = frozenset({dropout, attention_dropout, uniform})
_PRODUCTS = frozenset({linear, matmul, batched_product, attention, attention_dropout})
HEAVY = _PRODUCTS | {cross_entropy_sum} | experts.HEAVY | float8.HEAVY | scan.HEAVY
