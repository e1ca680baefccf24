"""What a forward leaves behind in its modules, that tracing would lose without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from paraplan.ir.errors import CaptureError


@contextmanager
def assignments_written(model: nn.Module, is_aliased: Callable[[Tensor], bool]) -> Iterator[None]:
    """Under it, a buffer that forward assigns anew (`self.mean = 0.9 * self.mean + ...`) is overwritten in place when
    it ends, which is what a trace records. (Other attributes are looked after in `reads`.)

    Args:
        model: the model.
        is_aliased: whether forward has read a buffer from another attribute too, which keeps the first tensor.
    Raises:
        CaptureError: what is assigned has another shape or dtype than the buffer, or that is aliased.
    """
    modules = list(model.named_modules())
    buffers = [dict(module._buffers) for _, module in modules]
    yield
    for (name, module), before in zip(modules, buffers, strict=True):
        for key, old in before.items():
            new = module._buffers.get(key)
            if new is not old and old is not None and new is not None:
                where = f"{name}.{key}" if name else key
                if is_aliased(old):
                    raise CaptureError(
                        f"forward assigns buffer {where!r} anew and reads it through another attribute or a list too, "
                        f"which keeps the first tensor: write it in place (self.{key}.copy_(...)), or read self.{key}"
                    )
                _write(old, new, where)
                module._buffers[key] = old


def _write(old: Tensor, new: Tensor, name: str) -> None:
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        raise CaptureError(
            f"forward makes buffer {name!r} a {new.dtype} of {tuple(new.shape)}, where it was a {old.dtype} of "
            f"{tuple(old.shape)}; keep its shape and dtype"
        )
    old.copy_(new)
