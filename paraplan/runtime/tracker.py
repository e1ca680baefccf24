"""Live bytes of a rank while it runs: every storage that is made, until it is given back.

A dispatch mode sees the result of every op, those inside Python kernels included (ours are plain functions, whose
inner ops pass through it; a user's custom op is called so that its inner ops do), and registers the storages it
has not met; a weak reference tells when each dies. Bytes are logical (`storage.nbytes()`), on any device, so they
compare with a prediction.
One process may run several ranks: the mode books what is made to the `Ledger` that is current.

Limits: what a C++ kernel allocates and drops inside is unseen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from paraplan.ir.trace.torch_private import COMPILED, OpOverload, call_within, is_composite
from paraplan.runtime.torch_private import TorchDispatchMode, storage_key, storage_of, tree_leaves


class Ledger:
    """Storages of one rank that are alive.

    Attributes:
        live_bytes: of all of them.
        peak_bytes: the most `live_bytes` has been since `reset_peak`.
        window_bytes: the most it has been since `open_window` (an instruction's).
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self.window_bytes = 0
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def register(self, tensor: Tensor) -> None:
        """Book a tensor's storage, unless it is booked already."""
        storage = storage_of(tensor)
        key = storage_key(storage)
        if key in self._alive:
            return
        nbytes = storage.nbytes()
        self._alive[key] = (nbytes, weakref.ref(storage, partial(self._died, key)))
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.window_bytes = max(self.window_bytes, self.live_bytes)

    def register_all(self, result: Any) -> None:
        """Book every tensor of an op's result."""
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.register(leaf)

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage is booked."""
        return storage_key(storage_of(tensor)) in self._alive

    def _died(self, key: int, _: object) -> None:
        self.live_bytes -= self._alive.pop(key)[0]

    def open_window(self) -> int:
        """Start measuring an instruction; returns the bytes alive."""
        self.window_bytes = self.live_bytes
        return self.live_bytes

    def reset_peak(self) -> None:
        """Start measuring the peak anew."""
        self.peak_bytes = self.live_bytes


@cache
def _has_inside(func: Any) -> bool:
    """Whether an op's kernel may be Python, whose own ops count too."""
    return getattr(func, "namespace", "") not in COMPILED


@cache
def is_kernel(func: Any) -> bool:
    """Whether a call is one kernel of torch's own: the mode would see its results and nothing else."""
    return isinstance(func, OpOverload) and func.namespace in COMPILED and not is_composite(func)


class Tracker(TorchDispatchMode):
    """The dispatch mode; `current` is the ledger of the rank that is running, None while nothing is booked."""

    def __init__(self) -> None:
        super().__init__()
        self.current: Ledger | None = None
        self._entered = 0

    @property
    def is_entered(self) -> bool:
        """Whether an account is being kept."""
        return self._entered > 0

    def __enter__(self) -> Tracker:
        self._entered += 1
        super().__enter__()
        return self

    def __exit__(self, *fault: Any) -> None:
        self._entered -= 1
        super().__exit__(*fault)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = _has_inside(func)
        result = call_within(self, func, args, kwargs or {}) if inside else func(*args, **(kwargs or {}))
        if self.current is not None:
            self.current.register_all(result)
        return result

    @contextmanager
    def booking(self, ledger: Ledger | None) -> Iterator[None]:
        """Book what is made inside to `ledger` (None: to nobody)."""
        before, self.current = self.current, ledger
        try:
            yield
        finally:
            self.current = before


def register_all(ledger: Ledger, tensors: dict[str, torch.Tensor]) -> None:
    """Book everything that exists before a step."""
    for tensor in tensors.values():
        ledger.register(tensor)
