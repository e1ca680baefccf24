"""Names of torch's dtypes, as programs and plans have them."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" of torch.float32."""
    return str(dtype).removeprefix("torch.")
