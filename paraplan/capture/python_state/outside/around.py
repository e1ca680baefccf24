"""What a traced forward changes outside of its model: told of at its end, undone after."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from paraplan.capture.python_state.carried_attributes import tensors_in
from paraplan.capture.python_state.code import Outside, Reached, caches_restored, is_library
from paraplan.capture.python_state.outside.snapshot import Change, Snapshot
from paraplan.capture.python_state.setting_paths import outside_value
from paraplan.capture.python_state.values import is_data, is_opaque, token
from paraplan.ir.errors import CaptureError


class Around:
    """Globals, closures and classes around the code of a forward and its loss function.

    Args:
        model: the fake copy that is exported.
        loss_fn: or None.
    """

    def __init__(self, model: nn.Module, loss_fn: object) -> None:
        self._reached: tuple[Reached, ...] = Reached([model]), Reached([] if loss_fn is None else [loss_fn])
        self._model, self._loss_fn, self._code = model, loss_fn, self._reached
        self._told: Snapshot | None = None
        self._changed: dict[tuple[int, tuple[Any, ...]], object] = {}
        self._differ: list[Change] = []
        self.outside: Mapping[tuple[int, tuple[Any, ...]], Outside] = {
            key: each for reached in self._reached for key, each in reached.outside.items()
        }
        self._before = {key: _now(each) for key, each in self.outside.items()}

    def met(self) -> Iterator[object]:
        """Values and objects that the code names."""
        yield from map(outside_value, self.outside.values())
        for reached in self._reached:
            yield from reached.objects.values()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """After it, all is as it was before."""
        self._code = (*self._reached, *_of_objects(self._model))
        self._told = Snapshot(self._code)
        private = Snapshot([], [] if self._loss_fn is None else [self._loss_fn])
        with caches_restored([each for reached in self._code for each in reached.caches]):
            try:
                yield
                self._changed = {
                    key: outside_value(each) for key, each in self.outside.items() if _now(each) != self._before[key]
                }
            finally:
                private.restore()
                self._told.restore()

    def cached(self) -> Iterator[Tensor]:
        """Tensors that this forward has left in caches: of functools.lru_cache, of a class, a global, a closure."""
        yield from () if self._told is None else self._told.tensors()
        for reached in self._code:
            for each in reached.caches:
                if each.cache_info().currsize:
                    held = gc.get_referents(each)
                    yield from tensors_in([*held, *(list(item.values()) for item in held if isinstance(item, dict))])

    def note_changes(self) -> list[Change]:
        """What differs, to be called at the end of a forward; what the code names is compared when `kept` ends, where
        functions have their own code again (`followed_loops`)."""
        self._differ = self._told.changes() if self._told is not None else []
        return self._differ

    def refuse(self, is_cache: Callable[[Change], bool]) -> None:
        """Refuse what was noted of globals and closures that code names, caches of constants excepted.

        Args:
            is_cache: whether a change is one.
        Raises:
            CaptureError: names the first.
        """
        cached = {id(each.held) for each in self._differ if is_cache(each)}
        cached -= {id(each.held) for each in self._differ if not is_cache(each)}
        for key, value in self._changed.items():
            if id(value) not in cached:
                raise CaptureError(
                    f"forward changes {self.outside[key].where}, which a captured step would have as it was; keep what "
                    "goes from step to step in a buffer (register_buffer), or, where its first run alone changes it, "
                    "run forward once on such a batch before"
                )

    def constant(self) -> list[Outside]:
        """What the code names and this forward left as it was."""
        return [each for key, each in self.outside.items() if key not in self._changed]


def _now(each: Outside) -> object:
    value = outside_value(each)
    return token(value) if is_data(value) else None


def _of_objects(model: nn.Module) -> Sequence[Reached]:
    """The code of objects that modules hold."""
    kinds = {type(value): value for module in model.modules() for value in vars(module).values()}
    classes = [cls for cls, value in kinds.items() if is_opaque(value) and not is_library(cls)]
    return [Reached([model, *classes])] if classes else []
