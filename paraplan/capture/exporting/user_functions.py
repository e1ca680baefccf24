"""Functions of autograd that the user wrote, kept whole while exporting, so that their backward is theirs.

Export runs an `autograd.Function`'s forward and forgets its backward: a gradient reversal, a straight-through
estimator or a surrogate slope would silently become the derivative of the forward. Here `Function.apply` is recorded
as one op (`paraplan::user_function`, with a number that says which function and which plain arguments), and once the
graph is there that op becomes a call of the function itself. The joint trace then runs its forward and its backward,
and what is recorded are the ops inside of them. Of torch's reentrant checkpoint the function that it runs is recorded.
Hooks on gradients and on what is saved for backward, and modes that answer dispatched ops are lost in the same way and
have no place in a graph: they are refused, as are numbers drawn from the generators of Python and numpy, which would be
the same in every step.

A function runs when the graph is there, and not when it is called. What it reads of its plain arguments, of globals and
of variables around it must be then what it was; where that has changed the model is refused. Calls are one op where
their plain arguments are equal numbers, text and the like, or the same objects with the same content.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy
import torch
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from paraplan.capture.canonical.canonical import define
from paraplan.capture.following.refusals import Refused
from paraplan.capture.following.torch_private import in_gradient_transform
from paraplan.capture.hooks import HOOKED
from paraplan.capture.python_state.code import Reached
from paraplan.capture.python_state.contents import content_digest
from paraplan.capture.python_state.setting_paths import outside_value
from paraplan.capture.python_state.values import is_plain
from paraplan.capture.torch_private import (
    functions_applied_by,
    is_own,
    run_function,
    storage_key,
    trace_as,
    traced_as,
)
from paraplan.ir.errors import CaptureError
from paraplan.kernels.torch_private import (
    OpOverload,
    TorchDispatchMode,
    gives_alias,
    is_fake,
    tree_leaves,
    tree_map_only,
    tree_structure,
)

_ENTERED = (TorchDispatchMode, saved_tensors_hooks)

_REGISTERS = ("register_hook", "register_post_accumulate_grad_hook")


class _Place:
    """Where a tensor stands among a call's tensors."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"%{self.index}"


_Given = tuple[tuple[object, ...], dict[str, object]]


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, _Place) and isinstance(other, _Place):
        return one.index == other.index
    equal = type(one) is type(other) and is_plain(one) and one == other and repr(one) == repr(other)
    return one is other or equal


class UserFunction:
    """A user's function with its plain arguments: a call target of the forward graph.

    Args:
        cls: the class.
        given: positional and keyword arguments of `apply`, tensors replaced by their places.
        number: of the function in its export.
        read: digest of what the call reads of Python.
    """

    def __init__(self, cls: type[Function], given: _Given, number: int, read: str) -> None:
        self.cls, self.given, self.read = cls, given, read
        self.__name__ = f"{cls.__module__}.{cls.__qualname__} {read} {number}"  # equal calls make equal segments

    def is_call(self, cls: type[Function], given: _Given, read: str) -> bool:
        """Whether another call computes the same of its tensors."""
        mine, theirs = tree_leaves(self.given), tree_leaves(given)
        same = self.cls is cls and self.read == read and tree_structure(self.given) == tree_structure(given)
        return same and all(map(_is_same, mine, theirs))

    def results(self, tensors: list[Tensor]) -> object:
        """What the function returns, differentiable by its own backward."""
        args, kwargs = tree_map_only(_Place, lambda place: tensors[place.index], self.given)
        return self.cls.apply(*args, **kwargs)

    def __call__(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """Its results as a tuple.

        Raises:
            CaptureError: one of them is no tensor.
        """
        return self.listed(self.results(tensors))

    def listed(self, made: object) -> tuple[Tensor, ...]:
        """Results as a tuple.

        Raises:
            CaptureError: one of them is no tensor.
        """
        found = made if isinstance(made, tuple) else (made,)
        if not all(isinstance(x, Tensor) for x in found):
            kinds = ", ".join(type(x).__name__ for x in found)
            raise CaptureError(f"{self.cls.__qualname__}.forward returns ({kinds}); return tensors only")
        return found


def has_own_backward(node: fx.Node) -> bool:
    """Whether a call's backward was written by a user: of a function of autograd, or of an op that is not torch's."""
    target = node.target
    ours = not isinstance(target, OpOverload) or target.namespace in ("aten", "prims", "paraplan")
    return isinstance(target, UserFunction) or not ours


class _Writes(TorchDispatchMode):
    """Under it, the storages are noted that ops write to."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every op as it is."""
        named = {**dict(zip((each.name for each in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for each in func._schema.arguments:
            if each.alias_info is not None and each.alias_info.is_write:
                self.storages |= {storage_key(x) for x in tree_leaves(named.get(each.name)) if isinstance(x, Tensor)}
        return func(*args, **(kwargs or {}))


def _is_all_of(one: Tensor, other: Tensor) -> bool:
    """Whether one tensor is all of another."""
    same = (
        one.shape == other.shape and one.stride() == other.stride() and one.storage_offset() == other.storage_offset()
    )
    return same and storage_key(one) == storage_key(other)


class Recorded:
    """The calls of user's functions recorded during one export."""

    def __init__(self) -> None:
        self._functions: list[UserFunction] = []
        self._reached: dict[type[Function], Reached] = {}
        self._single: dict[int, bool] = {}
        self._written: dict[int, dict[int, int]] = {}  # per function, tensors it writes in place: which result each is
        self._inside = False

    def apply(self, cls: type[Function], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """`cls.apply(*args, **kwargs)`, as one op."""
        if cls is CheckpointFunction:  # what it runs is what it computes; what is kept is for the plan to say
            run, _, *given = args
            return run(*given)  # type: ignore[operator]
        tensors: list[Tensor] = []

        def place(x: Tensor) -> _Place:
            tensors.append(x)
            return _Place(len(tensors) - 1)

        given = tree_map_only(Tensor, place, (args, kwargs))
        if self._inside or not tensors:
            return run_function(cls, *args, **kwargs)
        read = self._read(cls, given)
        count = len(self._functions)
        number = next((n for n, each in enumerate(self._functions) if each.is_call(cls, given, read)), count)
        if number == count:
            self._functions.append(UserFunction(cls, given, number, read))
        made = torch.ops.paraplan.user_function(tensors, number)
        for at, result in self._written[number].items():
            if result < 0 or not is_own(tensors[at]):
                raise _written_elsewhere(cls)
            trace_as(tensors[at], traced_as(made[result]))
        return made[0] if self._single[number] else tuple(made)

    def shapes(self, tensors: list[Tensor], number: int) -> list[Tensor]:
        """Fake results of a recorded call."""
        self._inside, writes = True, _Writes()
        try:
            with torch.no_grad(), writes:
                made = self._functions[number].results(tensors)
                found = self._functions[number].listed(made)
        finally:
            self._inside = False
        self._single[number] = not isinstance(made, tuple)
        self._written[number] = {
            at: next((result for result, each in enumerate(found) if _is_all_of(each, x)), -1)
            for at, x in enumerate(tensors)
            if storage_key(x) in writes.storages
        }
        return [x.clone() for x in found]

    def _read(self, cls: type[Function], given: _Given) -> str:
        """Digest of what a function reads of Python now."""
        if cls not in self._reached:
            self._reached[cls] = Reached([cls])
        around = self._reached[cls].outside.values()
        return content_digest([given, [outside_value(each) for each in around]])

    def restore(self, graph: fx.Graph) -> None:
        """Calls of the functions themselves in place of the op.

        Raises:
            CaptureError: what one of them reads of Python is no longer what it was when it was called, or what one
            writes in place is read under another name.
        """
        for each in self._functions:
            if self._read(each.cls, each.given) != each.read:
                raise CaptureError(
                    f"{each.cls.__qualname__}.apply is called, and what it reads of Python (plain arguments, globals, "
                    "variables around it) is changed in the same forward; give apply numbers, or an object that stays "
                    "as it is"
                )
        order = {node: place for place, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            if node.target is torch.ops.paraplan.user_function.default:
                tensors, number = node.args
                views = [view for at in self._written[number] for view in _views(tensors[at])]
                if any(order[user] > order[node] for view in views for user in view.users):
                    raise _written_elsewhere(self._functions[number].cls)
                node.target, node.args = self._functions[number], (tensors,)


def _views(node: fx.Node) -> Iterator[fx.Node]:
    """What shares its memory with a value, made of it."""
    for user in node.users:
        if gives_alias(user.target):
            yield user
            yield from _views(user)


def _written_elsewhere(cls: type[Function]) -> CaptureError:
    return CaptureError(
        f"{cls.__qualname__}.forward writes a tensor in place that it does not give back, that is a view, a buffer, a "
        "parameter or an input, or of which a view is read later: these would keep the old value; write to a copy "
        "(x.clone()), and buffers in the model's forward"
    )


_RECORDING: ContextVar[Recorded] = ContextVar("recording")


def _shapes(tensors: list[Tensor], number: int) -> list[Tensor]:
    return _RECORDING.get().shapes(list(tensors), number)


def _never(tensors: list[Tensor], number: int) -> list[Tensor]:
    raise CaptureError("paraplan::user_function stands for a call while exporting and is never run")


define("user_function(Tensor[] tensors, int number) -> Tensor[]", _never, _shapes)


@contextmanager
def recorded_functions() -> Iterator[Recorded]:
    """Under it, calls of user's functions are recorded as ops, and hooks on gradients refused."""
    recorded = Recorded()

    def apply(cls: type[Function], *args: object, **kwargs: object) -> object:
        return recorded.apply(cls, args, kwargs)

    def refused(name: str) -> Callable[..., object]:
        def hook(self: Tensor, hook: Callable[..., Any]) -> object:
            raise Refused(f"Tensor.{name} is called; {HOOKED}")

        return hook

    def entering(enter: Callable[..., object]) -> Callable[..., object]:
        def entered(self: Any) -> object:
            _refuse_entered(self)
            return enter(self)

        return entered

    token, registers = _RECORDING.set(recorded), {name: getattr(Tensor, name) for name in _REGISTERS}
    enters = [(kind, kind.__enter__) for kind in _ENTERED]
    for name in _REGISTERS:
        setattr(Tensor, name, refused(name))
    for kind, enter in enters:
        kind.__enter__ = entering(enter)  # type: ignore[method-assign]
    try:
        with functions_applied_by(apply):
            yield recorded
    finally:
        for name, register in registers.items():
            setattr(Tensor, name, register)
        for kind, enter in enters:
            kind.__enter__ = enter  # type: ignore[method-assign]
        _RECORDING.reset(token)


def _refuse_entered(what: Any) -> None:
    """Modes and hooks of the user's; torch's own change no number (its checkpoints, `save_on_cpu`)."""
    asked = what if isinstance(what, TorchDispatchMode) else what.pack_hook
    owner = type(asked) if isinstance(what, TorchDispatchMode) else getattr(asked, "__func__", asked)
    if str(getattr(owner, "__module__", "")).partition(".")[0] in ("torch", "paraplan"):
        return
    if isinstance(what, TorchDispatchMode):
        raise Refused(
            f"the forward enters {owner.__qualname__}, a TorchDispatchMode, whose answers are no part of a captured "
            "graph; compute what it does in forward, or leave it out while planning"
        )
    raise Refused(
        "the forward enters saved_tensors_hooks, and what they make of saved tensors is no part of a captured graph; "
        "leave them out: where activations are kept, and whether, is chosen by the plan"
    )


@contextmanager
def generators_kept() -> Iterator[None]:
    """After it, the generators of Python and numpy are as they were."""
    states = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])


@contextmanager
def no_outside_numbers() -> Iterator[None]:
    """Under it, forward draws nothing from the generators of Python and numpy.

    Raises:
        RuntimeError: it did.
    """
    before = random.getstate(), str(numpy.random.get_state())
    with generators_kept():
        yield
        drawn = "random" if random.getstate() != before[0] else ""
        drawn = "numpy.random" if str(numpy.random.get_state()) != before[1] else drawn
    if drawn:
        raise Refused(
            f"the forward draws from {drawn}, whose numbers would be constants, the same in every step; draw with "
            "torch.rand and choose with torch.where, or pass them as an input"
        )


class NoOutsideGradients(TorchFunctionMode):
    """Under it, no tensor from outside of the model is read that asks for a gradient: it would be a constant.

    Raises:
        RuntimeError: one is.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and see whether a gradient would flow to such a tensor."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.requires_grad:
            if in_gradient_transform(result):
                raise Refused(
                    "a transform of torch.func that takes gradients (grad, vjp, jvp, jacrev) runs in forward; a "
                    "captured step has one backward, that of its loss: write the derivative out"
                )
            for each in tree_leaves((args, kwargs)):
                if type(each) in (Tensor, nn.Parameter) and each.requires_grad and not is_fake(each):
                    raise Refused(
                        f"a tensor of shape {tuple(each.shape)} that requires a gradient is no parameter of the model "
                        "(it is of a loss_fn with parameters of its own, or kept in a list), so that it would not be "
                        "trained; make it, or the module it belongs to, part of the model (self.criterion = ...), or "
                        "call requires_grad_(False) on it"
                    )
        return result
