"""The shape of what a model returns, so that it can be given back around other tensors.

The model runs once on fake tensors (no memory, no arithmetic); what it returns is kept as a template whose tensors are
named by their path, as `outputs.named_tensors` names them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from paraplan.capture.cutting.outputs import LossChoice, loss_name, named_tensors
from paraplan.capture.explained import explain
from paraplan.capture.exporting.fake import arguments, as_computed, fake_batch, fake_copy, name_inputs
from paraplan.capture.exporting.hf import eager_masks
from paraplan.capture.exporting.quiet import quiet_torch
from paraplan.capture.exporting.user_functions import generators_kept
from paraplan.capture.following.followed import Followed
from paraplan.capture.following.patched import followed_modules
from paraplan.capture.python_state.outside.snapshot import outside_kept
from paraplan.ir.errors import ParaplanError
from paraplan.kernels.torch_private import fake_mode


@dataclass(frozen=True)
class Returned:
    """From the loss to what a model returns around it; other tensors in that become None.

    Attributes:
        template: what the model returns, each tensor a `_Slot`; None: the loss is returned alone.
        name: of the slot the loss goes to.
        for_loss: whether a loss function makes the loss, and takes inputs that the model does not.
        shape: of the loss, of one element.
    """

    template: Any = None
    name: str = ""
    for_loss: bool = False
    shape: tuple[int, ...] = ()

    def __call__(self, loss: Tensor) -> Any:
        """What is returned."""
        loss = loss.reshape(self.shape) if self.shape else loss
        return loss if self.template is None else _filled(self.template, {self.name: loss})


@quiet_torch()
def returned_by(
    model: nn.Module, example_inputs: dict[str, Tensor] | tuple[object, ...], precision: str, loss: LossChoice = None
) -> Returned:
    """What stands around the loss in what the model returns; nothing where several scalars make the loss.

    Args:
        model: is not modified.
        example_inputs: of forward: by name, or in order.
        precision: as capture takes it ("fp32", "bf16", ...).
        loss: which of the returned tensors is the loss; None for the one that capture would take.
    Raises:
        CaptureError: the model fails on inputs like these; names the user's line.
    """
    tensors, others = name_inputs(model, example_inputs)
    mode = fake_mode()
    copied, batch = fake_copy(model, precision, mode), fake_batch(tensors, precision, mode)
    try:
        with mode, eager_masks(batch), followed_modules(Followed()), outside_kept(model), generators_kept():
            args, kwargs = arguments(
                copied, as_computed(batch, precision), others, not isinstance(example_inputs, dict)
            )
            output = copied(*args, **kwargs)
    except ParaplanError:
        raise
    except Exception as fault:
        raise explain(fault, precision) from fault
    name: str | None
    if loss is None:
        name = loss_name(output)
    else:
        name = _only(loss, {name for name, _ in named_tensors(output)})
    if name is None:
        return Returned()
    found = dict(named_tensors(output)).get(name, getattr(output, name, None))
    return Returned(_template(output, ""), name, shape=() if found is None else tuple(found.shape))


def _only(loss: str | Any, names: set[str]) -> str | None:
    """The one tensor that is the loss as it is; None where the loss is made of several, or weighted."""
    if isinstance(loss, str):
        return loss if loss in names or loss != "sum" else None
    weights = loss if isinstance(loss, Mapping) else dict.fromkeys(loss, 1.0)
    return next(iter(weights)) if list(weights.values()) == [1.0] else None


@dataclass(frozen=True)
class _Slot:
    """Where a tensor goes."""

    name: str


@dataclass(frozen=True)
class _Container:
    """A mapping, sequence or dataclass that holds tensors somewhere, or an object with tensors for attributes."""

    made: type
    keys: tuple[Any, ...]
    parts: tuple[Any, ...]


def _template(value: Any, path: str) -> Any:
    if isinstance(value, Tensor):
        return _Slot(path or "output")
    found = [(key, _template(part, f"{path}.{key}" if path else str(key))) for key, part in _parts(value)]
    if not found:
        found = _attributes(value, path)
    return _Container(type(value), tuple(k for k, _ in found), tuple(p for _, p in found)) if found else value


def _attributes(value: Any, path: str) -> list[tuple[str, Any]]:
    """The attributes of an object that has tensors among them, those as slots; none of any other value."""
    held = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    if not any(isinstance(each, Tensor) for each in held.values()):
        return []
    before = f"{path}." if path else ""
    return [(name, _Slot(before + name) if isinstance(each, Tensor) else each) for name, each in held.items()]


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (tuple, list)):
        yield from zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name)) for field in fields(value))


def _filled(template: Any, found: Mapping[str, Tensor]) -> Any:
    if isinstance(template, _Slot):
        return found.get(template.name)
    if not isinstance(template, _Container):
        return template
    made, parts = template.made, [_filled(part, found) for part in template.parts]
    named = dict(zip(template.keys, parts, strict=True))
    if is_dataclass(made) or hasattr(made, "_fields"):
        return made(**named)
    if issubclass(made, Mapping):
        return OrderedDict(named) if issubclass(made, OrderedDict) else named
    if issubclass(made, (tuple, list)):
        return made(parts)
    value = made.__new__(made)
    value.__dict__.update(named)
    return value
