"""Canonical ops of mixtures and of many tables: their shapes, and their differentiable forms.

As in `canonical` and `autograd`; kernels in `expert_kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paraplan.capture.canonical.canonical import define
from paraplan.kernels import expert_kernels

Grads = tuple[Tensor | None, ...]


def _experts_shape(x: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape[0], w_out.shape[1])


def _experts_grad_kernel(*args: Any) -> tuple[Tensor, ...]:
    made = expert_kernels.experts_grad(*args)
    return tuple(made[0].new_empty(0) if grad is None else grad for grad in made)


def _experts_grad_shape(
    g: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    activation: str,
    total: int,
    e_start: int,
    train: bool,
) -> tuple[Tensor, ...]:
    inner = (w_in.new_empty(w_in.shape), w_out.new_empty(w_out.shape)) if train else (x.new_empty(0), x.new_empty(0))
    return (x.new_empty(x.shape), weights.new_empty(weights.shape), *inner)


def _tables_shape(w: Tensor, ids: Tensor, v_start: int) -> Tensor:
    return w.new_empty(*ids.shape, w.shape[2])


def _tables_grad_shape(g: Tensor, ids: Tensor, num_rows: int, v_start: int) -> Tensor:
    return g.new_empty(ids.shape[-1], num_rows, g.shape[-1])


_MIXTURE = "Tensor ids, Tensor weights, Tensor w_in, Tensor w_out, str activation, int total, int e_start"
define(f"experts(Tensor x, {_MIXTURE}) -> Tensor", expert_kernels.experts, _experts_shape)
define(
    f"experts_grad(Tensor g, Tensor x, {_MIXTURE}, bool train) -> (Tensor, Tensor, Tensor, Tensor)",
    _experts_grad_kernel,
    _experts_grad_shape,
)
define("embedding_tables(Tensor w, Tensor ids, int v_start) -> Tensor", expert_kernels.embedding_tables, _tables_shape)
define(
    "embedding_tables_grad(Tensor g, Tensor ids, int num_rows, int v_start) -> Tensor",
    expert_kernels.embedding_tables_grad,
    _tables_grad_shape,
)
ops = torch.ops.paraplan


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, activation: str, total: int
    ) -> Tensor:
        ctx.save_for_backward(x, ids, weights, w_in, w_out)
        ctx.rest = (activation, total, 0)
        return ops.experts(x, ids, weights, w_in, w_out, *ctx.rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        need = ctx.needs_input_grad
        train = bool(need[3] or need[4])
        made = ops.experts_grad(grads[0], *ctx.saved_tensors, *ctx.rest, train)
        gx, gw, g_in, g_out = (grad if need[index] else None for grad, index in zip(made, (0, 2, 3, 4), strict=True))
        return gx, None, gw, g_in, g_out, None, None


class _EmbeddingTables(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = w.shape[1]
        return ops.embedding_tables(w, ids, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        (ids,) = ctx.saved_tensors
        return ops.embedding_tables_grad(grads[0], ids, ctx.rows, 0), None


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, activation: str, total: int
) -> Tensor:
    """`paraplan.experts` of all experts, differentiable.

    Args:
        x, ids, weights, w_in, w_out, activation, total: as `kernels.expert_kernels.experts` takes them.
    """
    return _Experts.apply(x, ids, weights, w_in, w_out, activation, total)


def embedding_tables(w: Tensor, ids: Tensor) -> Tensor:
    """`paraplan.embedding_tables`, differentiable."""
    return _EmbeddingTables.apply(w, ids)


HEAVY = frozenset({experts})
