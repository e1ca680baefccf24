"""What a forward leaves behind in its modules, that tracing would lose without a word."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from paraplan.capture.python_state.setting_paths import static_of
from paraplan.capture.python_state.values import ABSENT
from paraplan.ir.errors import CaptureError

TORCHS = frozenset({*vars(nn.Module()), *vars(nn.Module)})
"""Attributes that are torch's: registries, hooks, the mode."""


class ModuleAttributes:
    """The attributes of a model's modules as they are when this is made, and their modes.

    Args:
        model: the fake copy that is exported.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = [(module, _attributes(module)) for module in model.modules()]

    def differences(self) -> Iterator[tuple[nn.Module, str, object, object]]:
        """Module, name, and what it held and holds now, itself; `ABSENT` for nothing."""
        for module, before in self._held:
            now = _attributes(module)
            for name in dict.fromkeys((*before, *now)):
                if before.get(name, ABSENT) is not now.get(name, ABSENT):
                    yield module, name, before.get(name, ABSENT), now.get(name, ABSENT)


def _attributes(module: nn.Module) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if name not in TORCHS or name == "training"}


def is_cached_property(owner: object, name: str) -> bool:
    """Whether an attribute is what a property has computed."""
    return isinstance(static_of(type(owner), name), functools.cached_property)


@contextmanager
def assignments_written(model: nn.Module, is_aliased: Callable[[Tensor], bool]) -> Iterator[None]:
    """Under it, a buffer that forward assigns anew (`self.mean = 0.9 * self.mean + ...`) is overwritten in place when
    it ends, which is what a trace records. (Other attributes are looked after in `reads`.)

    Args:
        model: the model.
        is_aliased: whether forward has read a buffer from another attribute too, which keeps the first tensor.
    Raises:
        CaptureError: what is assigned has another shape or dtype than the buffer, or that is aliased; or forward
            registers a parameter, buffer or module.
    """
    modules = list(model.named_modules())
    buffers = [dict(module._buffers) for _, module in modules]
    registered = [_registered(module) for _, module in modules]
    yield
    for (name, module), known in zip(modules, registered, strict=True):
        for kind, key in (each for each in _registered(module) if each not in known):
            where = f"{name}.{key}" if name else key
            raise CaptureError(
                f"forward makes the {kind} {where!r} itself on its first run, and a captured step has those alone that "
                "are there before: run forward once on such a batch, then capture"
            )
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


def _registered(module: nn.Module) -> dict[tuple[str, str], None]:
    """(kind, name) of what a module has registered and is not None."""
    kinds = {"parameter": module._parameters, "buffer": module._buffers, "module": module._modules}
    return {(kind, key): None for kind, held in kinds.items() for key, value in held.items() if value is not None}


def _write(old: Tensor, new: Tensor, name: str) -> None:
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        raise CaptureError(
            f"forward makes buffer {name!r} a {new.dtype} of {tuple(new.shape)}, where it was a {old.dtype} of "
            f"{tuple(old.shape)}; keep its shape and dtype, or, where it grows with the batch (a cache of positions), "
            "run forward once on such a batch before"
        )
    old.copy_(new)
