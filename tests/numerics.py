"""The numerics contract's measure, as tests use it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from paraplan.jobs.checking.check import max_error


def relative_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor | None]) -> float:
    """The worst of all tensors that exist; see `max_error`."""
    return max_error(found, {name: value for name, value in expected.items() if value is not None})[0]
