"""What torch says of itself while a model is captured, kept from the user: deprecations of its own functions that only
it calls, attributes of its own modules, and tracebacks it logs and graphs it prints of errors that capture explains
itself. Warnings that
the user's code causes (a deprecated function called there) are attributed to that code and pass."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any, TextIO, cast

_OF_TORCH = r"(torch|functorch|copyreg|copy|contextlib)(\.|$)"  # the latter three: what torch calls to copy its objects
_FLAT = r"The tensor attributes? (self\.\S*_flat_weights\S* )+w(ere|as) assigned"  # a recurrent layer lists its weights
_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


_GRAPH = "def forward(self, arg"


class _WithoutGraphs:
    """A stream but for graphs that torch prints there, each with the end of line after it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._was_graph = stream, False

    def write(self, text: str) -> int:
        """What is no graph."""
        is_end, self._was_graph = self._was_graph and text == "\n", text.lstrip().startswith(_GRAPH)
        return len(text) if is_end or self._was_graph else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Within it, or in a function it decorates, what torch says of itself is not shown."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings(), redirect_stderr(cast(TextIO, _WithoutGraphs(sys.stderr))):
        for kind in (FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=kind, module=_OF_TORCH)
        warnings.filterwarnings("ignore", _FLAT, UserWarning)
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)
