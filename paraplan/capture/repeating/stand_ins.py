"""Results of calls on fake tensors, made from what an equal call gave.

Problem: a fake tensor mode takes up to 2 ms to find the shape of a result that an equal call has had before. Method:
the first time, the ops are run and watched: what is asked of the fake tensor mode, and what it answers. From then on
the ops are run as far as autograd goes, so that views stay views of what they are of and `grad_fn` is what it is, and
the same questions get the same answers. Where a question differs from those noted, all ops are run. Limits: calls that
write in place are always run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paraplan.capture.torch_private import below_modes, storage_key
from paraplan.kernels.torch_private import FakeTensor, FakeTensorMode, OpOverload, TorchDispatchMode

_DEVICE = torch.ops.prim.device.default
Run = Callable[[], None]


class _Layout(NamedTuple):
    """A tensor's, and the place of what it is a view of among the tensors that a dispatched op is given; -1: none."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    device: torch.device
    base: int = -1


class _Event(NamedTuple):
    """An op that was asked of the fake tensor mode, with what, and what it gave: one result, or several."""

    func: OpOverload
    asked: object
    made: Any


class _Unlike(Exception):
    """Something is asked for that was not before."""


class Maker:
    """Makes fake tensors of a mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode

    def made(self, layout: _Layout, given: Sequence[Tensor]) -> Tensor:
        """A tensor.

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
        return FakeTensor(self._mode, data, layout.device)


class StandIns:
    """Makes the values of calls that are alike.

    Args:
        writes: whether they write any tensor in place.
    """

    def __init__(self, writes: bool) -> None:
        self._seen, self._real = False, writes
        self._events: list[_Event] = []

    def make(self, maker: Maker, run: Run) -> bool:
        """Makes the values of a call; whether they are the first ones.

        Args:
            maker: of its tensors' mode.
            run: runs its ops, from the first one on.
        """
        first, self._seen = not self._seen, True
        if self._real:
            run()
        elif first:
            with _Watch() as watch:
                run()
            self._events, self._real = watch.events or [], watch.events is None
        else:
            try:
                with _Answers(self._events, maker) as answers:
                    run()
                answers.end()
            except _Unlike:
                run()
        return first


def _is_plain(x: object) -> bool:
    return type(x) is FakeTensor and x.layout is torch.strided and not (x.is_conj() or x.is_neg() or x.is_inference())


def _is_whole(x: Any) -> bool:
    """Whether a tensor is all of its storage."""
    if x.storage_offset():
        return False
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    return bool(x.untyped_storage().nbytes() == span * x.element_size())


def _layout(x: Tensor, given: Sequence[Tensor]) -> _Layout:
    key = storage_key(x)
    base = next((place for place, each in enumerate(given) if storage_key(each) == key), -1)
    return _Layout(x.dtype, tuple(x.shape), x.stride(), x.storage_offset(), x.device, base)


def _asked(value: Any, given: list[Tensor]) -> object:
    """An argument as far as an answer depends on it, equal to no other where that is not known; its tensors are added
    to `given`."""
    kind = type(value)
    if kind is FakeTensor and value.layout is torch.strided:
        given.append(value)
        return value.dtype, value.shape, value.stride(), value.storage_offset(), value.device
    if kind is tuple or kind is list:
        return [_asked(each, given) for each in value]
    if kind is dict:
        return [(name, _asked(each, given)) for name, each in value.items()]
    return object() if isinstance(value, Tensor) else (kind, value)


class _Watch(TorchDispatchMode):
    """Notes what ops are asked for; `events` is None where they are none that can be answered."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[_Event] | None = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it."""
        given: list[Tensor] = []
        asked = [_asked(args, given), _asked(kwargs, given)]
        made = func(*args, **(kwargs or {}))
        if func is _DEVICE or self.events is None:
            return made
        answer = [_answer(x, given) for x in made] if isinstance(made, tuple | list) else [_answer(made, given)]
        if func._schema.is_mutable or type(made) not in (tuple, list, FakeTensor) or None in answer:
            self.events = None
            return made
        self.events.append(_Event(func, asked, type(made)(answer) if isinstance(made, tuple | list) else answer[0]))
        return made


def _answer(x: Any, given: Sequence[Tensor]) -> _Layout | None:
    """The layout of a result; None of one that cannot be made from it."""
    if not _is_plain(x) or any(x is each for each in given):
        return None
    layout = _layout(x, given)
    return layout if layout.base >= 0 or _is_whole(x) else None


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
        given: list[Tensor] = []
        if event is None or event.func is not func or event.asked != [_asked(args, given), _asked(kwargs, given)]:
            raise _Unlike
        if type(event.made) is _Layout:
            return self._maker.made(event.made, given)
        return type(event.made)(self._maker.made(each, given) for each in event.made)

    def end(self) -> None:
        """No more is asked for.

        Raises:
            _Unlike: it was before.
        """
        if next(self._events, None) is not None:
            raise _Unlike
