"""Batches for `paraplan run`: the same on every rank and for every number of ranks, a function of (seed, step)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paraplan.ir.errors import ParaplanError
from paraplan.ir.model.program import BatchInput, given_inputs
from paraplan.ir.plan import Plan
from paraplan.jobs.inputs import classes, vocabulary
from paraplan.jobs.models import Made

Batch = dict[str, Tensor]
_MOST_BYTES = 1 << 28


class DataError(ParaplanError):
    """Training data cannot be read, or does not fit the model."""


class RandomBatches:
    """Random tokens (labels are the tokens), ones for masks, normal numbers for float inputs.

    Args:
        plan: says names, shapes and dtypes.
        made: the model; its vocabulary bounds token numbers, its maker's example inputs those of other models, each
            column's (position beside the batch dim) by itself: columns may index tables of different sizes.
        seed: of the run.
    """

    def __init__(self, plan: Plan, made: Made, seed: int) -> None:
        self.inputs, self.seed = given_inputs(plan.program), seed
        config = getattr(made.model, "config", None)
        self.vocab = classes(config) if "input_ids" not in self.inputs else vocabulary(config)
        self.examples: Mapping[str, Any] = _named(plan, made.example_inputs)

    def __call__(self, step: int) -> Batch:
        """The global batch of a step."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        found: Batch = {}
        for name, entry in self.inputs.items():
            tokens = found.get("input_ids")
            same = name == "labels" and tokens is not None and tokens.shape == entry.spec.shape
            found[name] = tokens.clone() if same and tokens is not None else self._draw(name, entry, generator)
        return found

    def _draw(self, name: str, entry: BatchInput, generator: torch.Generator) -> Tensor:
        shape, dtype = entry.spec.shape, getattr(torch, entry.spec.dtype)
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        if "mask" in name or dtype is torch.bool:
            return torch.ones(shape, dtype=dtype)
        low, high = self._range(name, entry)
        if not low.dim():
            return torch.randint(int(low), int(high) + 1, shape, generator=generator).to(dtype)
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low + 1)
        return (low + drawn.long()).to(dtype)

    def _range(self, name: str, entry: BatchInput) -> tuple[Tensor, Tensor]:
        """The least and the largest integer of each column of an input; they broadcast to its shape."""
        none, example = torch.zeros((), dtype=torch.int64), self.examples.get(name)
        if name == "token_type_ids":
            return none, none
        if not isinstance(example, Tensor) or example.is_meta or not example.numel():
            return none, torch.tensor(int(self.vocab) - 1 if self.vocab else 1)
        values, dim = example.detach().cpu().long(), entry.batch_dim
        if dim is None and values.shape == entry.spec.shape:
            return values, values
        by_column = dim is not None and _columns(values.shape, dim) == _columns(entry.spec.shape, dim)
        low = values.amin(dim, keepdim=True) if by_column else values.min()
        high = values.amax(dim, keepdim=True) if by_column else values.max()
        return torch.where((low < 0) & (high >= 0), 0, low), high  # negative labels beside others are ignored ones


class TextBatches:
    """Bytes of text as tokens: windows drawn anywhere in it.

    Args:
        plan: must read tokens, "input_ids" [batch, seq].
        made: its vocabulary must hold a byte.
        path: a file, or a directory whose files are joined in order of their names.
        seed: of the run.
    Raises:
        DataError: unreadable, too short, or not for this model.
    """

    def __init__(self, plan: Plan, made: Made, path: str, seed: int) -> None:
        self.seed, self.inputs = seed, given_inputs(plan.program)
        vocab = getattr(getattr(made.model, "config", None), "vocab_size", None)
        if "input_ids" not in self.inputs or len(self.inputs["input_ids"].spec.shape) != 2:
            raise DataError(
                f"--data is for models that read input_ids [batch, seq]; "
                f"{plan.model.display} reads {', '.join(self.inputs)}"
            )
        if vocab is not None and vocab < 256:
            raise DataError(
                f"--data is read byte by byte, which needs a vocabulary of 256; "
                f"the model has {vocab} (--set vocab_size=256)"
            )
        self.shape = self.inputs["input_ids"].spec.shape
        text = read_text(path)
        if len(text) < self.shape[1] + 1:
            raise DataError(f"--data {path}: {len(text)} bytes, less than one sequence of {self.shape[1]}")
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __call__(self, step: int) -> Batch:
        """The global batch of a step."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        rows, length = self.shape
        starts = torch.randint(0, len(self.text) - length + 1, (rows,), generator=generator)
        tokens = torch.stack([self.text[start : start + length] for start in starts.tolist()]).long()
        found = {}
        for name, entry in self.inputs.items():
            dtype = getattr(torch, entry.spec.dtype)
            found[name] = (
                tokens.clone() if name in ("input_ids", "labels") else torch.ones(entry.spec.shape, dtype=dtype)
            )
        return found


def read_text(path: str) -> bytes:
    """A file's bytes, or those of all text files under a directory.

    Raises:
        DataError: nothing there, or not readable.
    """
    place = Path(path)
    if not place.exists():
        raise DataError(f"--data {path}: no such file or directory")
    files = [place] if place.is_file() else sorted(file for file in place.rglob("*") if file.is_file())
    parts, total = [], 0
    for file in files:
        try:
            data = file.read_bytes()
        except OSError as fault:
            raise DataError(f"--data {file}: {fault.strerror}") from None
        if place.is_dir() and b"\0" in data[:4096]:
            continue
        parts.append(data)
        total += len(data)
        if total > _MOST_BYTES:
            break
    return b"\n".join(parts)[:_MOST_BYTES]


def _named(plan: Plan, examples: object) -> Mapping[str, Any]:
    if isinstance(examples, dict):
        return examples
    if isinstance(examples, tuple):
        return dict(zip(given_inputs(plan.program), [x for x in examples if isinstance(x, Tensor)], strict=False))
    return {}


def _columns(shape: tuple[int, ...], batch_dim: int) -> tuple[int, ...]:
    return (*shape[:batch_dim], *shape[batch_dim + 1 :])
