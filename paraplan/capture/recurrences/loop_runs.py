"""Loops of a forward while it is exported: one step is recorded between marks and stands for all.

The index is an object that only square brackets of tensors take, `x[:, t - 1]`: they give a marked per-step input. What
is carried begins with marks, too. The step runs twice, for `roll` to compare; a step whose carried values change their
shape or dtype (a first one that meets None, or promotes a dtype) is run with its number before. Whatever else a body
does with its index ends the attempt, and the loop is run step by step in another export.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from torch import Tensor, nn

from paraplan.capture.recurrences.carried_values import are_alike, tensors_of, with_tensors
from paraplan.capture.recurrences.loop_results import LoopResults, Stacked, overwritten
from paraplan.capture.recurrences.markers import BEGIN, END, MIN_STEPS, STEP, NotALoop
from paraplan.capture.recurrences.pure_calls import is_fixed, is_of_numbers, is_plain, is_pure_call
from paraplan.capture.recurrences.unbound_loops import Parts
from paraplan.capture.torch_private import storage_key

T = TypeVar("T")
SIGNS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_ADDED = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_IN_PLACE = {"+": operator.iadd, "-": operator.isub, "*": operator.imul}
LONG = 64
"""Steps from which on a loop that is run step by step is told of."""
MOST_FIRST_STEPS = 2
"""Steps run by their number before one stands for the rest."""


class Index:
    """The index of the steps that one stands for: theirs plus an offset."""

    def __init__(self, loop: Loop, offset: int = 0) -> None:
        self.loop, self.offset = loop, offset

    def __add__(self, other: object) -> Index:
        return self._moved(other, 1)

    __radd__ = __add__

    def __sub__(self, other: object) -> Index:
        return self._moved(other, -1)

    def _moved(self, other: object, sign: int) -> Index:
        if type(other) is not int:
            self._refuse()
        return Index(self.loop, self.offset + sign * other)

    def _refuse(self, *args: object) -> NoReturn:
        raise NotALoop(self.loop.where, "its index is used other than to take a step of a tensor")

    __index__ = __int__ = __float__ = __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # type: ignore[assignment]
    __rsub__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = __neg__ = __iter__ = __str__ = __format__ = _refuse  # type: ignore[assignment]
    __hash__ = _refuse  # type: ignore[assignment]


class Loops:
    """The loops of one export.

    Attributes:
        apart: places of loops that are run step by step, and why; None: all are.
        began: how many were marked.
        active: the one whose step is being recorded.
        watched: whether there may be one at all.
        results: what they made.
        open: of those that were marked, by number, the ones that have not ended.
    """

    def __init__(self, apart: Mapping[str, str] | None = MappingProxyType({})) -> None:
        self.apart, self.began, self.watched = apart, 0, False
        self.active: Loop | None = None
        self.results = LoopResults()
        self.open: dict[int, Loop] = {}
        self._told = dict[str, None]()

    def unbound(self, x: Any, dim: int) -> object:
        """What a loop goes over the parts of: a tensor, or what else has an `unbind`.

        Args:
            x: which.
            dim: along which.
        """
        return x if isinstance(x, Tensor) and -x.dim() <= dim < x.dim() else Parts(x.unbind(dim))

    def check(self) -> None:
        """Say at the end what forward has caught, and which long loops are none, and refuse loops that ended otherwise
        than by their last step, and changes of what they have other names for.

        Raises:
            NotALoop: there is one.
        """
        if self.apart is None:
            return
        for where, why in NotALoop.made[:1]:
            raise NotALoop(where, why)
        for loop in self.open.values():
            raise NotALoop(loop.where, "it ends before its last step, or by an error")
        self.results.check_all()
        for text in self._told:
            warnings.warn(text, stacklevel=2)

    def begin(self, where: str, indices: range, why: str = "") -> Loop:
        """A loop that is about to run.

        Args:
            where: its place in the user's code.
            indices: of its steps.
            why: it is run step by step, where its code says so.
        """
        why = why or (self.apart or {}).get(where, "")
        if why and len(indices) >= LONG:
            self._told[
                f"{where}: this loop over time is captured step by step, {len(indices)} of them, and planned as long: "
                f"{why}. Written so that a step only names what functions and layers of torch give, it is one op"
            ] = None
        rolled = self.apart is not None and not why and self.active is None and len(indices) >= MIN_STEPS
        return Loop(self, where, indices, rolled)


class Loop:
    """One loop. Iterated over, it yields the index of each step that its body is run for."""

    def __init__(self, loops: Loops, where: str, indices: range, rolled: bool) -> None:
        self.loops, self.where, self.indices, self.rolled = loops, where, indices, rolled
        self.number = 0
        self.marked, self.run, self.first = False, 0, 0
        self.values: tuple[object, ...] = ()
        self.alike = False
        self.lists: list[list[Any]] = []
        self.kept: list[Tensor] = []
        self.outs: list[list[Tensor]] = []
        self.made: list[Tensor] = []
        self.read: list[Tensor] = []
        self.marks: list[Tensor] = []
        self.steps: list[Tensor] = []
        self.sources: dict[tuple[int, int, int, int], tuple[Tensor, Tensor]] = {}

    def __iter__(self) -> Iterator[object]:
        if not self.rolled:
            yield from self.indices
            return
        self.loops.began += 1
        self.number = self.loops.began
        self.loops.open[self.number] = self
        for first in range(MOST_FIRST_STEPS + 1):
            self.first = first
            yield from self._attempt()
            if self.outs:
                yield from self._attempt()
                return
            self._forget()
            self.lists = []
            yield self.indices[first]
        raise NotALoop(self.where, "what is carried from step to step changes its shape or dtype")

    def _attempt(self) -> Iterator[object]:
        """A marked step."""
        self.marked, self.loops.active = True, self
        self.run += 1
        self.kept, self.lists, self.alike = [], [], True
        yield Index(self)
        self.marked, self.loops.active = False, None

    def _forget(self) -> None:
        """Takes from the lists what the last attempt appended."""
        for each in self.lists:
            each.pop()

    def enter(self, names: Mapping[str, object], carried: Sequence[str], outer: Sequence[str]) -> tuple[object, ...]:
        """The carried values that a step is given.

        Args:
            names: variables of the function, with their values.
            carried: those of the step before that it reads.
            outer: others that it reads.
        """
        if not self.rolled:
            return tuple(names.get(name) for name in carried)
        for name in outer:
            if name in names and not is_plain(names[name]):
                kind = type(names[name]).__qualname__
                raise NotALoop(self.where, f"a step reads {name}, a {kind}, which may be another one in every step")
        if any(name not in names for name in carried):
            raise NotALoop(self.where, "a step reads what only the step before has made")
        if self.run <= 1 and self.marked:
            self.values = tuple(names[name] for name in carried)
        if not self.marked:
            return self.values
        tensors = tensors_of(self.values)
        self.marks = BEGIN(tensors, self.number, self.run) if tensors else []
        marks = iter(self.marks)
        return tuple(with_tensors(value, marks) for value in self.values)

    def leave(
        self, names: Mapping[str, object], carries: Sequence[str], after: Sequence[str], summed: Sequence[str]
    ) -> None:
        """The values after a step: of what is carried, and of what else is read after the loop.

        Args:
            names: variables of the function, with their values.
            carries: those that the next step begins with.
            after: those that are read after the loop.
            summed: of those carried, the ones that a step only adds to.
        """
        if not self.rolled:
            return
        if any(name not in names for name in (*carries, *after)):
            raise NotALoop(self.where, "a step does not always assign what it carries")
        carried, lasts = tuple(names[name] for name in carries), tuple(names[name] for name in after)
        if not self.marked:
            self.values = carried
            return
        self.alike = all(map(are_alike, self.values, carried))
        if not self.alike:
            return
        if any(not isinstance(value, Tensor) for value in lasts):
            raise NotALoop(self.where, "what is read after the loop is no tensor")
        if all(isinstance(x, nn.Parameter) for x in self.read):
            raise NotALoop(self.where, "no step reads its part of an activation")
        sums = [names[name] for name in summed]
        if any(isinstance(x, Tensor) and x.dim() == 0 and x.requires_grad for x in sums):
            raise NotALoop(self.where, "it adds up a number of the whole batch, which no rank and no microbatch has")
        outs = [*tensors_of(carried), *self.kept, *lasts]
        self.outs.append(outs)  # type: ignore[arg-type]
        self._watch(outs)  # type: ignore[arg-type]

    def _watch(self, outs: Sequence[Tensor]) -> None:
        """What a step hands on may be what it was given, and more names than one may be for it."""
        given = set(map(storage_key, outs))
        for made, of in ((self.marks, tensors_of(self.values)), (self.steps, [x for x, _ in self.sources.values()])):
            if not given.isdisjoint(map(storage_key, made)):
                self.loops.results.watch(of, self.where)
        self.loops.results.watch(outs, self.where)

    def ends(self, names: Mapping[str, object], read: Sequence[str]) -> tuple[object, ...]:
        """The values after the last step: of what is carried, then of what else is read after the loop."""
        if not self.rolled:
            return tuple(names.get(name) for name in read)
        self.loops.open.pop(self.number)
        outs, again = self.outs
        count = len(tensors_of(self.values))
        reverse, steps = self.indices.step < 0, len(self.indices) - self.first
        made = END(outs, again, count, steps, reverse, self.number, self.where)
        ends, stacks = made[:count], made[count:]
        self.loops.results.watch(made, self.where)
        self.made, rest = stacks[: len(self.kept)], stacks[len(self.kept) :]
        given = iter(ends)
        carried = (with_tensors(value, given) for value in self.values)
        return (*carried, *(stack.select(0, 0 if reverse else steps - 1) for stack in rest))

    def pure(self, called: T, count: int) -> T:
        """What a step calls, giving it so much by place; refused where that may change something or keep a state."""
        if self.rolled and is_of_numbers(called):
            return partial(self._of_numbers, called)  # type: ignore[return-value]
        if self.rolled and not is_pure_call(called, count):
            name = getattr(called, "__name__", type(called).__name__)
            raise NotALoop(self.where, f"a step calls {name}, which may keep something from step to step")
        return called

    def _of_numbers(self, called: Callable[..., Any], *args: object) -> Any:
        """A call of a function of numbers; refused where it is given what others may change."""
        return called(*(each if type(each) in (int, float, bool, str) else self.fixed(each) for each in args))

    def fixed(self, whole: T) -> T:
        """What a step takes a part of; refused where that may be another one in another step."""
        if self.rolled and not is_fixed(whole):
            raise NotALoop(self.where, f"a step reads a part of a {type(whole).__qualname__}, which others may change")
        return whole

    def added(self, total: Any, sign: str, value: Any) -> Any:
        """`total += value`, or with another sign.

        Args:
            total: that has no other name.
            sign: of the operation.
            value: what is added.
        """
        if not self.rolled:
            return _IN_PLACE[sign](total, value)
        found = _ADDED[sign](total, value)
        if isinstance(total, Tensor) and not are_alike(total, found):
            raise NotALoop(self.where, "what is added in place changes its shape or dtype")
        return found

    def append(self, into: list[Any], value: object) -> None:
        """`into.append(value)` of a step."""
        if not self.marked:
            into.append(value)
            return
        if type(into) is not list or not isinstance(value, Tensor) or any(each is into for each in self.lists):
            raise NotALoop(self.where, "a step appends something else than one tensor to a list")
        into.append(value)  # for a step that reads it, which the second run then shows
        self.lists.append(into)
        self.kept.append(value)

    def collected(self, into: list[Any], is_joined: bool) -> list[Any]:
        """A list after the loop.

        Args:
            into: the list.
            is_joined: whether nothing but what joins it reads it, so that its parts need not be made.
        """
        if not self.rolled:
            return into
        place = next(index for index, each in enumerate(self.lists) if each is into)
        stack = self.made[place]
        whole = stack.flip(0) if self.indices.step < 0 else stack
        if is_joined:
            return Stacked(into[:-2], whole, self.where)  # but for those of both runs
        parts = whole.unbind(0)
        into[-2:] = parts
        self.loops.results.filled(whole, parts, self.where)
        return into

    def written(self, x: Tensor, values: list[Any], dim: int, offset: int) -> Tensor:
        """A tensor of which every step has written one part, after the loop.

        Args:
            x: as it was before.
            values: what the steps wrote, the first ones first.
            dim, offset: of the index, and what was added to it.
        """
        numbers = [index + offset for index in self.indices]
        if self.rolled:
            return overwritten(x, values[:: self.indices.step], dim, numbers, self.where)
        for number, value in zip(numbers, values, strict=True):
            x.select(dim, number)[...] = value
        return x

    def _part(self, x: Tensor, dim: int, offset: int) -> Tensor:
        """The steps of a tensor along a dim, in ascending order."""
        steps = self.indices[self.first :]
        low, high = min(steps) + offset, max(steps) + offset
        if low < 0 or high >= x.shape[dim]:
            raise NotALoop(self.where, "it reads before the first or after the last step of a tensor")
        if low == 0 and high == x.shape[dim] - 1 and abs(steps.step) == 1:
            return x
        return x[(*(slice(None),) * dim, slice(low, high + 1, abs(steps.step)))]

    def take(self, x: Tensor, index: object) -> Tensor:
        """`x[index]`, with the step's index among the indices."""
        dim, offset, rest = _place(x, index, self)
        key = (id(x), dim, offset, self.first)
        if key not in self.sources:
            self.sources[key] = x, self._part(x, dim, offset)
        self.read.append(x)
        step = STEP(self.sources[key][1], dim, self.number, self.run)
        self.steps.append(step)
        return step[rest] if any(each is None or each != slice(None) for each in rest) else step


def _place(x: Tensor, index: object, loop: Loop) -> tuple[int, int, tuple[Any, ...]]:
    """The dim the step's index takes a part of, its offset, and the other indices."""
    parts: list[Any] = list(index) if isinstance(index, tuple) else [index]
    plain = all(part is Ellipsis or part is None or isinstance(part, (int, slice, Index)) for part in parts)
    places = [place for place, part in enumerate(parts) if isinstance(part, Index)]
    if not plain or len(places) != 1 or any(isinstance(part, slice) and is_indexed(part) for part in parts):
        raise NotALoop(loop.where, "a step of a tensor is taken with other indices than numbers and slices")
    if any(part is Ellipsis for part in parts):
        place = next(number for number, part in enumerate(parts) if part is Ellipsis)
        given = sum(part is not None for part in parts)
        parts[place : place + 1] = [slice(None)] * (x.dim() - given + 1)
    place = next(place for place, part in enumerate(parts) if isinstance(part, Index))
    dim = sum(part is not None for part in parts[:place])
    offset = parts.pop(place).offset
    return dim, offset, tuple(parts)


def is_indexed(part: slice) -> bool:
    """Whether a slice has a step's index for a bound."""
    return any(isinstance(each, Index) for each in (part.start, part.stop, part.step))
