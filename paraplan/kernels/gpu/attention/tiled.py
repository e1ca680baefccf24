"""Attention in tiles of the score matrix, with masks, grouped heads and dropout by global index: three Triton kernels.

    S = scale · q kᵀ + mask,   P = exp(S − lse),   out = drop(P) v,   lse = log Σ exp S
    δ = Σ g · out,   dV = drop(P)ᵀ g,   dS = P (drop(g vᵀ) − δ),   dQ = scale · dS k,   dK = scale · dSᵀ q

The forward keeps a running maximum and sum per query; the backward makes the scores again, once for every tile of keys
(dK, dV) and once for every tile of queries (dQ), so that no two programs write one element. Tiles in the future of all
their queries are passed over. What is dropped follows from (seed, slot, global row, key) as in `random_kernels`, so the
backward and every shard drop the same. Shapes and conventions are those of `kernels.attention_kernels`.

What a call needs besides its tensors is worked out once for equal shapes, strides and arguments (`_Operand`).

Source: Dao 2023, FlashAttention-2 (arXiv 2307.08691), algorithms 1 and 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from paraplan.ir.process.memo import SESSION
from paraplan.kernels.attention_kernels import AttentionCall
from paraplan.kernels.gpu.attention import tile_kernels
from paraplan.kernels.gpu.attention.tile_choice import Operands, Tiles, choose_tiles, shared_limit
from paraplan.kernels.gpu.attention.tile_parts import Call, Fixed
from paraplan.kernels.gpu.random import slot_key, threshold_and_scale
from paraplan.kernels.gpu.triton_launch import KEPT_LAUNCHES, Prepared, row_major
from paraplan.kernels.torch_private import is_fake

DELTA_ROWS = 32


class _Operand(NamedTuple):
    """A tensor's layout."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def _operand(x: Tensor) -> _Operand:
    return _Operand(x.shape, x.stride(), x.dtype)


def _rows(x: _Operand) -> tuple[int, ...]:
    """Strides of batch rows, heads and rows."""
    return x.strides[:3]


class _Kernels:
    """Launches of one call's kernels, and what all of them take."""

    def __init__(self, q: _Operand, k: _Operand, v: _Operand, mask: _Operand | None, device: torch.device, *rest: Any):
        call = AttentionCall(*rest)
        (self.b, h, s, d), (g, t, e) = q.shape, v.shape[1:]
        widths = max(16, triton.next_power_of_2(d)), max(16, triton.next_power_of_2(e))
        self.call = Call(
            h, g, s, t, float(call.scale), slot_key(call.slot), call.global_shape[1], call.global_shape[2], *call.starts
        )
        of_mask = (mask is not None, mask is not None and mask.dtype == torch.bool)
        precision, is_split = _precision(q.dtype, device)
        self.fixed = Fixed(d, e, *widths, *threshold_and_scale(call.p), *of_mask, call.causal, call.p > 0, precision)
        self.masks: tuple[int, ...] = (0, 0, 0, 0)
        if mask is not None:
            self.masks = tuple(stride if size > 1 else 0 for size, stride in zip(mask.shape, mask.strides, strict=True))
        self.limit = shared_limit(device)
        self.operands = Operands(widths, q.dtype.itemsize, 0 if mask is None else mask.dtype.itemsize, is_split)

    def tiles(self, name: str) -> Tiles:
        """Of the kernel of that name."""
        return choose_tiles(name, self.limit, self.operands)

    def prepared(self, name: str, strides: tuple[object, ...], grid: tuple[int, int], num_written: int = 1) -> Prepared:
        """A kernel's launch: `strides` come after its tensors."""
        tiles = self.tiles(name)
        rest = *strides, self.masks, self.call, self.fixed._replace(m=tiles.m, n=tiles.n)
        kernel = getattr(tile_kernels, f"_{name}")
        return Prepared(kernel, grid, rest, num_written, tiles.warps, tiles.stages)


def _asked(q: Tensor) -> torch.device:
    """The device that is asked what it has: none for tensors without data, which may be of one that is not there."""
    return torch.device("meta") if is_fake(q) else q.device


def _precision(dtype: torch.dtype, device: torch.device) -> tuple[str, bool]:
    """Of products in float32, of three in TF32 where a device has them; and whether these read what they split from
    shared memory: from compute capability 9 on, which is also taken where there is no device."""
    capability = (
        torch.cuda.get_device_capability(device)[0] if device.type == "cuda" and torch.cuda.is_available() else 9
    )
    three = dtype == torch.float32 and capability >= 8
    return "tf32x3" if three else "ieee", three and capability >= 9


@SESSION.cached(most=KEPT_LAUNCHES)
def _forward(*args: Any) -> tuple[Prepared, tuple[int, ...]]:
    """The launch, and the strides of the result, heads last."""
    of = _Kernels(*args)
    q, k, v = args[:3]
    out = _heads_last_strides(of.call.h, of.call.s, of.fixed.e)
    grid = (_cdiv(of.call.s, of.tiles("forward").m), of.b * of.call.h)
    return of.prepared("forward", (_rows(q), _rows(k), _rows(v), out[:3]), grid, 2), out


class _Backward(NamedTuple):
    """Launches, the shape of δ and what is kept with it, strides of the gradients of queries, keys and values."""

    delta: Prepared
    key_grads: Prepared
    query_grads: Prepared
    mask_grad: Prepared | None
    delta_shape: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]


@SESSION.cached(most=KEPT_LAUNCHES)
def _backward(g_out: _Operand, out: _Operand, dmask: _Operand | None, *args: Any) -> _Backward:
    of = _Kernels(*args)
    (h, g, s, t, *_), b, q, k, v = of.call, of.b, *args[:3]
    made = (
        _heads_last_strides(h, s, of.fixed.d),
        _heads_last_strides(g, t, of.fixed.d),
        _heads_last_strides(g, t, of.fixed.e),
    )
    given = tuple(map(_rows, (g_out, q, k, v)))
    rest = _rows(g_out), _rows(out), of.call, of.fixed._replace(m=DELTA_ROWS)
    delta = Prepared(tile_kernels._delta, (_cdiv(s, DELTA_ROWS), b * h), rest, 1)
    dq, dk, dv = (strides[:3] for strides in made)
    keys = of.prepared("key_grads", (*given, dk, dv), (_cdiv(t, of.tiles("key_grads").n), b * g), 2)
    queries = of.prepared("query_grads", (*given, dq), (_cdiv(s, of.tiles("query_grads").m), b * h))
    masks = None
    if dmask is not None:
        tiles = of.tiles("mask_grad")
        shared = (b // dmask.shape[0], h // dmask.shape[1])
        grid = (_cdiv(s, tiles.m) * _cdiv(t, tiles.n), dmask.shape[0] * dmask.shape[1])
        masks = of.prepared("mask_grad", (*given, dmask.strides, shared), grid)
    return _Backward(delta, keys, queries, masks, (3 if of.fixed.drops else 1, b, h, s), made)


def _cdiv(count: int, by: int) -> int:
    return -(-count // by)


def _heads_last_strides(h: int, s: int, d: int) -> tuple[int, ...]:
    """Of a [b, h, s, d] tensor stored as contiguous [b, s, h, d]."""
    return s * h * d, d, h * d, 1


def _columns(mask: Tensor | None, t: int, start: int) -> Tensor | None:
    return mask.narrow(-1, start, t) if mask is not None and mask.shape[-1] > t else mask


def _bytes(mask: Tensor | None, like: Tensor) -> Tensor:
    """A mask as kernels load it; any tensor where there is none."""
    if mask is None:
        return like
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def _unit(x: Tensor) -> Tensor:
    """x with its last dim laid out row by row."""
    return x if x.stride(-1) == 1 else row_major(x)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    """As `kernels.attention_kernels.attention`, in one launch."""
    p, slot, causal, scale, whole, starts, *_ = rest
    q, k, v, mask = _unit(q), _unit(k), _unit(v), _columns(mask, k.shape[2], starts[3])
    of_mask = None if mask is None else _operand(mask)
    call = p, slot, causal, scale, tuple(whole), tuple(starts)
    launch, strides = _forward(_operand(q), _operand(k), _operand(v), of_mask, _asked(q), *call)
    b, h, s, _ = q.shape
    out = torch.empty_strided((b, h, s, v.shape[-1]), strides, dtype=q.dtype, device=q.device)
    lse = torch.empty((b, h, s), dtype=torch.float32, device=q.device)
    launch(q, k, v, _bytes(mask, q), lse if seed is None else seed, out, lse)
    return out, lse


def attention_grad(
    g_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `kernels.attention_kernels.attention_grad`, in three launches, with the mask's gradient in five."""
    p, slot, causal, scale, whole, starts, *asks = rest
    t = k.shape[2]
    dmask = here = None
    if mask is not None and asks and asks[0]:
        dmask = torch.zeros(mask.shape, dtype=mask.dtype, device=mask.device)
        here = _columns(dmask, t, starts[3])
    g_out, q, k, v, out, lse = _unit(g_out), _unit(q), _unit(k), _unit(v), _unit(out), row_major(lse)
    mask = _columns(mask, t, starts[3])
    of_mask = None if mask is None else _operand(mask)
    of_dmask = None if here is None else _operand(here)
    of = _backward(
        _operand(g_out),
        _operand(out),
        of_dmask,
        _operand(q),
        _operand(k),
        _operand(v),
        of_mask,
        _asked(q),
        p,
        slot,
        causal,
        scale,
        tuple(whole),
        tuple(starts),
    )
    dq, dk, dv = (
        torch.empty_strided(x.shape, strides, dtype=q.dtype, device=q.device)
        for x, strides in zip((q, k, v), of.strides, strict=True)
    )
    delta = torch.empty(of.delta_shape, dtype=torch.float32, device=q.device)
    seeded = lse if seed is None else seed
    of.delta(g_out, out, seeded, delta)
    given = g_out, q, k, v, _bytes(mask, q), seeded, lse, delta
    of.key_grads(*given, dk, dv)
    of.query_grads(*given, dq)
    if here is not None and of.mask_grad is not None:
        of.mask_grad(*given, here)
    return dq, dk, dv, dmask
