"""What a kernel allocates inside, measured, and what its rule says of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paraplan.ir.execution.rank_program import LocalValue
from paraplan.rules import op_def
from paraplan.runtime.executing.targets import resolve
from paraplan.runtime.executing.tracker import Ledger, Tracker

SLACK_BYTES = 4096


torch.set_num_threads(1)


def local(tensor: Tensor) -> LocalValue:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return LocalValue(dtype=dtype, shape=tuple(tensor.shape), strides=tuple(tensor.stride()), base="x", storage_bytes=0)


def measured(target: str, args: tuple[Any, ...]) -> tuple[int, tuple[Tensor | None, ...]]:
    """Bytes alive at the worst moment beyond inputs and results."""
    tracker, ledger = Tracker(), Ledger()
    for arg in args:
        if isinstance(arg, Tensor):
            ledger.register(arg)
    before = ledger.live_bytes
    with tracker, tracker.booking(ledger):
        result = resolve(target)(*args)
    results = result if isinstance(result, tuple | list) else (result,)
    storages = {r.untyped_storage().data_ptr(): r.untyped_storage().nbytes() for r in results if r is not None}
    return ledger.peak_bytes - before - sum(storages.values()), tuple(results)


def predicted(target: str, args: tuple[Any, ...], results: tuple[Tensor | None, ...]) -> int:
    definition = op_def(target)
    assert definition is not None
    if definition.workspace is None:
        return 0
    inputs = [local(arg) for arg in args if isinstance(arg, Tensor)]
    outputs = [None if r is None else local(r) for r in results]
    return definition.workspace(inputs, outputs, tuple("%x" if isinstance(arg, Tensor) else arg for arg in args))
