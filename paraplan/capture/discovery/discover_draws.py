"""Random values for ops that are tried out, and whether what an op makes of them is evidence.

Shards that give the whole result back show something only where the result could have been another: a gradient that is
zero on every draw adds up, concatenates and is linear in anything. So every result must change between draws, and
with every input that it reads. An input that changes nothing is either not read (NaN in its place changes nothing
either) or was never given values that matter: then nothing is known of its dims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paraplan.ir.model.tensor import TensorSpec

STYLES = ("normal", "positive", "unit", "sparse", "definite", "special")
"""Floats: any; 0.5 to 1.5; 0.1 to 0.9; half of them zero; positive definite matrices; NaN and infinities, for ops that
test for these."""

Outputs = tuple[Tensor | None, ...]
Run = Callable[[Sequence[Tensor]], Outputs | None]


@dataclass(frozen=True)
class Draw:
    """Values, and what the whole op makes of them."""

    tensors: tuple[Tensor, ...]
    whole: Outputs


def draw(spec: TensorSpec, shape: tuple[int, ...], style: str, high: int, generator: torch.Generator) -> Tensor:
    """A random tensor: floats by style, integers below a bound.

    Args:
        spec: whose dtype it has.
        shape: of it.
        style: of floats, such as "positive" or "sparse".
        high: integers are below it.
        generator: draws.
    """
    dtype = getattr(torch, spec.dtype)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not dtype.is_floating_point and not dtype.is_complex:
        low = 1 if style in ("positive", "unit") else 0
        return torch.randint(low, max(high, low + 1), shape, generator=generator).to(dtype)
    if style in ("positive", "unit"):
        low, span = (0.5, 1.0) if style == "positive" else (0.1, 0.8)
        return (low + span * torch.rand(shape, generator=generator, dtype=torch.float64)).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    made = torch.randn(shape, generator=generator, dtype=wide)
    if style == "definite" and len(shape) > 1 and shape[-1] == shape[-2]:
        made = made @ made.mH + torch.eye(shape[-1], dtype=wide)
    if style in ("sparse", "special"):
        which = torch.rand(shape, generator=generator)
        made[which < 0.5] = 0.0
        if style == "special":
            for bound, value in ((0.3, float("nan")), (0.2, float("inf")), (0.1, float("-inf"))):
                made[which < bound] = value
    return made.to(dtype)


def close(found: Tensor, wanted: Tensor) -> bool:
    """Equal up to the dtype's rounding; infinities and NaN must match, integers be equal."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if not wanted.is_floating_point() and not wanted.is_complex():
        return torch.equal(found, wanted)
    if wanted.numel() == 0:
        return True
    finite = torch.isfinite(wanted)
    if not torch.equal(finite, torch.isfinite(found)):
        return False
    if not bool(finite.all()) and not torch.allclose(found[~finite], wanted[~finite], equal_nan=True):
        return False
    relative = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
    a, b = found[finite], wanted[finite]
    if not b.numel():
        return True
    return float((a - b).abs().max()) <= relative.get(wanted.dtype, 3e-2) * max(float(b.abs().max()), 1e-30)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, NaN included."""
    if a.is_complex():
        return same(torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj()))
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


def told_by_nothing(draws: Sequence[Draw], unread: frozenset[int]) -> str:
    """Which result is no evidence, being the same on all draws; "" where every one that is read is evidence."""
    for index, first in enumerate(draws[0].whole):
        others = [draw.whole[index] for draw in draws[1:]]
        if first is None or not first.numel() or index in unread:
            continue
        if all(other is not None and same(first, other) for other in others):
            return f"result {index} is the same on all values tried, so that running it shows nothing"
    return ""


def idle_values(
    draws: Sequence[Draw], fresh: Iterator[Sequence[Tensor]], run: Run, unread: frozenset[int]
) -> frozenset[int]:
    """The values of which it is not known what they do: those that no draw shows to change a result they may be
    read for.

    Args:
        draws: the last is changed one value at a time.
        fresh: more values.
        run: the op; None where it refuses.
        unread: results that nobody reads.
    """
    base = draws[-1]
    others = [draws[-2].tensors, next(fresh), next(fresh)]
    found = set()
    for value, x in enumerate(base.tensors):
        unmoved = {index for index, out in enumerate(base.whole) if out is not None and out.numel()} - unread
        num_outputs = len(unmoved)
        for other in others:
            unmoved -= _moved(base, value, other[value], run)
        if not unmoved or not x.numel():
            continue
        if x.is_floating_point() or x.is_complex():
            poison = torch.full_like(x, float("nan"))
            read = _moved(base, value, poison, run) & unmoved
        else:
            read = unmoved if len(unmoved) == num_outputs else set()
        if read:
            found.add(value)
    return frozenset(found)


def _moved(base: Draw, value: int, other: Tensor, run: Run) -> set[int]:
    """The results that another tensor in one place changes; all of them where the op refuses it."""
    outs = run([other if index == value else x for index, x in enumerate(base.tensors)])
    if outs is None:
        return set(range(len(base.whole))) if bool(torch.isnan(other).any()) else set()
    return {
        index
        for index, (a, b) in enumerate(zip(base.whole, outs, strict=True))
        if a is not None and not (b is not None and a.shape == b.shape and same(a, b))
    }


def nudged(base: Draw, seed: int) -> Iterator[tuple[Tensor, ...]]:
    """The draw's values with a few elements of one of them, and of all, made large, negative or zero."""
    generator = torch.Generator().manual_seed(seed)
    floats = [value for value, x in enumerate(base.tensors) if x.is_floating_point() and x.numel()]
    for chosen in [*([value] for value in floats), *([floats] if len(floats) > 1 else [])]:
        tensors = list(base.tensors)
        for value in chosen:
            flat = tensors[value].clone(memory_format=torch.contiguous_format).view(-1)
            at = torch.randint(0, flat.numel(), (3,), generator=generator)
            flat[at] = flat[at] * torch.tensor([40.0, -3.0, 0.0], dtype=flat.dtype, device=flat.device)
            tensors[value] = flat.view(base.tensors[value].shape)
        yield tuple(tensors)
