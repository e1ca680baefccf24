"""The canonical ops `paraplan.<name>` as torch.library ops, so that tracing records them by name.

Kernels come from `paraplan.kernels`; the shape functions here report the same shapes, dtypes and strides. Absent
results (a mask gradient nobody asked for) are empty tensors here, since an op's schema cannot return None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paraplan.kernels import reference_kernels

_LIBRARY = torch.library.Library("paraplan", "DEF")
_ATTENTION = "Tensor? mask, Tensor? seed"
_RANDOM = "float p, int slot, bool causal, float scale, int[] global_heads_batch, int[] starts"


def define(schema: str, kernel: Callable[..., object], shape: Callable[..., object]) -> None:
    """Registers `paraplan::<name>`: what it computes, and its results' shapes for tracing.

    Args:
        schema: of torch.library: "gated(Tensor gate, Tensor up, str activation) -> Tensor".
        kernel: computes it, on the CPU and on CUDA.
        shape: takes the same arguments, fake tensors among them, and gives empty results of the kernel's shapes, dtypes
            and strides.
    """
    name = schema.split("(")[0]
    _LIBRARY.define(schema)
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, kernel, device)
    torch.library.register_fake(f"paraplan::{name}", shape, lib=_LIBRARY)


def _linear(x: Tensor, w: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[1 if transposed else 0]))


def _linear_grad_input(g: Tensor, w: Tensor, transposed: bool) -> Tensor:
    return g.new_empty((*g.shape[:-1], w.shape[0 if transposed else 1]))


def _linear_grad_weight(g: Tensor, x: Tensor, transposed: bool) -> Tensor:
    n, k = g.shape[-1], x.shape[-1]
    return g.new_empty((k, n) if transposed else (n, k))


def _batched_product(added: Tensor | None, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _embedding(w: Tensor, ids: Tensor, v_start: int) -> Tensor:
    return w.new_empty((*ids.shape, w.shape[1]))


def _embedding_grad(g: Tensor, ids: Tensor, num_rows: int, padding_idx: int, v_start: int) -> Tensor:
    return g.new_empty((num_rows, g.shape[-1]))


def _dropout(
    x: Tensor, seed: Tensor, p: float, slot: int, global_shape: Sequence[int], starts: Sequence[int]
) -> Tensor:
    return x.new_empty(x.shape)


def _uniform(x: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape)


def _heads_last(like: Tensor, heads: int, rows: int, width: int) -> Tensor:
    return like.new_empty((like.shape[0], rows, heads, width)).transpose(1, 2)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, *rest: object
) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=reference_kernels.accumulate_dtype(q.dtype))
    return _heads_last(q, q.shape[1], q.shape[2], v.shape[3]), lse


def _attention_grad_kernel(*args: object) -> tuple[Tensor, ...]:
    *grads, dmask = reference_kernels.attention_grad(*args)  # type: ignore[arg-type]
    return (*grads, grads[0].new_empty(0) if dmask is None else dmask)


def _attention_grad(
    g_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *rest: object,
) -> tuple[Tensor, ...]:
    grads = tuple(_heads_last(x, x.shape[1], x.shape[2], x.shape[3]) for x in (q, k, v))
    return (*grads, q.new_empty(mask.shape, dtype=mask.dtype) if rest[-1] and mask is not None else q.new_empty(0))


def _ce_rows(logits: Tensor, *rest: object) -> Tensor:
    return logits.new_empty(logits.shape[:-1], dtype=reference_kernels.accumulate_dtype(logits.dtype))


def _ce_loss(m: Tensor, s: Tensor, t: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    return m.new_empty(())


def _ce_grad(g: Tensor, logits: Tensor, *rest: object) -> Tensor:
    return logits.new_empty(logits.shape)


def _rms_norm(x: Tensor, dims: int, w: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    rows = (*x.shape[: x.dim() - dims], *(1,) * dims)
    return x.new_empty(x.shape), x.new_empty(rows, dtype=reference_kernels.accumulate_dtype(x.dtype))


def _rms_norm_grad_kernel(*args: object) -> tuple[Tensor, ...]:
    dx, dw = reference_kernels.rms_norm_grad(*args)  # type: ignore[arg-type]
    return dx, dx.new_empty(0) if dw is None else dw


def _rms_norm_grad(
    g: Tensor, x: Tensor, dims: int, rstd: Tensor, w: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), x.new_empty(0) if w is None or not wanted[1] else w.new_empty(w.shape)


def _register() -> None:
    define("linear(Tensor x, Tensor w, Tensor? bias, bool transposed) -> Tensor", reference_kernels.linear, _linear)
    define(
        "linear_grad_input(Tensor g, Tensor w, bool transposed) -> Tensor",
        reference_kernels.linear_grad_input,
        _linear_grad_input,
    )
    define(
        "linear_grad_weight(Tensor g, Tensor x, bool transposed) -> Tensor",
        reference_kernels.linear_grad_weight,
        _linear_grad_weight,
    )
    define(
        "batched_product(Tensor? added, Tensor a, Tensor b, float beta, float alpha) -> Tensor",
        reference_kernels.batched_product,
        _batched_product,
    )
    define("mergeable(Tensor x) -> Tensor", _copied, _copied)  # custom ops may not alias: only programs have views
    define("embedding(Tensor w, Tensor ids, int v_start) -> Tensor", reference_kernels.embedding, _embedding)
    define(
        "embedding_grad(Tensor g, Tensor ids, int num_rows, int padding_idx, int v_start) -> Tensor",
        reference_kernels.embedding_grad,
        _embedding_grad,
    )
    define(
        "dropout(Tensor x, Tensor seed, float p, int slot, int[] global_shape, int[] starts) -> Tensor",
        reference_kernels.dropout,
        _dropout,
    )
    define(
        "uniform(Tensor x, Tensor seed, int slot, int[] global_shape, int[] starts) -> Tensor",
        reference_kernels.uniform,
        _uniform,
    )
    define(
        f"attention(Tensor q, Tensor k, Tensor v, {_ATTENTION}, {_RANDOM}) -> (Tensor, Tensor)",
        reference_kernels.attention,
        _attention,
    )
    define(
        f"attention_grad(Tensor g_out, Tensor q, Tensor k, Tensor v, {_ATTENTION}, Tensor out, Tensor lse, "
        f"{_RANDOM}, bool mask_grad) -> (Tensor, Tensor, Tensor, Tensor)",
        _attention_grad_kernel,
        _attention_grad,
    )
    _register_losses_and_norms()


def _register_losses_and_norms() -> None:
    define(
        "rms_norm(Tensor x, int dims, Tensor? w, float eps) -> (Tensor, Tensor)", reference_kernels.rms_norm, _rms_norm
    )
    define(
        "rms_norm_grad(Tensor g, Tensor x, int dims, Tensor rstd, Tensor? w, bool[2] wanted) -> (Tensor, Tensor)",
        _rms_norm_grad_kernel,
        _rms_norm_grad,
    )
    define("ce_max(Tensor logits) -> Tensor", reference_kernels.ce_max, _ce_rows)
    define("ce_sumexp(Tensor logits, Tensor m) -> Tensor", reference_kernels.ce_sumexp, _ce_rows)
    define(
        "ce_target(Tensor logits, Tensor labels, int ignore_index, int v_start) -> Tensor",
        reference_kernels.ce_target,
        _ce_rows,
    )
    define(
        "ce_loss(Tensor m, Tensor s, Tensor t, Tensor labels, int ignore_index) -> Tensor",
        reference_kernels.ce_loss,
        _ce_loss,
    )
    define(
        "ce_grad(Tensor g, Tensor logits, Tensor m, Tensor s, Tensor labels, int ignore_index, int v_start) -> Tensor",
        reference_kernels.ce_grad,
        _ce_grad,
    )


_register()
ops = torch.ops.paraplan
