"""What a forward leaves behind in its modules, that tracing would lose without a word."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from paraplan.ir.errors import CaptureError

_NUMBERS = (bool, int, float, str)


@contextmanager
def assignments_written(model: nn.Module) -> Iterator[None]:
    """Under it, a buffer that forward assigns anew (`self.mean = 0.9 * self.mean + ...`) is overwritten in place when
    it ends, which is what a trace records. An attribute that is a number and changes draws a warning: a step has it as
    it was.

    Raises:
        CaptureError: what is assigned has another shape or dtype than the buffer.
    """
    modules = list(model.named_modules())
    buffers = [dict(module._buffers) for _, module in modules]
    numbers = [_numbers(module) for _, module in modules]
    yield
    for (name, module), before, said in zip(modules, buffers, numbers, strict=True):
        for key, old in before.items():
            new = module._buffers.get(key)
            if new is not old and old is not None and new is not None:
                _write(old, new, f"{name}.{key}" if name else key)
                module._buffers[key] = old
        for key, value in _numbers(module).items():
            if key in said and said[key] != value:
                warnings.warn(
                    f"forward changes {key!r} of {type(module).__name__} {name!r} from {said[key]!r} to {value!r}: a "
                    f"captured step computes with {said[key]!r} each time; make it a buffer (register_buffer) if the "
                    "loss depends on it",
                    stacklevel=2,
                )


def _numbers(module: nn.Module) -> dict[str, object]:
    return {key: value for key, value in module.__dict__.items() if isinstance(value, _NUMBERS)}


def _write(old: Tensor, new: Tensor, name: str) -> None:
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        raise CaptureError(
            f"forward makes buffer {name!r} a {new.dtype} of {tuple(new.shape)}, where it was a {old.dtype} of "
            f"{tuple(old.shape)}; keep its shape and dtype"
        )
    old.copy_(new)
