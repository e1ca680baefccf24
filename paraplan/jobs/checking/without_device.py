"""Tensors without data that claim to be on CUDA, in a torch that was built without it.

Ops reach such tensors through the dispatcher. A few methods written by hand ask for the device's current stream first,
which such a torch cannot answer; within `dispatched_methods` they are dispatched like all others. So is a product that
adds to what it writes in another dtype, which torch 2.11 cannot do without data: it takes the dtype for a factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from paraplan.runtime.executing.torch_private import TorchDispatchMode

aten = torch.ops.aten


@contextmanager
def dispatched_methods() -> Iterator[None]:
    """Within it, `copy_`, `contiguous`, `~` and indexing are ops."""
    methods = {
        "copy_": _copy,
        "contiguous": _contiguous,
        "__invert__": _invert,
        "__getitem__": _item,
        "__setitem__": _set_item,
    }
    with patch.multiple(Tensor, **methods), _Products():
        yield


class _Products(TorchDispatchMode):
    """Answers such products by what they write."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return kwargs["out"] if func is aten.addmm.dtype_out else func(*args, **(kwargs or {}))


def _copy(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return aten.copy_.default(self, source, non_blocking)  # type: ignore[no-any-return]


def _contiguous(self: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    return self if self.is_contiguous(memory_format=memory_format) else self.clone(memory_format=memory_format)


def _invert(self: Tensor) -> Tensor:
    return aten.bitwise_not.default(self)  # type: ignore[no-any-return]


def _item(self: Tensor, key: Any) -> Tensor:
    dim, found = 0, self
    keys = key if isinstance(key, tuple) else (key,)
    skipped = self.dim() - sum(each is not None and each is not Ellipsis for each in keys)
    tensors: list[Tensor | None] = []
    for each in keys:
        if isinstance(each, Tensor):
            tensors += [None] * (dim - len(tensors)) + [each]
            dim += 1
        elif each is None:
            found, dim = found.unsqueeze(dim), dim + 1
        elif each is Ellipsis:
            dim += skipped
        elif isinstance(each, slice):
            found, dim = aten.slice.Tensor(found, dim, each.start, each.stop, each.step or 1), dim + 1
        else:
            found = found.select(dim, each)
    return aten.index.Tensor(found, tensors) if tensors else found  # type: ignore[no-any-return]


def _set_item(self: Tensor, key: Any, value: Any) -> None:
    place = _item(self, key)
    if isinstance(value, Tensor):
        _copy(place, value)
    else:
        place.fill_(value)
