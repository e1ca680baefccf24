"""Mixtures of experts by grouped products: sorted by expert on the device, and no number is read on the host.

Chosen rows (token · choices + choice) are sorted by expert. Those of the experts held here lie one after another, and
where each expert's end is found by bisection. Rows are walked in pieces of `grouped_rows`, whose number follows from
shapes alone; a piece after the last row does nothing. Within a piece:

    forward     xs = rows of x;  u = xs · in_e;  z = act(u), gated;  y = z · out_e;  out[t] += Σ weight · y
    backward    u again;  d = g · out_eᵀ;  one kernel makes z · weight, the gradients of u and of the weights;  two
                products over rows give those of the stacks, one that of x

A token's results are added in float32 in the order of its choices, so sums do not depend on what runs when.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paraplan.ir.machine.kernel_choice import grouped_rows
from paraplan.kernels.gpu.activations import KINDS, activated
from paraplan.kernels.gpu.rows.grouped_products import outer, product
from paraplan.kernels.gpu.triton_launch import launch, row_major

BLOCK = 1024


@triton.jit
def _below(ranked, key, count, steps):  # type: ignore[no-untyped-def]
    """How many of the sorted numbers are below a key."""
    low = key * 0
    high = low + count
    for _ in range(steps):
        mid = (low + high) // 2
        open_ = low < high
        below = tl.load(ranked + mid, mask=open_, other=0) < key
        low = tl.where(open_ & below, mid + 1, low)
        high = tl.where(open_ & (below == 0), mid, high)
    return low


@triton.jit
def _place(ranked, order, first, inverse, ends, count, steps, e_start, held, rows, pieces, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the first expert's rows begin, which place each row has from there, and where experts end in each piece."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    start = _below(ranked, tl.program_id(0).to(tl.int64) * 0 + e_start, count, steps)
    tl.store(first, start, mask=tl.program_id(0) == 0)
    row = tl.load(order + at, mask=at < count, other=0)
    tl.store(inverse + row, (at - start).to(tl.int32), mask=at < count)
    end = _below(ranked, at % held + 1 + e_start, count, steps) - start - at // held * rows
    end = tl.minimum(tl.maximum(end, 0), rows)
    tl.store(ends + at, end.to(tl.int32), mask=at < held * pieces)


@triton.jit
def _row(x, out, source, row, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        value = tl.load(x + source * width + column, mask=column < width)
        tl.store(out + row * width + column, value, mask=column < width)


@triton.jit
def _gather(
    x, g, order, first, ends, xs, gs, begin, choices, width, g_width, held, grad: tl.constexpr, block: tl.constexpr
):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(ends + held - 1):
        token = tl.load(order + tl.load(first) + begin + row) // choices
        _row(x, xs, token, row, width, block)
        if grad:
            _row(g, gs, token, row, g_width, block)


@triton.jit
def _hidden(u, ends, width, held, gated: tl.constexpr, kind: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """u[:, :width] := act(u[:, :width]), times u[:, width:] where gated."""
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(ends + held - 1):
        column = tl.program_id(1) * block + tl.arange(0, block)
        place = u + row * width * (1 + gated) + column
        value, _ = activated(tl.load(place, mask=column < width, other=0.0).to(tl.float32), kind)
        if gated:
            value *= tl.load(place + width, mask=column < width, other=0.0).to(tl.float32)
        tl.store(place, value.to(u.dtype.element_ty), mask=column < width)


@triton.jit
def _hidden_grad(
    u,
    d,
    weights,
    gw,
    order,
    first,
    ends,
    begin,
    width,
    held,
    gated: tl.constexpr,
    kind: tl.constexpr,
    block: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """u := its gradient, gw := Σ d · z, d := z · weight, z being what `_hidden` makes of u."""
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(ends + held - 1):
        chosen = tl.load(order + tl.load(first) + begin + row)
        weight = tl.load(weights + chosen).to(tl.float32)
        total = tl.zeros((block,), tl.float32)
        for start in range(0, width, block):
            column = start + tl.arange(0, block)
            here = column < width
            place = u + row * width * (1 + gated) + column
            grad = tl.load(d + row * width + column, mask=here, other=0.0).to(tl.float32)
            value, slope = activated(tl.load(place, mask=here, other=0.0).to(tl.float32), kind)
            inner = grad * weight * slope
            made = value
            if gated:
                up = tl.load(place + width, mask=here, other=0.0).to(tl.float32)
                tl.store(place + width, (grad * weight * value).to(u.dtype.element_ty), mask=here)
                inner *= up
                made = value * up
            tl.store(place, inner.to(u.dtype.element_ty), mask=here)
            tl.store(d + row * width + column, (made * weight).to(d.dtype.element_ty), mask=here)
            total += grad * made
        tl.store(gw + chosen, tl.sum(total, 0).to(gw.dtype.element_ty))


@triton.jit
def _combine(
    y,
    ids,
    weights,
    inverse,
    out,
    choices,
    width,
    e_start,
    held,
    begin,
    rows,
    weighted: tl.constexpr,
    adds: tl.constexpr,
    block: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """out[t] := Σ over the choices of t in this piece of y, weighted, and out[t] itself where it `adds`."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros((block,), tl.float32)
    if adds:
        total += tl.load(out + token * width + column, mask=column < width, other=0.0).to(tl.float32)
    for choice in range(choices):
        chosen = token * choices + choice
        expert = tl.load(ids + chosen) - e_start
        row = tl.load(inverse + chosen).to(tl.int64) - begin
        if (expert >= 0) & (expert < held) & (row >= 0) & (row < rows):
            value = tl.load(y + row * width + column, mask=column < width, other=0.0).to(tl.float32)
            if weighted:
                value *= tl.load(weights + chosen).to(tl.float32)
            total += value
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _add(total, part, ends, size, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """total[g] += part[g] of groups that have rows."""
    group = tl.program_id(0)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    if tl.load(ends + group) > start:
        column = tl.program_id(1).to(tl.int64) * block + tl.arange(0, block)
        place = group.to(tl.int64) * size + column
        value = tl.load(total + place, mask=column < size, other=0.0).to(tl.float32)
        value += tl.load(part + place, mask=column < size, other=0.0).to(tl.float32)
        tl.store(total + place, value.to(total.dtype.element_ty), mask=column < size)


class _Sorted(NamedTuple):
    """Chosen rows by expert.

    Attributes:
        ids: [token, choice].
        order: [place], the row there; those of the experts held here from `first` on.
        first: one number.
        inverse: [row], its place, less `first`.
        ends: [piece, expert], where rows end within a piece.
        rows: of a piece.
        e_start: number of the first expert held here.
    """

    ids: Tensor
    order: Tensor
    first: Tensor
    inverse: Tensor
    ends: Tensor
    rows: int
    e_start: int

    def gathered(self, piece: int, x: Tensor, g: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """A piece's rows of x and of g."""
        given = x if g is None else g
        made = x.new_empty(self.rows, x.shape[1]), x if g is None else g.new_empty(self.rows, g.shape[1])
        ends, choices = self.ends[piece], self.ids.shape[1]
        widths = x.shape[1], given.shape[1]
        args = x, given, self.order, self.first, ends, *made, piece * self.rows, choices, *widths, len(ends)
        read = x, given, self.order, self.first, ends
        launch(_gather, (self.rows,), (*args, g is not None, BLOCK), read, made[: 1 if g is None else 2])
        return made

    def combined(self, piece: int, y: Tensor, weights: Tensor | None, out: Tensor) -> None:
        """Adds a piece's rows to the tokens they are of; the first piece begins with nothing."""
        tokens, choices = self.ids.shape
        given = y if weights is None else weights
        width = out.shape[1]
        args = y, self.ids, given, self.inverse, out, choices, width, self.e_start, self.ends.shape[1]
        grid = (tokens, triton.cdiv(width, BLOCK))
        rest = piece * self.rows, self.rows, weights is not None, piece > 0, BLOCK
        launch(_combine, grid, (*args, *rest), (y, self.ids, given, self.inverse), (out,))


def _sorted(ids: Tensor, held: int, total: int, e_start: int) -> _Sorted:
    count = ids.numel()
    ranked, order = torch.sort(ids.view(-1), stable=True)
    rows = grouped_rows(count, held, total)
    pieces = triton.cdiv(count, rows)
    first, inverse = ids.new_empty(1), torch.empty(count, dtype=torch.int32, device=ids.device)
    ends = torch.empty((pieces, held), dtype=torch.int32, device=ids.device)
    made = first, inverse, ends
    args = ranked, order, *made, count, count.bit_length(), e_start, held, rows, pieces, BLOCK
    launch(_place, (triton.cdiv(max(count, ends.numel()), BLOCK),), args, (ranked, order), made)
    return _Sorted(ids, order, *made, rows, e_start)


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, activation: str, total: int, e_start: int = 0
) -> Tensor:
    """As `kernels.expert_kernels.experts`."""
    x, ids, weights, w_in, w_out = map(row_major, (x, ids, weights, w_in, w_out))
    found = _sorted(ids, w_in.shape[0], total, e_start)
    out = x.new_empty(x.shape[0], w_out.shape[1])
    for piece in range(len(found.ends)):
        found.combined(piece, _results(found, piece, x, w_in, w_out, activation), weights, out)
    return out


def _results(found: _Sorted, piece: int, x: Tensor, w_in: Tensor, w_out: Tensor, activation: str) -> Tensor:
    """What the experts make of a piece's rows."""
    parts, width = w_in.shape[1:3]
    ends = found.ends[piece]
    u = product(found.gathered(piece, x)[0], w_in.flatten(1, 2).transpose(1, 2), ends)
    args = u, ends, width, len(ends), parts == 2, KINDS[activation], BLOCK
    launch(_hidden, (found.rows, triton.cdiv(width, BLOCK)), args, (u, ends), (u,))
    return product(u[:, :width], w_out.transpose(1, 2), ends)


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
    """As `kernels.expert_kernels.experts_grad`."""
    g, x, ids, weights, w_in, w_out = map(row_major, (g, x, ids, weights, w_in, w_out))
    found = _sorted(ids, w_in.shape[0], total, e_start)
    grads = _Grads(torch.empty_like(x), torch.zeros_like(weights), [])
    for piece in range(len(found.ends)):
        _piece_grads(found, piece, (g, x, weights, w_in, w_out), activation, grads, train)
    if not train:
        return grads.x, grads.weights, None, None
    g_out, g_in = grads.stacks
    return grads.x, grads.weights, g_in.view(w_in.shape), g_out


class _Grads(NamedTuple):
    """Gradients as they grow; `stacks`: of w_out and w_in, none before the first piece."""

    x: Tensor
    weights: Tensor
    stacks: list[Tensor]


def _piece_grads(
    found: _Sorted, piece: int, given: tuple[Tensor, ...], activation: str, grads: _Grads, train: bool
) -> None:
    g, x, weights, w_in, w_out = given
    parts, width = w_in.shape[1:3]
    ends, inner = found.ends[piece], w_in.flatten(1, 2)
    xs, gs = found.gathered(piece, x, g)
    u, d = product(xs, inner.transpose(1, 2), ends), product(gs, w_out, ends)
    tensors = u, d, weights, grads.weights, found.order, found.first, ends
    args = *tensors, piece * found.rows, width, len(ends), parts == 2, KINDS[activation], BLOCK
    launch(_hidden_grad, (found.rows,), args, tensors, (u, d, grads.weights))
    del tensors, args
    if train:
        _grow(grads.stacks, 0, outer(gs, d, ends), ends)
        del gs, d
        _grow(grads.stacks, 1, outer(u, xs, ends), ends)
    gs = d = xs = x
    found.combined(piece, product(u, inner, ends), None, grads.x)


def _grow(stacks: list[Tensor], index: int, part: Tensor, ends: Tensor) -> None:
    """Adds to a stack, or begins it."""
    if index == len(stacks):
        stacks.append(part)
        return
    size = part[0].numel()
    grid = (len(part), triton.cdiv(size, BLOCK))
    launch(_add, grid, (stacks[index], part, ends, size, BLOCK), (stacks[index], part, ends), (stacks[index],))
