"""What torch says of itself while a model is captured, kept from the user: deprecations of its own functions that only
it calls, attributes of its own modules, and tracebacks it logs of errors that capture explains itself. Warnings that
the user's code causes (a deprecated function called there) are attributed to that code and pass."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_OF_TORCH = r"(torch|functorch|copyreg|copy|contextlib)(\.|$)"  # the latter three: what torch calls to copy its objects
_FLAT = r"The tensor attributes? (self\.\S*_flat_weights\S* )+w(ere|as) assigned"  # a recurrent layer lists its weights
_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Within it, or in a function it decorates, what torch says of itself is not shown."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
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
