"""Calls of torch's functions that a forward has made before, recorded by copying the nodes they made then.

Problem: an export spends some 5 ms on every call of a function, most of it on finding out what is recorded, though the
layers of a model make the same calls. Method: the first call of its like is traced in full, and the nodes it added are
kept under a key. A later call with an equal key appends the same nodes with its own tensors for arguments; its results
are made as the first call's were (`stand_ins`). Python is run as ever, layer by layer: hooks, counters, caches and
conditions see and do what they would without, and layers that differ in anything differ in their calls.

Two calls are alike where all is equal that what is recorded depends on:

    function, arguments other than tensors (types included), which arguments are one tensor, dtype, shape, strides,
    offset, device, requires_grad and dispatch keys of each tensor, grad mode, default dtype, switches of kernels, and
    every frame of the stack down to its instruction (the source lines that nodes keep).

Limits: arguments are fake tensors that the trace under way knows, and none that it knows the value of. Nothing is kept
of calls that record anything but ops of torch on their arguments (constants, parameters of their own, regions,
switches of grad mode), that give back something else than tensors, or that other modes of the export answer by
identity. Under autocast, transforms of `torch.func`, forward-mode derivatives, switched parameters, loops over time and
modes that a forward or its user enters, all calls are traced.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from paraplan.capture.exporting.decided import is_noted
from paraplan.capture.repeating.stand_ins import Maker, StandIns
from paraplan.capture.torch_private import Recording, recording_state, unrecorded
from paraplan.kernels.torch_private import FakeTensor, OpOverload

_OPAQUE = (int, bool, str, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = frozenset(_OPAQUE)
_LISTS = frozenset({tuple, list, torch.Size})
_NAMESPACES = frozenset({"aten", "prims"})
_SWITCHES = frozenset({Tensor.requires_grad_, Tensor.detach_})
_ASKED = frozenset(
    {
        Tensor.shape.__get__,  # type: ignore[attr-defined]
        Tensor.dtype.__get__,  # type: ignore[attr-defined]
        Tensor.ndim.__get__,  # type: ignore[attr-defined]
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.is_floating_point,
    }
)
"""What every mode passes on and nothing is recorded of."""


class _Unkeyed(Exception):
    """An argument that no key holds."""


class _Unlike(Exception):
    """The ops that a call recorded give something else than the call."""


class _Value(NamedTuple):
    """A value of a call: one of its tensors, in the order they are met, or what one of its nodes makes, after those."""

    index: int


class _Op(NamedTuple):
    """A node that a call recorded; arguments that are nodes are `_Value`s."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: Mapping[str, Any]


class _Call(NamedTuple):
    """What a call recorded.

    Attributes:
        ops: its nodes.
        results: what it gave back, tensors as `_Value`s.
        renewed: (tensor, node) per argument that the trace knows as another value since (written in place).
        stand_ins: for the values that a later call makes.
        shown: per result that is no argument its place among the values, and what it was like.
        codes: of the frames that its key has by id, held so that the ids stay theirs.
    """

    ops: tuple[_Op, ...]
    results: Any
    renewed: tuple[tuple[int, int], ...]
    stand_ins: StandIns
    shown: tuple[tuple[int, object], ...]
    codes: tuple[types.CodeType, ...]


class Repeated(TorchFunctionMode):
    """Under it, calls like an earlier one are recorded without being traced.

    Args:
        may: asked at every call whether calls are plain at the moment.
    """

    def __init__(self, may: Callable[[], bool]) -> None:
        super().__init__()
        self._may = may
        self._calls: dict[object, _Call | None] = {}
        self._recording: Recording | None = None
        self._root: types.CodeType | None = None
        self._maker: Maker | None = None

    def begin(self, root: types.CodeType) -> None:
        """A forward follows.

        Args:
            root: code of the function that all frames of interest are called by.
        """
        self._calls, self._root, self._maker = {}, root, None
        self._recording = Recording.of_library_modes()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copies what an equal call recorded, or traces the call and keeps what it records."""
        kwargs, recording = kwargs or {}, self._recording
        if recording is None or not self._may() or not recording.is_current():
            return func(*args, **kwargs)
        if func in _ASKED and type(args[0]) is FakeTensor:
            with recording.paused_functions():
                if recording.node_of(args[0]) is not None:
                    return func(*args, **kwargs)
            return func(*args, **kwargs)
        tensors: list[Tensor] = []
        with recording.paused_functions():
            key, codes = self._key(func, args, kwargs, tensors, sys._getframe(1))
        if key is None:
            return func(*args, **kwargs)
        if key not in self._calls:
            return self._trace(key, codes, tensors, func, args, kwargs)
        known = self._calls[key]
        if known is None:
            return func(*args, **kwargs)
        try:
            with unrecorded():
                if self._maker is None:
                    self._maker = Maker(tensors[0].fake_mode)  # type: ignore[attr-defined]
                return _again(recording, known, tensors, self._maker)
        except _Unlike:
            self._calls[key] = None
            return func(*args, **kwargs)

    def _key(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], frame: types.FrameType | None
    ) -> tuple[object, tuple[types.CodeType, ...]]:
        """The key of a call, and the code of its frames; None where it has none."""
        assert self._recording is not None
        state = recording_state()
        if state is None or func in _SWITCHES:
            return None, ()
        try:
            given = [_described(each, tensors, self._recording) for each in args]
            named = [(name, _described(each, tensors, self._recording)) for name, each in kwargs.items()]
        except _Unkeyed:
            return None, ()
        if not tensors or (is_noted(func) and tensors[0].numel() == 1):
            return None, ()
        codes: list[types.CodeType] = []
        places: list[int] = []
        while frame is not None and frame.f_code is not self._root:
            codes.append(frame.f_code)
            places += (id(frame.f_code), frame.f_lasti)
            frame = frame.f_back
        return (func, tuple(given), tuple(named), state, tuple(places)), tuple(codes)

    def _trace(
        self,
        key: object,
        codes: tuple[types.CodeType, ...],
        tensors: list[Tensor],
        func: Any,
        args: Any,
        kwargs: Any,
    ) -> Any:
        assert self._recording is not None
        recording = self._recording
        before = [recording.node_of(x) for x in tensors]
        last = recording.last()
        self._calls[key] = None
        made = func(*args, **kwargs)
        if _is_library(func):
            with recording.paused_functions():
                self._calls[key] = _kept(recording, last, tensors, before, made, codes)
        return made


def _is_library(func: Any) -> bool:
    """Whether a function is torch's own."""
    if isinstance(func, types.FunctionType):
        return func.__module__.partition(".")[0] == "torch"
    if isinstance(func, types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType):
        return True
    return str(func).partition(".")[0] in _NAMESPACES or isinstance(func, types.MethodWrapperType)


def _described(value: Any, tensors: list[Tensor], recording: Recording) -> object:
    """An argument as a part of a key; its tensors are added to `tensors`.

    Raises:
        _Unkeyed: no key holds it.
    """
    kind = type(value)
    if kind is FakeTensor:
        for index, each in enumerate(tensors):
            if each is value:
                return index
        if recording.node_of(value) is None:
            raise _Unkeyed
        tensors.append(value)
        return recording.described(value)
    if kind in _PLAIN:
        return kind, value
    if kind is float:
        return value.hex()
    if kind in _LISTS:
        return kind, tuple([_described(each, tensors, recording) for each in value])
    if kind is slice:
        return kind, tuple([_described(each, tensors, recording) for each in (value.start, value.stop, value.step)])
    raise _Unkeyed


def _kept(
    recording: Recording,
    last: fx.Node,
    tensors: list[Tensor],
    before: list[fx.Node | None],
    made: Any,
    codes: tuple[types.CodeType, ...],
) -> _Call | None:
    """What a call has recorded after a node; None where it cannot be copied."""
    values: dict[fx.Node, int] = {node: index for index, node in enumerate(before) if node is not None}
    ops: list[_Op] = []
    for node in _after(last):
        own = node.op == "call_function" and (
            node.target is operator.getitem
            or (isinstance(node.target, OpOverload) and node.target.namespace in _NAMESPACES)
        )
        if not own or any(each not in values for each in node.all_input_nodes):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: _Value(values[each]))  # type: ignore[return-value,arg-type]
        ops.append(_Op(node.target, args, kwargs, node.meta))  # type: ignore[arg-type]
        values[node] = len(tensors) + len(ops) - 1
    renewed = []
    for index, x in enumerate(tensors):
        now = recording.node_of(x)
        if now is not before[index]:
            if now is None or values.get(now, -1) < len(tensors):
                return None
            renewed.append((index, values[now]))
    try:
        results = _placed(made, tensors, values, recording)
    except _Unkeyed:
        return None
    if not ops:
        return None
    writes = any(isinstance(op.target, OpOverload) and op.target._schema.is_mutable for op in ops)
    shown = () if writes else tuple(_shown(made, results, len(tensors), recording))
    return _Call(tuple(ops), results, tuple(renewed), StandIns(writes), shown, codes)


def _after(last: fx.Node) -> Iterator[fx.Node]:
    node = last.next
    while node.op != "root":
        yield node
        node = node.next


def _placed(made: Any, tensors: list[Tensor], values: dict[fx.Node, int], recording: Recording) -> Any:
    """Results with `_Value`s for tensors.

    Raises:
        _Unkeyed: there is another one.
    """
    if isinstance(made, Tensor):
        for index, each in enumerate(tensors):
            if each is made:
                return _Value(index)
        node = recording.node_of(made) if type(made) is FakeTensor else None
        if node is None or values.get(node, -1) < len(tensors):
            raise _Unkeyed
        return _Value(values[node])
    if isinstance(made, tuple | list) and made:
        return _Results(type(made), [_placed(each, tensors, values, recording) for each in made])
    raise _Unkeyed


class _Results(NamedTuple):
    """Several results: a tuple, a list, or one of torch's tuples with names."""

    kind: type
    parts: list[Any]


def _shown(made: Any, results: Any, count: int, recording: Recording) -> Iterator[tuple[int, object]]:
    """The places of results that are none of `count` arguments, and what they are like."""
    if type(results) is _Results:
        for each, place in zip(made, results.parts, strict=True):
            yield from _shown(each, place, count, recording)
    elif results.index >= count:
        yield results.index, _like(made, recording)


def _like(x: Tensor, recording: Recording) -> object:
    return recording.described(x), type(x.grad_fn)


def _again(recording: Recording, call: _Call, tensors: list[Tensor], maker: Maker) -> Any:
    """Appends the nodes of an earlier call for other tensors; the results."""

    values: list[Any] = []

    def run() -> None:
        values[:] = tensors
        for op in call.ops:
            values.append(op.target(*_filled(op.args, values), **_filled(op.kwargs, values)))

    nodes: list[Any] = [recording.node_of(x) for x in tensors]
    try:
        first = call.stand_ins.make(maker, run)
        if first and any(_like(values[place], recording) != like for place, like in call.shown):
            values.clear()
            raise _Unlike
    finally:  # an op that torch refuses is none that was run
        for op in call.ops[: max(0, len(values) - len(tensors))]:
            nodes.append(recording.append(op.target, _filled(op.args, nodes), _filled(op.kwargs, nodes), op.meta))
    for index, place in call.renewed:
        recording.know(tensors[index], nodes[place])
    return _given(recording, call.results, values, nodes, len(tensors))


def _filled(value: Any, found: list[Any]) -> Any:
    """An argument with `_Value`s replaced."""
    kind = type(value)
    if kind is _Value:
        return found[value.index]
    if kind is tuple:
        return tuple([_filled(each, found) for each in value])
    if isinstance(value, list):
        return [_filled(each, found) for each in value]
    if isinstance(value, dict):
        return {name: _filled(each, found) for name, each in value.items()} if value else {}
    if kind is slice:
        return slice(_filled(value.start, found), _filled(value.stop, found), _filled(value.step, found))
    return value


def _given(recording: Recording, results: Any, values: Sequence[Any], nodes: list[Any], count: int) -> Any:
    """Results of a call; the trace knows those that are none of its tensors as the nodes that made them."""
    if type(results) is _Results:
        parts = [_given(recording, each, values, nodes, count) for each in results.parts]
        return results.kind(parts)
    made = values[results.index]
    if results.index >= count:
        recording.know(made, nodes[results.index])
    return made
