"""Inputs for hundreds of torch's ops: its own test samples (OpInfo), in sizes that two and four ranks divide.

`torch.testing._internal` holds, per op, a generator of valid inputs. Its sizes are odd so that bugs show; here they are
made even while samples are drawn, so that dims can be sharded. Of each op those samples are kept that have the
most dims to shard and few elements.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
import types
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

MAX_ELEMENTS = 20_000
MAX_DRAWN = 60
SIZES = {"XS": 2, "S": 4, "M": 8, "L": 12}
DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool)


@dataclass(frozen=True)
class OpSample:
    """One call of an op.

    Attributes:
        op: what is called.
        tensors: those among the arguments, in order, each once.
        layout: the arguments with tensors as their numbers in `tensors`.
    """

    op: Any
    tensors: tuple[Tensor, ...]
    layout: Any

    @property
    def is_unchecked(self) -> bool:
        """Whether it tells the op not to look whether its arguments fit together."""
        return bool(self.layout[1].get("unsafe"))

    def call(self, tensors: list[Tensor]) -> list[Tensor]:
        """The op's results that are tensors."""
        args, kwargs = pytree.tree_map_only(_Slot, lambda slot: tensors[slot.index], self.layout)
        return [leaf for leaf in pytree.tree_leaves(self.op(*args, **kwargs)) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class _Slot:
    index: int


def _stub_expecttest() -> None:
    """torch's test utilities import a module for golden texts, of which nothing here needs more than its name."""
    if "expecttest" not in sys.modules:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub


@cache
def op_infos() -> dict[str, Any]:
    """Every op that torch tests, by name and variant."""
    if importlib.util.find_spec("expecttest") is None:
        _stub_expecttest()
    torch_tests = importlib.import_module("torch.testing._internal.common_methods_invocations")
    found: dict[str, Any] = {}
    for info in torch_tests.op_db:
        found.setdefault(f"{info.name} {info.variant_test_name}".strip(), info)
    return found


@contextmanager
def _even_sizes() -> Iterator[None]:
    """torch's sample generators with sizes of ours."""
    before = []
    for name, module in list(sys.modules.items()):
        if name == "torch.testing._internal.common_methods_invocations" or name.startswith(
            "torch.testing._internal.opinfo"
        ):
            for size, value in SIZES.items():
                if isinstance(getattr(module, size, None), int):
                    before.append((module, size, getattr(module, size)))
                    setattr(module, size, value)
    try:
        yield
    finally:
        for module, size, value in before:
            setattr(module, size, value)


def samples(name: str, count: int) -> list[OpSample]:
    """The op's samples with the most to shard, of different ranks where there are."""
    info = op_infos()[name]
    dtype = next((dtype for dtype in DTYPES if dtype in info.supported_dtypes("cpu")), None)
    if dtype is None:
        return []
    with _even_sizes():
        found = [sample for sample in _drawn(info, dtype) if not sample.is_unchecked]
    drawn = found or _drawn(info, dtype)  # of some ops the generator's numbers belong to its own sizes
    return _different(sorted(drawn, key=_worth, reverse=True), count)


def _drawn(info: Any, dtype: torch.dtype) -> list[OpSample]:
    """The first samples that torch itself takes."""
    torch.manual_seed(0)
    random.seed(0)
    found: list[OpSample] = []
    try:
        for made in itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=False), MAX_DRAWN):
            sample = _read(info, made)
            if sample is not None and _runs(sample):
                found.append(sample)
    except Exception:  # noqa: BLE001  (a generator that insists on its sizes: what it gave so far must do)
        return found
    return found


def _runs(sample: OpSample) -> bool:
    try:
        return bool(sample.call([x.clone() for x in sample.tensors]))
    except Exception:  # noqa: BLE001  (not a call of the op as it may be)
        return False


def _different(drawn: list[OpSample], count: int) -> list[OpSample]:
    """The first samples of each signature, then more of the same."""
    firsts: dict[object, OpSample] = {}
    for sample in drawn:
        firsts.setdefault((tuple(x.dim() for x in sample.tensors), len(str(sample.layout))), sample)
    return [*firsts.values()][:count]


def _read(info: Any, made: Any) -> OpSample | None:
    tensors: list[Tensor] = []

    def slot(x: Tensor) -> _Slot:
        for index, other in enumerate(tensors):
            if other is x:
                return _Slot(index)
        tensors.append(x.detach())
        return _Slot(len(tensors) - 1)

    args = (made.input, *made.args)
    layout = pytree.tree_map_only(Tensor, slot, (args, dict(made.kwargs)))
    if not 0 < sum(x.numel() for x in tensors) <= MAX_ELEMENTS or any(x.layout != torch.strided for x in tensors):
        return None
    return OpSample(info.op, tuple(tensors), layout)


def _worth(sample: OpSample) -> float:
    dims = sum(size % 2 == 0 and size > 0 for x in sample.tensors for size in x.shape)
    return dims - sum(x.numel() for x in sample.tensors) / 4096 - 10 * any(0 in x.shape for x in sample.tensors)
