"""The shape of what a model returns, so that it can be given back around other tensors.

The model runs once on fake tensors (no memory, no arithmetic); what it returns is kept as a template whose tensors are
named by their path, as `outputs.named_tensors` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from paraplan.ir.errors import CaptureError
from paraplan.ir.trace.fake import fake_batch, fake_copy, name_inputs
from paraplan.ir.trace.torch_private import fake_mode


def returned_by(
    model: nn.Module, example_inputs: dict[str, Tensor] | tuple[object, ...], precision: str
) -> Callable[[Tensor], Any]:
    """From the loss to what the model returns around it; other tensors in that become None.

    Raises:
        CaptureError: the model fails on inputs like these.
    """
    tensors, others = name_inputs(model, example_inputs)
    mode = fake_mode()
    copied, batch = fake_copy(model, precision, mode), fake_batch(tensors, precision, mode)
    try:
        with mode:
            positional = not isinstance(example_inputs, dict)
            output = copied(*batch.values(), **others) if positional else copied(**batch, **others)
    except Exception as fault:
        raise CaptureError(f"{type(model).__name__} fails on inputs of these shapes: {fault}") from fault
    name = "output" if isinstance(output, Tensor) else "loss"
    template = _template(output, "")
    return lambda loss: _filled(template, {name: loss})


class _Slot:
    """Where a tensor goes."""

    def __init__(self, name: str) -> None:
        self.name = name


def _template(value: Any, path: str) -> Any:
    if isinstance(value, Tensor):
        return _Slot(path or "output")
    inner = {name: _template(part, f"{path}.{name}" if path else name) for name, part in _parts(value)}
    return (value, inner) if inner else value


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(str(key), part) for key, part in value.items()]
    if isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", range(len(value)))
        return [(str(name), part) for name, part in zip(names, value, strict=True)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return []


def _filled(template: Any, found: Mapping[str, Tensor]) -> Any:
    if isinstance(template, _Slot):
        return found.get(template.name)
    if not (isinstance(template, tuple) and len(template) == 2 and isinstance(template[1], dict)):
        return template
    like, inner = template
    parts = {name: _filled(part, found) for name, part in inner.items()}
    if isinstance(like, Mapping) or is_dataclass(like):
        return type(like)(**parts) if is_dataclass(like) else type(like)(parts)
    return type(like)(**parts) if hasattr(like, "_fields") else type(like)(parts.values())
