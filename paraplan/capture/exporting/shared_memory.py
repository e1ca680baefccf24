"""Tensors of a model in the memory of others: an export takes every registered tensor and constant for its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn

from paraplan.capture.python_state.aliases import names_of, registered
from paraplan.capture.python_state.carried_attributes import tensors_in
from paraplan.capture.python_state.reads import Read
from paraplan.capture.torch_private import storage_key
from paraplan.ir.errors import CaptureError


def refuse_shared_memory(model: nn.Module, reads: Iterable[Read], written: Collection[str]) -> None:
    """Tensors in the memory of another that training or forward changes: a captured step has them apart.

    Args:
        model: the caller's own.
        reads: what forward read of its attributes.
        written: names of the buffers that forward writes.
    Raises:
        CaptureError: two are registered, or one is kept in an attribute; names both and the remedy.
    """
    names = names_of(model)
    changing = {names[id(x)] for name, x in registered(model) if x.requires_grad or name in written}
    stored: dict[int, list[tuple[str, Tensor]]] = {}
    for name, x in registered(model):
        if names[id(x)] == name and x.layout is torch.strided:
            stored.setdefault(storage_key(x), []).append((name, x))
    for group in stored.values():
        _refuse_overlap(group, changing)
    for each in reads:
        for x in tensors_in(each.value({})):
            near = stored.get(storage_key(x), ()) if x.layout is torch.strided and id(x) not in names else ()
            for name, other in near:
                if name in changing and _overlap(x, other):
                    raise CaptureError(
                        f"{each.line}: {each.where} is another tensor in the memory of {name!r} (a view, .data or "
                        ".detach() of it), which a captured step would not see change: keep the registered tensor "
                        "itself, and take the view in forward"
                    )


def _refuse_overlap(group: list[tuple[str, Tensor]], changing: Collection[str]) -> None:
    ordered = sorted(group, key=lambda each: each[1].storage_offset() * each[1].element_size())
    for (name, x), (other_name, other) in pairwise(ordered):
        if (name in changing or other_name in changing) and _overlap(x, other):
            raise CaptureError(
                f"{name!r} and {other_name!r} are two tensors in the same memory, where what is written to one changes "
                "the other: register one of them under both names (self.head.weight = self.embedding.weight), and "
                "take views in forward"
            )


def _overlap(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage have bytes in common."""
    (first, end), (other_first, other_end) = _bytes(x), _bytes(other)
    if min(end, other_end) <= max(first, other_first):
        return False
    if x.element_size() != other.element_size():
        return True
    taken = torch.zeros(max(end, other_end) // x.element_size(), dtype=torch.bool, device="cpu")
    taken.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _bytes(x: Tensor) -> tuple[int, int]:
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    return x.storage_offset() * x.element_size(), (x.storage_offset() + span) * x.element_size()
