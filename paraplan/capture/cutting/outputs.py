"""What a model returns: the losses to train on, and everything else as named tensors.

Names are paths: "logits", "hidden_states.2" (an entry of a tuple), "output" for a bare tensor. Outputs beside the
loss are auxiliary: detached, computed only by an evaluation (`lowering.evaluation`), never by a training step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import NamedTuple

from torch import Tensor

from paraplan.ir.errors import CaptureError
from paraplan.kernels.dtypes import dtype_name

LossChoice = str | Sequence[str] | Mapping[str, float] | None
"""None: the tensor returned, the entry "loss", or the only scalar. A name, names, or weights by name: their weighted
sum. "sum": the sum of every scalar float returned."""


class Chosen(NamedTuple):
    """A loss that is trained on: where it was found, the name of its metric ("" where there is but one), its weight
    and its value."""

    source: str
    name: str
    weight: float
    value: Tensor


def named_tensors(output: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in mappings, sequences and dataclasses, and in attributes of an object of another class that is all
    the output, by path; whatever else is in them is left out."""
    if isinstance(output, Tensor):
        yield path or "output", output
        return
    if isinstance(output, Mapping):
        entries: Iterator[tuple[object, object]] = iter(output.items())
    elif isinstance(output, (tuple, list)):
        names = getattr(output, "_fields", range(len(output)))
        entries = zip(names, output, strict=True)
    elif is_dataclass(output):
        entries = ((field.name, getattr(output, field.name)) for field in fields(output))
    elif not path and hasattr(output, "__dict__"):
        entries = iter(vars(output).items())
    else:
        return
    for key, value in entries:
        yield from named_tensors(value, f"{path}.{key}" if path else str(key))


def choose_losses(output: object, choice: LossChoice, from_loss_fn: bool) -> list[Chosen]:
    """The losses to train on.

    Args:
        output: of the model, or of the loss function.
        choice: see `LossChoice`.
        from_loss_fn: whose output it is, for messages.
    Raises:
        CaptureError: what is chosen is not there or no scalar float.
    """
    whose = "loss_fn" if from_loss_fn else "the model"
    if choice is None:
        source = loss_name(output)
        named = dict(named_tensors(output))
        return [Chosen(source, "", 1.0, _scalar(named.get(source, getattr(output, source, None)), whose))]
    found = dict(named_tensors(output))
    scalars = [name for name, x in found.items() if x.numel() == 1 and x.is_floating_point()]
    if isinstance(choice, str) and not (choice == "sum" and "sum" not in found):
        choice = (choice,)
    weights = dict.fromkeys(scalars, 1.0) if choice == "sum" else choice
    if not isinstance(weights, Mapping):
        weights = dict.fromkeys(weights, 1.0)
    missing = [name for name in weights if name not in found]
    if missing or not weights:
        raise CaptureError(
            f"loss={choice!r}: {whose} returns no {', '.join(missing) or 'scalar'}; its scalars are "
            f"{', '.join(scalars) or 'none'}"
        )
    if not all(weights.values()):
        raise CaptureError(f"loss={choice!r}: a loss of weight 0 does not train; leave it out")
    single = len(weights) == 1
    return [
        Chosen(name, "" if single else name, float(weight), _scalar(found[name], whose))
        for name, weight in weights.items()
    ]


def loss_name(output: object) -> str:
    """The name of the loss in what a model returned, where none is chosen: a bare tensor, "loss", or the only scalar.

    Raises:
        CaptureError: there is none, or there are several scalars.
    """
    if isinstance(output, Tensor):
        return "output"
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return "loss"
    scalars = [name for name, x in named_tensors(output) if x.numel() == 1 and x.is_floating_point()]
    if len(scalars) == 1:
        return scalars[0]
    several = f"; it has the scalars {', '.join(scalars)}: choose with loss={scalars} or loss='sum'"
    raise CaptureError(
        f"no loss: the model returned {type(output).__name__} without one; pass labels among example_inputs, "
        f"or loss_fn=lambda outputs, batch: ...{several if scalars else ''}"
    )


def _scalar(found: object, whose: str) -> Tensor:
    assert isinstance(found, Tensor)
    if found.numel() != 1 or not found.is_floating_point():
        raise CaptureError(
            f"no loss: {whose} returned a {dtype_name(found.dtype)} tensor of shape "
            f"{tuple(found.shape)}, not a scalar float; reduce it, or pass loss_fn=lambda outputs, batch: ..."
        )
    return found.reshape(())
