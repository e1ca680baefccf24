"""What a trace refuses and eager would not, noted: a forward that catches it goes on as eager would not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from paraplan.capture.following.torch_private import data_errors_noted

_NOTED: ContextVar[list[Exception] | None] = ContextVar("noted", default=None)


class Refused(RuntimeError):
    """What forward does has no place in a captured step."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        note(self)


def note(fault: Exception) -> None:
    """Remember what a trace refuses, if one is under way."""
    noted = _NOTED.get()
    if noted is not None:
        noted.append(fault)


@contextmanager
def refusals_noted() -> Iterator[list[Exception]]:
    """Under it, what is refused, the first first; also a branch on a number of which data decides."""
    noted: list[Exception] = []
    token = _NOTED.set(noted)
    try:
        with data_errors_noted(note):
            yield noted
    finally:
        _NOTED.reset(token)
