"""Plain tensor functions of the canonical ops: what `paraplan.<name>` computes.

Each works on a whole tensor or on one rank's block of it: sharded forms pass where the block starts. Workspace
is bounded by walking over chunks of rows. No registration here, so any runtime may call these directly.
Attention lives in `attention_kernels`, convolution, pooling and batch norm in `vision_kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paraplan.ir.model.strides import merges_batch
from paraplan.kernels.attention_kernels import attention, attention_grad, attention_merge
from paraplan.kernels.elementwise_kernels import gated, gated_grad, rotary
from paraplan.kernels.expert_kernels import embedding_tables, embedding_tables_grad, experts, experts_grad
from paraplan.kernels.float8_kernels import (
    float8_cast,
    float8_cast_both,
    float8_linear,
    float8_linear_grad_input,
    float8_linear_grad_weight,
    float8_scale,
)
from paraplan.kernels.id_range import check_ids
from paraplan.kernels.index_kernels import index, index_put
from paraplan.kernels.norm_kernels import (
    group_norm,
    group_norm_grad,
    layer_norm,
    layer_norm_grad,
    rms_norm,
    rms_norm_grad,
)
from paraplan.kernels.random_kernels import dropout, uniform
from paraplan.kernels.route_kernels import route_add, route_here, route_plan
from paraplan.kernels.vision_kernels import (
    adaptive_avg_pool,
    adaptive_avg_pool_grad,
    adaptive_max_pool,
    avg_pool,
    avg_pool_grad,
    bn_apply,
    bn_grad_affine,
    bn_grad_input,
    bn_rstd,
    bn_running,
    bn_squares,
    bn_whole,
    bn_whole_grad,
    conv,
    conv_grad_input,
    conv_grad_weight,
    max_pool,
    max_pool_grad,
    upsample,
    upsample_grad,
)

__all__ = [
    "adaptive_avg_pool",
    "adaptive_avg_pool_grad",
    "adaptive_max_pool",
    "attention",
    "attention_grad",
    "attention_merge",
    "avg_pool",
    "avg_pool_grad",
    "batched_product",
    "bn_apply",
    "bn_grad_affine",
    "bn_grad_input",
    "bn_rstd",
    "bn_running",
    "bn_squares",
    "bn_whole",
    "bn_whole_grad",
    "ce_grad",
    "ce_loss",
    "ce_max",
    "ce_sumexp",
    "ce_target",
    "constant",
    "conv",
    "conv_grad_input",
    "conv_grad_weight",
    "dropout",
    "embedding",
    "embedding_grad",
    "embedding_tables",
    "embedding_tables_grad",
    "experts",
    "experts_grad",
    "float8_cast",
    "float8_cast_both",
    "float8_linear",
    "float8_linear_grad_input",
    "float8_linear_grad_weight",
    "float8_scale",
    "gated",
    "gated_grad",
    "group_norm",
    "group_norm_grad",
    "index",
    "index_put",
    "layer_norm",
    "layer_norm_grad",
    "linear",
    "linear_grad_input",
    "linear_grad_weight",
    "max_pool",
    "max_pool_grad",
    "mergeable",
    "rms_norm",
    "rms_norm_grad",
    "rotary",
    "route_add",
    "route_here",
    "route_plan",
    "uniform",
    "upsample",
    "upsample_grad",
]

CHUNK_ELEMENTS = 1 << 20


def linear(x: Tensor, w: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """y[..., n] = x[..., k] · w (+ bias).

    Args:
        x: [..., k].
        w: [n, k], or [k, n] when `transposed`.
        bias: [n]; None for none.
        transposed: whether w is stored as [k, n].
    """
    return F.linear(x, w.t() if transposed else w, bias)


def linear_grad_input(g: Tensor, w: Tensor, transposed: bool) -> Tensor:
    """The gradient of `linear` in x: [..., k].

    Args:
        g: [..., n], gradient of `linear`'s output.
        w, transposed: as `linear` takes them.
    """
    return torch.matmul(g, w.t() if transposed else w)


def linear_grad_weight(g: Tensor, x: Tensor, transposed: bool) -> Tensor:
    """The gradient of `linear` in w, all leading dims contracted.

    Args:
        g: [..., n], gradient of `linear`'s output.
        x: [..., k], the input.
        transposed: whether w is stored as [k, n], which the gradient then is too; else it is [n, k].
    """
    g2, x2 = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
    return x2.t() @ g2 if transposed else g2.t() @ x2


def batched_product(added: Tensor | None, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    """y[..., m, n] = alpha · a[..., m, k] · b[..., k, n] (+ beta · added).

    Args:
        added: [..., m, n]; its last two dims, or all those before them, may be 1.
        a, b: matrices with the same leading dims, any number of them; `mergeable`, or they are copied here.
        beta: what `added` is multiplied with.
        alpha: what the product is.
    """
    out_shape = (*a.shape[:-1], b.shape[-1])
    a, b = _stacked(a), _stacked(b)
    if added is not None:
        out = torch.baddbmm(_stacked(added), a, b, beta=beta, alpha=alpha)
    elif alpha != 1:
        out = a.new_empty((len(a), a.shape[1], b.shape[2])).baddbmm_(a, b, beta=0, alpha=alpha)
    else:
        out = torch.bmm(a, b)
    return out.view(out_shape)


def _stacked(x: Tensor) -> Tensor:
    """x with all dims but the last two merged."""
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def mergeable(x: Tensor) -> Tensor:
    """x if all its dims but the last two merge in a view, else a contiguous copy."""
    return x.view_as(x) if merges_batch(tuple(x.shape), x.stride()) else x.contiguous()


def embedding(w: Tensor, ids: Tensor, v_start: int = 0, rows: int = -1) -> Tensor:
    """Rows of w: [v, h] for ids in [v_start, v_start + v); zeros for the others of a table split over ranks.

    Args:
        w: the table, or a rank's block of it.
        ids: of the whole table.
        v_start: where the block begins.
        rows: of the whole table; -1 where w is it.
    Raises:
        IndexError: an id is outside the whole table (not on CUDA).
    """
    check_ids(ids, w.shape[0] if rows < 0 else rows, "id")
    local = ids - v_start if v_start else ids
    outside = (local < 0) | (local >= w.shape[0])
    if not w.is_cuda and not bool(outside.any()):
        return F.embedding(local, w)
    found = F.embedding(local.clamp(0, w.shape[0] - 1), w)
    return found.masked_fill_(outside.unsqueeze(-1), 0)


def embedding_grad(g: Tensor, ids: Tensor, num_rows: int, padding_idx: int = -1, v_start: int = 0) -> Tensor:
    """The gradient of `embedding` in w: sums g into [num_rows, h] by id.

    Args:
        g: [..., h], gradient of `embedding`'s output.
        ids: [...], row numbers of the whole table; those of rows that are not held here contribute nothing.
        num_rows: rows held here.
        padding_idx: the id, of the whole table, that contributes nothing; -1 for none.
        v_start: number of the first row held here.
    """
    local = ids - v_start if v_start else ids
    dropped = (local < 0) | (local >= num_rows) | (ids == padding_idx)
    if g.is_cuda or bool(dropped.any()):
        local = local.masked_fill(dropped, 0)
        g = g.masked_fill(dropped.unsqueeze(-1), 0)
    return torch.ops.aten.embedding_dense_backward(g, local, num_rows, -1, False)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums over the vocabulary or the keys are kept in: float32 at least."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _row_chunks(rows: int, columns: int) -> Sequence[slice]:
    step = max(1, CHUNK_ELEMENTS // max(columns, 1))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _columns_here(logits: Tensor, columns: int, v_start: int) -> int:
    """How many of a block's columns are not padding; `columns`: in all, -1 where none is padding."""
    return logits.shape[-1] if columns < 0 else min(max(columns - v_start, 0), logits.shape[-1])


def ce_max(logits: Tensor, columns: int = -1, v_start: int = 0) -> Tensor:
    """m[...] = max over v of logits[..., v]: float32 at least; -inf where all of a block is padding.

    Args:
        logits: [..., v], of all classes, or a rank's block of them.
        columns: classes in all, what the blocks hold beyond them being padding; -1 where nothing is padding.
        v_start: the class of the block's first column.
    """
    here, dtype = _columns_here(logits, columns, v_start), accumulate_dtype(logits.dtype)
    if here == 0:
        return torch.full(logits.shape[:-1], float("-inf"), dtype=dtype, device=logits.device)
    return logits.narrow(-1, 0, here).amax(-1).to(dtype)


def ce_sumexp(logits: Tensor, m: Tensor, columns: int = -1, v_start: int = 0) -> Tensor:
    """s[...] = sum over v of exp(logits − m), in m's dtype.

    Args:
        logits, columns, v_start: as `ce_max` takes them.
        m: [...], maxima over all classes.
    """
    here = _columns_here(logits, columns, v_start)
    flat, top = logits.reshape(-1, logits.shape[-1]), m.reshape(-1, 1)
    out = torch.empty(flat.shape[0], dtype=m.dtype, device=m.device)
    for rows in _row_chunks(*flat.shape):
        out[rows] = _zero_from((flat[rows].to(m.dtype) - top[rows]).exp_(), here).sum(-1)
    return out.view(m.shape)


def _zero_from(x: Tensor, column: int) -> Tensor:
    if column < x.shape[-1]:
        x.narrow(-1, column, x.shape[-1] - column).zero_()
    return x


def _local_labels(labels: Tensor, ignore_index: int, v_start: int, v: int) -> tuple[Tensor, Tensor]:
    local = labels - v_start
    inside = (local >= 0) & (local < v) & (labels != ignore_index)
    return local.clamp(0, v - 1), inside


def ce_target(logits: Tensor, labels: Tensor, ignore_index: int, v_start: int = 0, columns: int = -1) -> Tensor:
    """t[...] = logits at the label; 0 where it is ignored or outside this block of the vocabulary.

    Args:
        logits: of all classes, or a rank's block of them.
        labels: classes.
        ignore_index: the label of rows that count for nothing.
        v_start: where the block begins.
        columns: classes in all; -1 where the logits have them.
    Raises:
        IndexError: a label is no class (not on CUDA).
    """
    check_ids(labels, logits.shape[-1] if columns < 0 else columns, "label", ignore_index)
    local, inside = _local_labels(labels, ignore_index, v_start, logits.shape[-1])
    picked = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1)
    return picked.to(accumulate_dtype(logits.dtype)).masked_fill_(~inside, 0)


def ce_loss(m: Tensor, s: Tensor, t: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Sum over valid labels of log(s) + m − t: [], in the dtype of m.

    Args:
        m, s, t: [...], what `ce_max`, `ce_sumexp` and `ce_target` give for all classes.
        labels: [...], classes.
        ignore_index: the label of rows that count for nothing.
    """
    return (s.log() + m - t).masked_fill_(labels == ignore_index, 0).sum()


def ce_grad(
    g: Tensor, logits: Tensor, m: Tensor, s: Tensor, labels: Tensor, ignore_index: int, v_start: int = 0
) -> Tensor:
    """The gradient of `ce_loss` in the logits: g · (softmax − onehot(label)), zeros for ignored rows, whatever g.

    Args:
        g: [], gradient of `ce_loss`' output.
        logits: [..., v], of all classes, or a rank's block of them.
        m, s: [...], what `ce_max` and `ce_sumexp` give for all classes.
        labels: [...], classes.
        ignore_index: the label of rows that count for nothing.
        v_start: the class of the block's first column.
    Returns:
        A tensor like the logits.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    top, total = m.reshape(-1, 1), s.reshape(-1, 1)
    local, inside = _local_labels(labels.reshape(-1), ignore_index, v_start, flat.shape[-1])
    seed = g.to(m.dtype)
    scale = torch.where(labels.reshape(-1, 1) != ignore_index, seed, 0.0).div_(total)
    hit = torch.where(inside.unsqueeze(-1), -seed, 0.0)
    out = torch.empty(flat.shape, dtype=logits.dtype, device=logits.device)
    for rows in _row_chunks(*flat.shape):  # one expression: a chunk's temporaries die before the next one's exist
        out[rows] = (
            (flat[rows].to(m.dtype) - top[rows])
            .exp_()
            .mul_(scale[rows])
            .scatter_add_(-1, local[rows].unsqueeze(-1), hit[rows])
        )
    return out.view(logits.shape)


def constant(values: Sequence[float | int | bool], dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A small tensor written out in the program.

    Args:
        values: its elements, row by row.
        dtype: of the tensor.
        shape: of as many elements as there are values.
    """
    return torch.tensor(list(values), dtype=dtype).view(tuple(shape))
