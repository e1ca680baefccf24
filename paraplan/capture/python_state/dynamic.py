"""Attributes of a model that are declared dynamic: inputs of its program, read from the model before every step.

A float, integer or bool becomes a 0-dim tensor while forward is traced (and so in the program), a tensor stays one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paraplan.ir.errors import CaptureError, PlanMismatchError
from paraplan.ir.model.program import Program
from paraplan.ir.model.tensor import TensorSpec

_DTYPES: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float32}
_ABSENT = object()


class Attribute(NamedTuple):
    """A declared attribute.

    Attributes:
        path: from the model, "encoder.tau".
        name: of the batch's input.
        value: a tensor like it.
    """

    path: str
    name: str
    value: Tensor


def input_name(path: str) -> str:
    """What a batch calls an attribute."""
    return f"self.{path}"


def find_owner(model: nn.Module, path: str) -> tuple[Any, str]:
    """The object that holds an attribute, and its name there.

    Raises:
        AttributeError: there is no such object.
    """
    *outer, name = path.split(".")
    return functools.reduce(getattr, outer, model), name


def as_tensor(value: object) -> Tensor | None:
    """A number or a tensor as the tensor a program takes; None where it is neither."""
    if isinstance(value, Tensor):
        return value.detach()
    dtype = _DTYPES.get(type(value))
    return None if dtype is None else torch.tensor(value, dtype=dtype, device="cpu")


def find_attributes(model: nn.Module, paths: Iterable[str]) -> tuple[Attribute, ...]:
    """The declared attributes of a model.

    Raises:
        CaptureError: one does not exist, is a parameter or buffer, or is neither number nor tensor.
    """
    found = []
    for path in dict.fromkeys(paths):
        try:
            owner, name = find_owner(model, path)
        except AttributeError:
            owner, name = None, path
        if owner is None or not hasattr(owner, name):
            raise CaptureError(
                f"dynamic names {path!r}, and {type(model).__name__} has no such attribute; give the path from the "
                'model, e.g. "tau" for self.tau or "encoder.tau" for self.encoder.tau'
            )
        if isinstance(owner, nn.Module) and (name in owner._parameters or name in owner._buffers):
            raise CaptureError(f"dynamic names {path!r}, a parameter or buffer, which is an input of every step anyway")
        value = as_tensor(getattr(owner, name))
        if value is None:
            raise CaptureError(
                f"dynamic names {path!r}, which is a {type(getattr(owner, name)).__name__}: only floats, integers, "
                "bools and tensors can be inputs of a step; plan one bucket per value of it (Buckets.compile)"
            )
        found.append(Attribute(path, input_name(path), value))
    return tuple(found)


@contextmanager
def attributes_set(models: Iterable[nn.Module], values: Mapping[str, object]) -> Iterator[None]:
    """Under it, attributes by path have other values; those that forward writes anew are refused.

    Raises:
        CaptureError: forward writes one.
    """
    places = [(path, owner, name) for model in models for path in values for owner, name in (find_owner(model, path),)]
    before = [vars(owner).get(name, _ABSENT) for _, owner, name in places]
    for path, owner, name in places:
        vars(owner)[name] = values[path]
    try:
        yield
        for path, owner, name in places:
            if vars(owner).get(name, _ABSENT) is not values[path]:
                raise CaptureError(
                    f"forward writes self.{path}, which is declared dynamic: a step reads it and cannot write it back; "
                    "write it in the training loop, or make it a buffer (register_buffer)"
                )
    finally:
        for (_, owner, name), value in zip(places, before, strict=True):
            if value is _ABSENT:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = value


def with_attributes(program: Program, model: nn.Module | None, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A batch with the model's declared attributes as they are now.

    Args:
        program: says which of its inputs are attributes.
        model: whose attributes they are; None where it is gone.
        batch: tensors by name. Where nothing is declared, or it is no mapping, it is returned as it is.
    Raises:
        PlanMismatchError: the model is gone, or an attribute is no longer what was captured.
    """
    paths = {name: entry for name, entry in program.batch.items() if entry.attribute}
    if not paths or not isinstance(batch, Mapping):
        return batch
    return {**batch, **{name: attribute_now(model, entry.attribute, entry.spec) for name, entry in paths.items()}}


def attribute_now(model: nn.Module | None, path: str, spec: TensorSpec) -> Tensor:
    """A declared attribute's value, in the dtype of the program's input.

    Args:
        model: None where it is gone.
        path: from the model, "encoder.tau".
        spec: of the program's input.
    Raises:
        PlanMismatchError: it is not there, or of another kind or shape.
    """
    try:
        owner, name = find_owner(model, path) if model is not None else (None, path)
        value = None if owner is None else getattr(owner, name, None)
    except AttributeError:
        value = None
    found = as_tensor(value)
    wanted: torch.dtype = getattr(torch, spec.dtype)
    if found is None or tuple(found.shape) != spec.shape or not torch.can_cast(found.dtype, wanted):
        what = f"{type(value).__name__} {value!r}" if not isinstance(value, Tensor) else f"tensor {tuple(value.shape)}"
        raise PlanMismatchError(
            f"self.{path} is an input of the step ({spec}) and is {what} now; set it to such a value, or plan again"
        )
    if wanted.is_floating_point and not isinstance(value, Tensor):
        return torch.tensor(float(value), dtype=wanted)  # type: ignore[arg-type]
    return found.to(wanted)
