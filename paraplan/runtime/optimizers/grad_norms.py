"""Norms of tensors, chunk by chunk, so that sums of float32 keep their digits without a wider copy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paraplan.ir.model.strides import is_dense
from paraplan.lowering.transfers.offloaded_grads import CHUNK
from paraplan.runtime.executing.torch_private import norms_of


def magnitude(x: Tensor) -> Tensor:
    """[sum of squares, largest absolute value] of x in float64; infinite or NaN where an element is."""
    if not x.numel():
        return torch.zeros(2, dtype=torch.float64, device=x.device)
    squares = chunk_norms([x], 2.0).double().square_().sum()
    return torch.stack([squares, chunk_norms([x], math.inf).max().double()])


def chunk_norms(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """The p-norms of all chunks of some tensors of one device and dtype, none of them empty; in float32 at least.

    A chunk is short enough for a sum of float32 to keep its digits, so nothing is copied into a wider dtype. The chunks
    of a large tensor are rows, read by one kernel (halves and complex numbers one by one, for torch would make float32
    of all of them first); small tensors are read together. What is not dense is one chunk. The largest absolute value
    is that of the least or the largest element, which a CPU finds in an eightieth of the time.
    """
    dtype, found, rest = tensors[0].dtype, list[Tensor](), list[Tensor]()
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
    apart = wide is not None or dtype.is_complex
    for x in tensors:
        flat = x.as_strided((x.numel(),), (1,)) if is_dense(x.shape, x.stride()) else x
        whole = x.numel() - x.numel() % CHUNK if flat.dim() == 1 else 0
        if whole and norm_type == math.inf and not dtype.is_complex:
            least, largest = torch.aminmax(flat)
            found.append(torch.maximum(-least, largest).view(1))
            continue
        if whole and not apart:
            found.append(torch.linalg.vector_norm(flat[:whole].view(-1, CHUNK), norm_type, 1))
            flat = flat[whole:]
        if flat.numel():
            rest += flat.split(CHUNK) if whole and apart else (flat,)
    found += [torch.stack(norms_of(rest, norm_type, wide))] if rest else []
    return torch.cat(found) if len(found) > 1 else found[0]
