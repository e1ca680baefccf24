"""Rows of a whole table by torch's kernels, which check ids on the device as they do in eager."""

from __future__ import annotations

import torch
from torch import Tensor

from paraplan.kernels.gpu.triton_launch import row_major

aten = torch.ops.aten


def embedding(w: Tensor, ids: Tensor, v_start: int = 0, rows: int = -1) -> Tensor:
    """As `kernels.reference_kernels.embedding` of a table that is not split."""
    return aten.embedding.default(w, ids)  # type: ignore[no-any-return]


def embedding_grad(g: Tensor, ids: Tensor, num_rows: int, padding_idx: int = -1, v_start: int = 0) -> Tensor:
    """As `kernels.reference_kernels.embedding_grad` of a table that is not split."""
    return aten.embedding_dense_backward.default(row_major(g), row_major(ids), num_rows, padding_idx, False)  # type: ignore[no-any-return]
