"""What a loop carries from step to step: tensors, also in tuples, and values that stay as they are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def tensors_of(values: tuple[object, ...]) -> list[Tensor]:
    """The tensors among values and what tuples of them hold, in order."""
    each = (tensors_of(value) if type(value) is tuple else [value] for value in values)
    return [value for part in each for value in part if isinstance(value, Tensor)]


def with_tensors(value: object, given: Iterator[Tensor]) -> object:
    """A value with other tensors in the places of its own."""
    if type(value) is tuple:
        return tuple(with_tensors(each, given) for each in value)
    return next(given) if isinstance(value, Tensor) else value


def are_alike(before: object, after: object) -> bool:
    """Whether a step may begin with either: tensors of one shape and dtype, or equal values."""
    if type(before) is tuple and type(after) is tuple:
        return len(before) == len(after) and all(map(are_alike, before, after))
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return before.shape == after.shape and before.dtype == after.dtype
    known = before is None or isinstance(before, (int, float, str, torch.dtype))
    return known and type(before) is type(after) and repr(before) == repr(after)  # 0.0 is not -0.0
