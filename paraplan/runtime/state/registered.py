"""The parameters and buffers a captured model has: their names, which of them are None, which are one tensor.

A step binds tensors by name. A bias registered where there was None, or a tied weight given a tensor of its own, has no
name in the plan and would be left out of it silently; so the registries of all modules are compared before every step.
Another tensor under the same name is no difference: the step runs on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

_KINDS = (("parameter", "_parameters"), ("buffer", "_buffers"))


class _Slot(NamedTuple):
    """What is registered under one name.

    Attributes:
        kind: "parameter" or "buffer".
        same: first name of that tensor; "" where it is None.
        is_meta: whether that tensor has no values; a model moved to meta has none in common any more.
    """

    kind: str = ""
    same: str = ""
    is_meta: bool = False


_ABSENT = _Slot()


class Registries:
    """The registries of one model, as they are now.

    Args:
        model: is held weakly, as its tensors are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(name, weakref.ref(module)) for name, module in model.named_modules()]
        self._was, self._now = self._slots(), self._ids()

    def fault(self) -> str:
        """What is registered otherwise, as the beginning of a sentence; "" where nothing is."""
        now = self._ids()
        if now == self._now:
            return ""
        if fault := self._difference(self._slots()):
            return fault
        self._now = now
        return ""

    def _ids(self) -> list[object]:
        """Names and tensors' ids, module by module. Equal lists are of equal names, of which the same are one tensor:
        an id that passed to another tensor passed from all names of the first."""
        found: list[object] = []
        for _, reference in self._modules:
            if (module := reference()) is not None:
                held = module.__dict__
                params, buffers = held["_parameters"], held["_buffers"]
                if params or buffers:
                    found += (None, *params, *map(id, params.values()), *buffers, *map(id, buffers.values()))
        return found

    def _slots(self) -> dict[str, _Slot]:
        found: dict[str, _Slot] = {}
        first: dict[int, str] = {}
        for prefix, reference in self._modules:
            held = getattr(reference(), "__dict__", {})
            for kind, registry in _KINDS:
                for key, tensor in held.get(registry, {}).items():
                    name = f"{prefix}.{key}" if prefix else key
                    same = "" if tensor is None else first.setdefault(id(tensor), name)
                    found[name] = _Slot(kind, same, tensor is not None and tensor.is_meta)
        return found

    def _difference(self, now: Mapping[str, _Slot]) -> str:
        for name in dict.fromkeys((*now, *self._was)):
            was, is_now = self._was.get(name, _ABSENT), now.get(name, _ABSENT)
            what = f"{was.kind or is_now.kind} {name!r}"
            if not is_now.kind:
                return f"the model has no {what} any more"
            if not was.kind:
                return f"the model has a {what} now, which it had not when the step was captured"
            if (was.kind, not was.same) != (is_now.kind, not is_now.same):
                kinds = [each.kind if each.same else "None" for each in (was, is_now)]
                return f"{what} was {kinds[0]} when the step was captured and is {kinds[1]} now"
            if was.same != is_now.same and not is_now.is_meta:
                parted, joined = was.same != name, is_now.same != name
                then = f"the same tensor as {was.same!r}" if parted else "a tensor of its own"
                later = f"the same as {is_now.same!r}" if joined else "a tensor of its own"
                return f"{what} was {then} when the step was captured and is {later} now"
        return ""
