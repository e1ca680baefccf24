"""Ids outside a table and labels outside the classes: refused, as torch refuses them."""

from __future__ import annotations

import torch
from torch import Tensor

from paraplan.kernels.torch_private import assert_async


def check_ids(ids: Tensor, rows: int, what: str, ignore_index: int | None = None) -> None:
    """Refuse ids outside [0, rows) but `ignore_index`; on CUDA nothing is read, for that would wait for the device.

    Args:
        ids: integers of any shape.
        rows: how many ids there are.
        what: an id is called in the message: "id", "label".
        ignore_index: an id that is let through, in range or not; None for none.
    Raises:
        IndexError: names `what` and the first such id; under torch.compile a RuntimeError when the compiled code runs.
    """
    if ids.device.type != "cpu":
        return
    outside = (ids < 0) | (ids >= rows)
    if ignore_index is not None:
        outside &= ids != ignore_index
    if torch.compiler.is_compiling():
        assert_async(~outside.any(), f"{what} is outside the {rows} there are")
    elif bool(outside.any()):
        found = int(ids[outside][0])
        raise IndexError(f"{what} {found} is out of range: there are {rows}, from 0 to {rows - 1}; check the batch")
