"""Attention by cuDNN's flash kernels, for devices of compute capability 9 and above; blocks of a ring as in `flash`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paraplan.kernels.attention_kernels import heads_last_layout
from paraplan.kernels.gpu.attention.flash import no_gradients, nothing

aten = torch.ops.aten


class Stats:
    """How torch lays out log-sums here: as [b, h, s, 1] or, in some versions, [b, h, s].

    Attributes:
        dims: as many as the last forward's had, which the backward is given.
    """

    dims = 4


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: None,
    seed: Tensor | None,
    p: float,
    slot: int,
    causal: bool,
    scale: float,
    global_shape: Sequence[int],
    starts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """As `kernels.attention_kernels.attention`."""
    if causal and starts[2] < starts[3]:
        return nothing(q, v)
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal and starts[2] == starts[3], False, scale=scale
    )
    Stats.dims = lse.dim()
    return heads_last_layout(out), lse.view(q.shape[:3])


def attention_grad(
    g_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    p: float,
    slot: int,
    causal: bool,
    scale: float,
    global_shape: Sequence[int],
    starts: Sequence[int],
    mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """As `kernels.attention_kernels.attention_grad`."""
    if causal and starts[2] < starts[3]:
        return *no_gradients(q, k, v), None
    undrawn = torch.empty((), dtype=torch.int64, device=q.device)  # the state of random numbers
    stats = lse.unsqueeze(-1) if Stats.dims == 4 else lse
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        g_out,
        q,
        k,
        v,
        out,
        stats,
        undrawn,
        undrawn,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal and starts[2] == starts[3],
        scale=scale,
    )
    return heads_last_layout(dq), heads_last_layout(dk), heads_last_layout(dv), None
