"""How a program's ops run whatever surrounds the call: without gradients, and in the dtypes the program says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def plainly() -> Iterator[None]:
    """Within it, nothing is recorded for autograd, and an autocast that the caller is in casts nothing."""
    with torch.no_grad(), ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
