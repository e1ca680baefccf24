"""Results of calls on fake tensors, made from what an equal call gave.

Problem: a fake tensor mode takes up to 2 ms to find the shape of a result that an equal call has had before. Method:
the first time, the ops are run and watched. Results that share memory with nothing are from then on made as they were:
fake tensors of the same layout, with a gradient where they had one. Results that are views are made by the ops
themselves, as far as autograd goes, so that views stay views of what they are of; what would be asked of the fake
tensor mode is answered here. Limits: calls that write in place are run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paraplan.kernels.torch_private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    below_modes,
    storage_key,
    tree_leaves,
)

_DEVICE = torch.ops.prim.device.default
_ANY = torch.ops.aten.neg.default
Run = Callable[[], Sequence[Any]]


class _Layout(NamedTuple):
    """A tensor's, and the place of what it is a view of among the tensors that a dispatched op is given; -1: none."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    device: torch.device
    grad: bool
    base: int = -1


class _Event(NamedTuple):
    """An op that was asked of the fake tensor mode, and what it gave: one layout, or several."""

    func: OpOverload
    made: _Layout | tuple[_Layout, ...]


class _Unlike(Exception):
    """An op is asked for that was not before."""


class Maker:
    """Makes fake tensors of a mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        with torch.enable_grad():
            self._source = torch.empty(1, requires_grad=True).expand(1)

    def made(self, layout: _Layout, given: Sequence[Tensor] = ()) -> Tensor:
        """A tensor; with a gradient, if it has one, that comes from nowhere.

        Args:
            layout: of it.
            given: one of which it may be a view of.
        """
        with below_modes():
            if layout.base < 0:
                data = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device="meta")
            else:
                storage = given[layout.base].untyped_storage()
                data = torch.empty(0, dtype=layout.dtype, device="meta")
                data.set_(storage, layout.offset, layout.shape, layout.strides)  # type: ignore[call-overload]
        made = FakeTensor(self._mode, data, layout.device)
        if not layout.grad:
            return made
        with _Instead(made):
            return _ANY(self._source)  # type: ignore[no-any-return]


class StandIns:
    """Makes the results of calls that are alike.

    Args:
        places: of the results among the values of a call; those before `given` are its arguments.
        given: how many tensors a call is given.
        writes: whether it writes any in place.
    """

    def __init__(self, places: Sequence[int], given: int, writes: bool) -> None:
        self._places, self._given = tuple(places), given
        self._seen, self._real = False, writes
        self._fresh: list[_Layout] | None = None
        self._events: list[_Event] = []

    def values(self, tensors: Sequence[Tensor], maker: Maker, run: Run) -> Sequence[Any]:
        """Values of a call; of those that are not its results, any.

        Args:
            tensors: it is given.
            maker: of their mode.
            run: runs its ops; gives all values.
        """
        if self._real:
            return run()
        if not self._seen:
            return self._watched(tensors, run)
        if self._fresh is not None:
            values: list[Any] = [*tensors, *[None] * (max(self._places) + 1 - self._given)]
            for place, layout in zip(self._places, self._fresh, strict=True):
                values[place] = maker.made(layout)
            return values
        try:
            with _Answers(self._events, maker):
                return run()
        except _Unlike:
            self._real = True
            return run()

    def _watched(self, tensors: Sequence[Tensor], run: Run) -> Sequence[Any]:
        self._seen = True
        with _Watch() as watch:
            values = run()
        results = [values[place] for place in self._places]
        if all(_is_whole(x) for x in results) and len({*map(storage_key, (*tensors, *results))}) == (
            len({*map(storage_key, tensors)}) + len(results)
        ):
            self._fresh = [_layout(x, ()) for x in results]
            self._real = any(layout.grad for layout in self._fresh) and not torch.is_grad_enabled()
        elif watch.events is not None:
            self._events = watch.events
        else:
            self._real = True
        return values


def _is_plain(x: object) -> bool:
    return type(x) is FakeTensor and x.layout is torch.strided and not (x.is_conj() or x.is_neg() or x.is_inference())


def _is_whole(x: Any) -> bool:
    """Whether a tensor is all of its storage."""
    if not _is_plain(x) or x.storage_offset():
        return False
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    return bool(x.untyped_storage().nbytes() == span * x.element_size())


def _layout(x: Tensor, given: Sequence[Tensor]) -> _Layout:
    key = storage_key(x)
    base = next((place for place, each in enumerate(given) if storage_key(each) == key), -1)
    return _Layout(x.dtype, tuple(x.shape), x.stride(), x.storage_offset(), x.device, x.requires_grad, base)


def _given(args: object, kwargs: object) -> list[Tensor]:
    return [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]


class _Watch(TorchDispatchMode):
    """Notes what ops are asked for; `events` is None where they are none that can be answered."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[_Event] | None = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it."""
        made = func(*args, **(kwargs or {}))
        if func is _DEVICE or self.events is None:
            return made
        given = _given(args, kwargs)
        parts = made if isinstance(made, tuple | list) else (made,)
        same = any(x is each for x in parts for each in given)
        if func._schema.is_mutable or same or not all(map(_is_plain, parts)) or type(made) is tuple:
            self.events = None
            return made
        layouts = tuple(_layout(x, given) for x in parts)
        if any(each.base < 0 and not _is_whole(x) for each, x in zip(layouts, parts, strict=True)):
            self.events = None
            return made
        self.events.append(_Event(func, layouts if isinstance(made, list) else layouts[0]))
        return made


class _Answers(TorchDispatchMode):
    """Gives what the same ops gave before."""

    def __init__(self, events: Sequence[_Event], maker: Maker) -> None:
        super().__init__()
        self._events, self._maker = iter(events), maker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The next answer."""
        if func is _DEVICE:
            return args[0].device
        event = next(self._events, None)
        if event is None or event.func is not func:
            raise _Unlike
        given = _given(args, kwargs)
        if isinstance(event.made, _Layout):
            return self._maker.made(event.made, given)
        return [self._maker.made(each, given) for each in event.made]


class _Instead(TorchDispatchMode):
    """Gives a tensor for the result of any op."""

    def __init__(self, made: Tensor) -> None:
        super().__init__()
        self._made = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The tensor."""
        return args[0].device if func is _DEVICE else self._made
