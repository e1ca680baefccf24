"""What following an export needs of torch's private or experimental modules.

Names here are ours; the tests passed with torch 2.13 and 2.11.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._C._functorch import is_gradtrackingtensor
from torch.fx import Tracer
from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["data_errors_noted", "in_gradient_transform", "modules_left"]

_SYMBOLS = re.compile(r"[\\/]torch[\\/](__init__|fx[\\/]experimental[\\/](symbolic_shapes|sym_node|recording))\.py$")


@contextmanager
def data_errors_noted(note: Callable[[Exception], None]) -> Iterator[None]:
    """Under it, errors of Python asking a number for what only data say (`if x.item() > 0`) are noted as they are made;
    those of ops are not, of which torch catches some itself."""
    original = ShapeEnv._make_data_dependent_error

    def made(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        fault, frame = original(self, *args, **kwargs), sys._getframe(1)
        while frame.f_back is not None and _SYMBOLS.search(frame.f_code.co_filename):
            frame = frame.f_back
        if f"{os.sep}torch{os.sep}" not in frame.f_code.co_filename:
            note(fault)
        return fault

    ShapeEnv._make_data_dependent_error = made  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShapeEnv._make_data_dependent_error = original  # type: ignore[method-assign]


@contextmanager
def modules_left() -> Iterator[None]:
    """Under it, a trace leaves a module that forward leaves by an exception, and catches outside of it."""
    original = Tracer.call_module

    def call_module(self: Tracer, *args: Any, **kwargs: Any) -> Any:
        before = len(self.module_stack)
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            while len(self.module_stack) > before:
                self.module_stack.popitem(last=True)
            raise

    Tracer.call_module = call_module  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tracer.call_module = original  # type: ignore[method-assign]


def in_gradient_transform(tensor: Tensor) -> bool:
    """Whether a tensor is one of a transform of `torch.func` that takes gradients."""
    return bool(is_gradtrackingtensor(tensor))
