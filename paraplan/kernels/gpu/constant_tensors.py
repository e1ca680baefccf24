"""Small tensors written out in a program, made on the device without waiting for a copy from the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paraplan.ir.process.memo import SESSION
from paraplan.kernels import reference_kernels
from paraplan.kernels.torch_private import is_fake

_KEPT: dict[object, Tensor] = SESSION.owned("constant_tensors.kept", {})


def constant(values: Sequence[float | int | bool], dtype: torch.dtype, shape: Sequence[int], device: str) -> Tensor:
    """Filled where it is one number, else a copy of one that stays on the device from its first use on.

    Args:
        values, dtype, shape: as `kernels.reference_kernels.constant` takes them.
        device: where the result is, as torch writes it ("cuda:0").
    """
    if len(set(values)) == 1:
        return torch.full(tuple(shape), values[0], dtype=dtype, device=device)
    key = (tuple(values), dtype, tuple(shape), device)
    kept = _KEPT.get(key)
    if kept is None:
        kept = reference_kernels.constant(values, dtype, shape).to(device)
        if not is_fake(kept):
            _KEPT[key] = kept
    return kept.clone()
