"""How far two sets of tensors are apart, by docs/design/numerics.md: max|a − b| / max(max|b|, floor · peers').

Floor and peers: no tensor counts as smaller than some share of the largest of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from paraplan.kernels.dtypes import dtype_name

Tensors = Mapping[str, Tensor | None]
FLOOR, NARROW_FLOOR = 1e-5, 1e-3
"""A tensor counts as at least this much of its largest peer: in float64, and in what is narrower. A gradient that
cancels to nothing is rounding noise of its terms, in float64 some tens of units of the last place of its peers."""


def floor_of(precision: str) -> float:
    """The floor of a precision."""
    return FLOOR if precision == "fp64" else NARROW_FLOOR


class Difference(NamedTuple):
    """Where a tensor differs most.

    Attributes:
        name: of the tensor.
        error: by the measure; infinite where one is missing, NaN, of another shape or dtype, or differs and is exact.
        found, wanted: both values there, or what is there, in words.
        at: the element, in words.
    """

    name: str
    error: float
    found: str
    wanted: str
    at: str = ""


def max_error(found: Tensors, wanted: Tensors) -> tuple[float, str]:
    """The largest error of any tensor, and its name; NaN counts as infinitely wrong, but where both are.

    Args:
        found, wanted: tensors by name.
    """
    all_ = differences({name: found.get(name) for name in wanted}, wanted).values()
    worst = max(all_, key=lambda each: each.error, default=None)
    return (0.0, "") if worst is None or worst.error == 0 else (worst.error, worst.name)


def relative(found: float, wanted: float) -> float:
    """|a − b| / |b|; infinite where one is no number."""
    if found == wanted or (found != found and wanted != wanted):
        return 0.0
    error = abs(found - wanted) / max(abs(wanted), 1e-300)
    return error if error == error else float("inf")


def differences(found: Tensors, wanted: Tensors, floor: float = FLOOR, dtypes: bool = False) -> dict[str, Difference]:
    """The difference of every tensor that either has; None is as good as zeros.

    Args:
        found, wanted: tensors by name.
        floor: see the module's head.
        dtypes: whether dtypes must be the same.
    """
    tops = {name: _top(x) for name, x in wanted.items() if x is not None}
    least = floor * max(tops.values(), default=0.0)
    names = dict.fromkeys((*wanted, *found))
    return {
        name: _difference(name, found.get(name), wanted.get(name), max(tops.get(name, 0.0), least), dtypes)
        for name in names
    }


def _top(x: Tensor) -> float:
    """The largest finite size of an element."""
    if not x.numel() or not (x.is_floating_point() or x.is_complex()):
        return 0.0
    sizes = _dense(x).abs()
    return float(torch.where(sizes.isfinite(), sizes, torch.zeros_like(sizes)).max())


def _difference(name: str, found: Tensor | None, wanted: Tensor | None, scale: float, dtypes: bool) -> Difference:
    if found is None or wanted is None:
        there = found if wanted is None else wanted
        if there is None or not bool((_dense(there) != 0).any()):
            return Difference(name, 0.0, "", "")
        said = f"{float(_dense(there).abs().max()):.6g} at most"
        return Difference(name, float("inf"), *((said, "none") if wanted is None else ("none", said)))
    if found.shape != wanted.shape or (dtypes and found.dtype != wanted.dtype):
        return Difference(name, float("inf"), _kind(found), _kind(wanted))
    if not wanted.numel():
        return Difference(name, 0.0, "", "")
    exact = not (wanted.is_floating_point() or wanted.is_complex())
    wide = torch.complex128 if found.is_complex() or wanted.is_complex() else torch.float64
    a, b = (_dense(x).cpu().to(wide) for x in (found, wanted))
    apart = ~((a == b) | (a.isnan() & b.isnan()))
    off = torch.where(apart, (a - b).abs(), torch.zeros((), dtype=torch.float64))
    off = torch.where(off.isnan(), torch.full_like(off, float("inf")), off)
    place = int(off.argmax())
    largest = float(off.flatten()[place])
    error = 0.0 if largest == 0 else float("inf") if exact or not scale else largest / scale
    at = [int(i) for i in torch.unravel_index(torch.tensor(place), wanted.shape)] if wanted.dim() else []
    return Difference(name, error, *(_said(x.flatten()[place].item()) for x in (a, b)), f"at {at}" if at else "")


def _dense(x: Tensor) -> Tensor:
    x = x.detach()
    return x.to_dense() if x.is_sparse else x


def _kind(x: Tensor) -> str:
    return f"a {dtype_name(x.dtype)} of {tuple(x.shape)}"


def _said(value: complex) -> str:
    return f"{value:.9g}"
