"""Kernels of a mixture's experts: y_t = Σ_j weights_tj · out_e(act(in_e(x_t))), e = ids_tj, for the experts held here.

Rows are sorted by expert and multiplied expert by expert in blocks of at most BLOCK_ROWS, in buffers made once, so
that the work is that of the chosen experts alone and the workspace is known from shapes. Rows of experts that other
ranks hold add nothing, so results over a split set of experts are partial sums. The backward pass computes the
experts' hidden values again instead of having them saved.

The inner weights are [expert, part, width, hidden]: one part, or two where the first gates the second.
Source: dropless routing as in MegaBlocks (Gale et al. 2023), with one product per expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from paraplan.kernels.id_range import check_ids

BLOCK_ROWS = 2048
aten = torch.ops.aten


class Activation(NamedTuple):
    """An activation written into a buffer, and its gradient from (gradient, input) written into another."""

    value: Callable[[Tensor, Tensor], object]
    grad: Callable[[Tensor, Tensor, Tensor], object]


def _gelu(approximate: str) -> Activation:
    return Activation(
        lambda x, out: aten.gelu.out(x, approximate=approximate, out=out),
        lambda g, x, out: aten.gelu_backward.grad_input(g, x, approximate=approximate, grad_input=out),
    )


ACTIVATIONS = {
    "silu": Activation(
        lambda x, out: aten.silu.out(x, out=out), lambda g, x, out: aten.silu_backward.grad_input(g, x, grad_input=out)
    ),
    "gelu": _gelu("none"),
    "gelu_tanh": _gelu("tanh"),
    "relu": Activation(
        lambda x, out: aten.clamp_min.out(x, 0, out=out),
        lambda g, x, out: aten.threshold_backward.grad_input(g, x, 0, grad_input=out),
    ),
}


class _Block(NamedTuple):
    """Some rows of one expert: which expert, the tokens, and which of a token's choices it is."""

    expert: int
    tokens: Tensor
    choices: Tensor


def _blocks(ids: Tensor, experts: int, e_start: int, most: int) -> Iterator[_Block]:
    """All rows of the experts [e_start, e_start + experts), expert by expert, at most so many at a time."""
    choices = ids.shape[-1]
    order, ends = _sorted(ids, experts, e_start)
    start = 0
    for expert, end in enumerate(ends):
        for first in range(start, end, most):
            rows = order[first : min(first + most, end)]
            yield _Block(expert, rows // choices, rows % choices)
        start = end


def _sorted(ids: Tensor, experts: int, e_start: int) -> tuple[Tensor, list[int]]:
    """Rows (token · choices + choice) by expert, and where each expert's end."""
    local = ids.reshape(-1) - e_start
    local.masked_fill_((local < 0) | (local >= experts), experts)
    ends = torch.bincount(local, minlength=experts + 1)[:experts].cumsum(0).tolist()
    return local.sort(stable=True)[1], ends


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, activation: str, total: int, e_start: int = 0
) -> Tensor:
    """The weighted sum of the chosen experts' results.

    Args:
        x: [tokens, hidden].
        ids: [tokens, choices], numbers of experts; one at or beyond `total` is nobody.
        weights: [tokens, choices].
        w_in: [experts, parts, width, hidden], the experts held here.
        w_out: [experts, n, width].
        activation: a name in `ACTIVATIONS`.
        total: number of experts over all ranks.
        e_start: number of the first expert held here.
    Returns:
        [tokens, n].
    """
    held, parts, width, hidden = w_in.shape
    rows = min(x.shape[0], BLOCK_ROWS)
    out = x.new_zeros(x.shape[0], w_out.shape[1])
    xs, us, ys = x.new_empty(rows, hidden), x.new_empty(rows, parts * width), x.new_empty(rows, w_out.shape[1])
    for expert, tokens, choices in _blocks(ids, held, e_start, rows):
        count = tokens.shape[0]
        u = _inner(x, tokens, w_in[expert], xs[:count], us[:count])
        z = u[:, :width]
        ACTIVATIONS[activation].value(z, z)
        if parts == 2:
            z.mul_(u[:, width:])
        y = torch.mm(z, w_out[expert].t(), out=ys[:count])
        y.mul_(weights[tokens, choices].unsqueeze(-1))
        out.index_add_(0, tokens, y)
    return out


def _inner(x: Tensor, tokens: Tensor, w: Tensor, xs: Tensor, us: Tensor) -> Tensor:
    """in_e of some tokens; `xs` receives the tokens."""
    torch.index_select(x, 0, tokens, out=xs)
    return torch.mm(xs, w.flatten(0, 1).t(), out=us)


def experts_grad(
    g: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    activation: str,
    total: int,
    e_start: int = 0,
    train: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of `experts` in x, weights, w_in and w_out.

    Args:
        g: [tokens, n], gradient of `experts`' output.
        x, ids, weights, w_in, w_out, activation, total, e_start: as `experts` takes them.
        train: whether w_in and w_out get gradients; None is returned for them otherwise.
    Returns:
        Gradients shaped as x, weights, w_in, w_out. Those of x and weights are partial sums where other ranks hold
        experts.
    """
    held, parts, width, hidden = w_in.shape
    rows = min(x.shape[0], BLOCK_ROWS)
    gx, gw = x.new_zeros(x.shape), weights.new_zeros(weights.shape)
    g_in = w_in.new_zeros(w_in.shape) if train else None
    g_out = w_out.new_zeros(w_out.shape) if train else None
    xs, us, gs = x.new_empty(rows, hidden), x.new_empty(rows, parts * width), x.new_empty(rows, w_out.shape[1])
    ds, ss, zs = (x.new_empty(rows, width) for _ in range(3))
    for expert, tokens, choices in _blocks(ids, held, e_start, rows):
        count = tokens.shape[0]
        d, s, z = ds[:count], ss[:count], zs[:count]
        u = _inner(x, tokens, w_in[expert], xs[:count], us[:count])
        gy = torch.index_select(g, 0, tokens, out=gs[:count])
        gate, up = u[:, :width], u[:, width:]
        ACTIVATIONS[activation].value(gate, s)
        torch.mul(s, up, out=z) if parts == 2 else z.copy_(s)
        torch.mm(gy, w_out[expert], out=d)
        gw[tokens, choices] = torch.bmm(d.unsqueeze(1), z.unsqueeze(2)).view(count).to(gw.dtype)
        scale = weights[tokens, choices].unsqueeze(-1)
        d.mul_(scale)
        if g_out is not None:
            g_out[expert].addmm_(gy.mul_(scale).t(), z)
        if parts == 2:
            torch.mul(d, s, out=z)
            d.mul_(up)
        ACTIVATIONS[activation].grad(d, gate, s)
        gate.copy_(s)
        if parts == 2:
            up.copy_(z)
        if g_in is not None:
            g_in[expert].flatten(0, 1).addmm_(u.t(), xs[:count])
        gx.index_add_(0, tokens, torch.mm(u, w_in[expert].flatten(0, 1), out=xs[:count]))
    return gx, gw, g_in, g_out


def embedding_tables(w: Tensor, ids: Tensor, v_start: int = 0, rows: int = -1) -> Tensor:
    """Rows of many tables: y[..., t, :] = w[t, ids[..., t]]; zeros for ids outside this block of rows.

    Args:
        w: [t, v, h], the tables, or the same block of rows of each.
        ids: [..., t], row numbers of the whole tables.
        v_start: number of the block's first row.
        rows: of each whole table; -1 where w holds all of them.
    Raises:
        IndexError: an id is outside the whole tables (not on CUDA).
    """
    check_ids(ids, w.shape[1] if rows < 0 else rows, "id")
    local, outside = _table_rows(w.shape[0], w.shape[1], ids, v_start)
    found = torch.nn.functional.embedding(local, w.reshape(-1, w.shape[2]))
    return found.masked_fill_(outside.unsqueeze(-1), 0)


def embedding_tables_grad(g: Tensor, ids: Tensor, num_rows: int, v_start: int = 0) -> Tensor:
    """The gradient of `embedding_tables` in w: sums g into [t, num_rows, h] by id; ids outside contribute nothing.

    Args:
        g: [..., t, h], gradient of `embedding_tables`' output.
        ids: [..., t], row numbers of the whole tables.
        num_rows: rows of each table that are held here.
        v_start: number of the first of them.
    """
    tables = ids.shape[-1]
    local, outside = _table_rows(tables, num_rows, ids, v_start)
    kept = g.masked_fill(outside.unsqueeze(-1), 0)
    made = aten.embedding_dense_backward(kept, local, tables * num_rows, -1, False)
    return made.view(tables, num_rows, g.shape[-1])


def _table_rows(tables: int, rows: int, ids: Tensor, v_start: int) -> tuple[Tensor, Tensor]:
    """Row numbers in all tables laid one after another, and which ids have none."""
    local = ids - v_start
    outside = (local < 0) | (local >= rows)
    first = torch.arange(tables, device=ids.device) * rows
    return local.clamp_(0, rows - 1).add_(first), outside
