"""The methods of the user's classes that a capture followed: a step runs those of then."""

from __future__ import annotations

from typing import Any

from torch import nn

from paraplan.capture.python_state.code import Reached
from paraplan.capture.python_state.values import ABSENT


class Methods:
    """Those that the code of a model names, as its classes have them now.

    Args:
        model: from its forwards on they are followed.
    """

    def __init__(self, model: nn.Module) -> None:
        reached = Reached([model])
        self._mentioned = reached.mentioned
        self._classes = [(cls, vars(cls), len(vars(cls))) for cls in reached.classes]
        self._held = [
            (held, name, value)
            for _, held, _ in self._classes
            for name, value in held.items()
            if self._is_followed(name, value)
        ]

    def _is_followed(self, name: str, value: Any) -> bool:
        return name in self._mentioned and (callable(value) or hasattr(type(value), "__get__"))

    def fault(self) -> str:
        """The first that is another, or that a class has in place of its base's; "" where there is none."""
        for held, name, value in self._held:
            if held.get(name, ABSENT) is not value:
                return self._said(next(cls for cls, own, _ in self._classes if own is held), name)
        for index, (cls, held, size) in enumerate(self._classes):
            if len(held) != size:
                known = {name for own, name, _ in self._held if own is held}
                for name, value in held.items():
                    if name not in known and self._is_followed(name, value):
                        return self._said(cls, name)
                self._classes[index] = (cls, held, len(held))
        return ""

    @staticmethod
    def _said(cls: type, name: str) -> str:
        return (
            f"{cls.__qualname__} has another {name!r} than when the step was captured, and a captured step runs that "
            "of then; put it back, or"
        )
