"""Tensors of a model that share memory and are not one: what is written through one is seen through the other.

A program holds every parameter and buffer by itself, so of two that overlap neither may change: no trained parameter,
no buffer that forward writes. A tie is one parameter under two names, and a buffer may be registered under two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor, nn

from paraplan.ir.errors import CaptureError
from paraplan.ir.trace.torch_private import storage_key


def refuse_shared_memory(model: nn.Module, trained: Collection[str], written: Collection[str]) -> None:
    """Overlapping parameters and buffers one of which changes.

    Args:
        model: on any device.
        trained: names of parameters the optimizer updates.
        written: names of buffers forward writes.
    Raises:
        CaptureError: there are two; names them and the remedy.
    """
    for first, second in _overlapping(model):
        if first in trained or second in trained:
            raise CaptureError(
                f"{first!r} and {second!r} share memory and are two tensors, so that an update of one changes the "
                "other unseen; if they are one weight, make them one parameter (head.weight = embed.weight), else "
                "give each its own values (.clone())"
            )
        if first in written or second in written:
            raise CaptureError(
                f"buffers {first!r} and {second!r} share memory and forward writes one of them, which the other sees; "
                "register one of the two and take the view in forward (self.m[0])"
            )


def _overlapping(model: nn.Module) -> Iterator[tuple[str, str]]:
    found: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.numel():
            others = found.setdefault(storage_key(tensor), [])
            yield from ((other, name) for other, there in others if _overlap(tensor, there))
            others.append((name, tensor))


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the ranges of elements from the first to the last of each meet."""
    (first, end), (start, stop) = _range(a), _range(b)
    return first < stop and start < end


def _range(x: Tensor) -> tuple[int, int]:
    start = x.storage_offset() * x.element_size()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return start, start + (last + 1) * x.element_size()
