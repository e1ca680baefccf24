"""Attention by cuDNN's flash kernels, for devices of compute capability 9 and 10; blocks of a ring as in `flash`.

Elsewhere, with a cuDNN that torch itself does not choose (up to 9.15) and where deterministic algorithms are asked for,
torch's flash kernel runs in its place: same inputs and results, launches and bytes inside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paraplan.ir.process.memo import SESSION
from paraplan.kernels.attention_kernels import AttentionCall, heads_last_layout
from paraplan.kernels.gpu.attention import flash
from paraplan.kernels.gpu.attention.flash import is_diagonal, is_future, no_gradients, nothing
from paraplan.kernels.torch_private import is_fake

aten = torch.ops.aten


class Stats:
    """How torch lays out log-sums here: as [b, h, s, 1] or, in some versions, [b, h, s].

    Attributes:
        dims: as many as the last forward's had, which the backward is given.
    """

    dims = 4


@SESSION.cached()
def _is_trusted(device: torch.device) -> bool:
    """Whether torch too would choose cuDNN's attention on a device."""
    version = torch.backends.cudnn.version() or 0
    return version > 91500 and torch.cuda.get_device_capability(device)[0] in (9, 10)


def _runs(q: Tensor) -> bool:
    """Whether cuDNN is called at all."""
    if not q.is_cuda or is_fake(q):
        return True
    return _is_trusted(q.device) and not torch.are_deterministic_algorithms_enabled()


def attention(q: Tensor, k: Tensor, v: Tensor, mask: None, seed: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    """As `kernels.attention_kernels.attention`."""
    call = AttentionCall(*rest)
    if is_future(call):
        return nothing(q, v)
    if not _runs(q):
        return flash.attention(q, k, v, mask, seed, *rest)
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_diagonal(call), False, scale=call.scale
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
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """As `kernels.attention_kernels.attention_grad`."""
    call = AttentionCall(*rest)
    if is_future(call):
        return *no_gradients(q, k, v), None
    if not _runs(q):
        return flash.attention_grad(g_out, q, k, v, mask, seed, out, lse, *rest)
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
        is_diagonal(call),
        scale=call.scale,
    )
    return heads_last_layout(dq), heads_last_layout(dk), heads_last_layout(dv), None
