"""What the loops of an export made, under whatever names: the parts of stacked results, and what has other names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from paraplan.capture.recurrences.markers import NotALoop
from paraplan.capture.torch_private import storage_key


class LoopResults:
    """Results of loops: lists have the parts of one tensor each, which is taken for them where they are joined."""

    def __init__(self) -> None:
        self._wholes: list[tuple[Tensor, tuple[Tensor, ...]]] = []
        self._parts: dict[int, tuple[int, int]] = {}
        self._watched: dict[int, tuple[Tensor, str, int]] = {}

    def filled(self, whole: Tensor, parts: tuple[Tensor, ...], where: str) -> None:
        """A list was filled by a loop.

        Args:
            whole, parts: a tensor and its parts along its first dim, which the list has.
            where: the loop's place in the user's code.
        """
        self._parts |= {id(part): (len(self._wholes), index) for index, part in enumerate(parts)}
        self._wholes.append((whole, parts))
        self.watch([whole], where)

    def watch(self, tensors: Sequence[Tensor], where: str) -> None:
        """Tensors that a loop at a place has other names for: none may be changed in place."""
        for x in tensors:
            self._watched.setdefault(storage_key(x), (x, where, x._version))

    def check(self, changed: object) -> None:
        """Refuse to change a tensor in place that a loop has other names for."""
        found = self._watched.get(storage_key(changed)) if isinstance(changed, Tensor) else None
        if found is not None:
            raise NotALoop(found[1], "what it was given or gives is changed in place after it")

    def check_all(self) -> None:
        """Refuse that any was changed since, in whatever way."""
        for x, where, version in self._watched.values():
            if x._version != version:
                raise NotALoop(where, "what it was given or gives is changed in place after it")

    def joined(self, listed: Sequence[object]) -> Tensor | None:
        """A list as one tensor [number, ...], where its last ones are parts of one that a loop made, in order."""
        places = [self._parts.get(id(each)) for each in listed]
        head = next((at for at, place in enumerate(places) if place is not None), len(places))
        rest = [place for place in places[head:] if place is not None]
        if len(rest) < len(places) - head or len(rest) < 2 or len({number for number, _ in rest}) > 1:
            return None
        at = [index for _, index in rest]
        step = at[1] - at[0]
        if step == 0 or at != list(range(at[0], at[0] + step * len(at), step)):
            return None
        whole = self._wholes[rest[0][0]][0]
        low, high = min(at), max(at) + 1
        found = whole if high - low == whole.shape[0] and abs(step) == 1 else whole[low : high : abs(step)]
        found = found.flip(0) if step < 0 else found
        first = [each for each in listed[:head] if isinstance(each, Tensor)]
        return torch.cat([torch.stack(first), found]) if first else found


class Stacked(list):  # type: ignore[type-arg]
    """What a loop filled a list with, as a tensor: for what joins it."""

    def __init__(self, first: Sequence[Tensor], rest: Tensor, where: str) -> None:
        super().__init__()
        self.whole = torch.cat([torch.stack(list(first)), rest]) if first else rest
        self.where = where

    def __getitem__(self, index: Any) -> Stacked:
        if not isinstance(index, slice):
            self._refuse()
        start, stop, step = index.indices(self.whole.shape[0])
        if step == -1 and len(range(start, stop, step)) == self.whole.shape[0]:
            return Stacked([], self.whole.flip(0), self.where)
        if step < 0 or stop <= start:
            self._refuse()
        return Stacked([], self.whole[start:stop:step], self.where)

    def _refuse(self, *args: object) -> NoReturn:
        raise NotALoop(self.where, "a list that it fills is read other than by torch.stack and torch.cat")

    __iter__ = __len__ = __add__ = __radd__ = __contains__ = __reversed__ = append = extend = copy = _refuse  # type: ignore[assignment]


def overwritten(x: Tensor, values: list[Tensor], dim: int, numbers: Sequence[int], where: str) -> Tensor:
    """A tensor with some of its parts written over.

    Args:
        x: which.
        values: the parts, the first along the dim first.
        dim: along which.
        numbers: of the parts, in any order.
        where: the loop's place in the user's code.
    Raises:
        NotALoop: they do not follow one another, or are not all there.
    """
    low, high, size = min(numbers), max(numbers), x.shape[dim]
    if low < 0 or high >= size or high - low + 1 != len(numbers):
        raise NotALoop(where, "it writes other steps of a tensor than one after another")
    stack, rows = torch.stack(values), x.select(dim, 0).shape
    if stack.shape[1:] != rows:
        alone = (1,) * (len(rows) + 1 - stack.dim())
        stack = stack.reshape(-1, *alone, *stack.shape[1:]).expand(-1, *rows)
    whole = stack.movedim(0, dim).to(x.dtype).contiguous()
    if len(numbers) == size:
        return whole
    return torch.cat([x.narrow(dim, 0, low), whole, x.narrow(dim, high + 1, size - high - 1)], dim)
