"""Live bytes of a rank while it runs: every storage that is made, until it is given back.

A dispatch mode sees the result of every op, those inside Python kernels included (ours are plain functions, whose
inner ops pass through it; a user's custom op is called so that its inner ops do), and registers the storages it
has not met; a weak reference tells when each dies. Bytes are logical (`storage.nbytes()`), on any device, so they
compare with a prediction.
One process may run several ranks: the mode books what is made to the `Ledger` that is current. What a rank has on tiers
is booked in ledgers of their own (`Ledger.tiers`).

Limits: what a C++ kernel allocates and drops inside is unseen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paraplan.ir.process.memo import SESSION
from paraplan.kernels.torch_private import COMPILED, OpOverload, call_within, is_composite
from paraplan.runtime.executing.torch_private import TorchDispatchMode, storage_key, storage_of, tree_leaves
from paraplan.runtime.transport.tier_copies import TierTensor


class Ledger:
    """Storages of one rank that are alive.

    Attributes:
        live_bytes: of all of them.
        peak_bytes: the most `live_bytes` has been since `reset_peak`.
        window_bytes: the most it has been since `open_window` (an instruction's).
        tiers: the same of what is away, by tier.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self.window_bytes = 0
        self.tiers: dict[str, Ledger] = {}
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def register(self, tensor: Tensor) -> None:
        """Book a tensor's storage, unless it is booked already."""
        storage = storage_of(tensor)
        key = storage_key(storage)
        if key not in self._alive:
            self._book(key, storage, storage.nbytes())

    def _book(self, key: int, thing: Any, nbytes: int) -> None:
        self._alive[key] = (nbytes, weakref.ref(thing, partial(self._died, key)))
        self.live_bytes = live_bytes = self.live_bytes + nbytes
        if live_bytes > self.window_bytes:
            self.window_bytes = live_bytes
        if live_bytes > self.peak_bytes:
            self.peak_bytes = live_bytes

    def register_all(self, result: Any) -> None:
        """Book every tensor of an op's result, here or away."""
        if isinstance(result, Tensor):
            self.register(result)
            return
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.register(leaf)
            elif isinstance(leaf, TierTensor):
                tier = self.tiers.setdefault(leaf.tier, Ledger())
                if id(leaf) not in tier._alive:
                    tier._book(id(leaf), leaf, leaf.nbytes)

    def adopt(self, tensor: Tensor, tier: str) -> None:
        """Book a tensor on a tier, even where it was booked on the device when it was made."""
        key = storage_key(storage_of(tensor))
        if tier and key in self._alive:
            self.live_bytes -= self._alive.pop(key)[0]
        (self.tiers.setdefault(tier, Ledger()) if tier else self).register(tensor)

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
        for tier in self.tiers.values():
            tier.reset_peak()

    def levels(self) -> dict[str, int]:
        """Bytes alive by tier."""
        return {tier: of.live_bytes for tier, of in self.tiers.items()} if self.tiers else {}

    @property
    def tier_peak_bytes(self) -> dict[str, int]:
        """The most bytes there were at once on every tier that was used."""
        return {tier: of.peak_bytes for tier, of in sorted(self.tiers.items()) if of.peak_bytes}


Tiers = tuple[tuple[str, int, int], ...]
"""(tier, bytes allocated, bytes freed), as in `ir.execution.entry`."""


def changes(before: dict[str, int], most: dict[str, int], after: dict[str, int]) -> Tiers:
    """What came and what went, between levels before, with all that came, and after.

    Args:
        before: bytes by tier.
        most: of those at once, with all that came.
        after: bytes by tier.
    """
    pairs = ((tier, most.get(tier, 0) - before.get(tier, 0), most.get(tier, 0) - after.get(tier, 0)) for tier in after)
    return tuple(sorted(each for each in pairs if each[1] or each[2]))


@SESSION.cached()
def _has_inside(func: Any) -> bool:
    """Whether an op's kernel may be Python, whose own ops count too."""
    return getattr(func, "namespace", "") not in COMPILED


@SESSION.cached()
def is_kernel(func: Any) -> bool:
    """Whether a call is one kernel of torch's own: the mode would see its results and nothing else."""
    return isinstance(func, OpOverload) and func.namespace in COMPILED and not is_composite(func)


class Tracker(TorchDispatchMode):
    """The dispatch mode; `current` is the ledger of the rank that is running, None while nothing is booked."""

    def __init__(self) -> None:
        super().__init__()
        self.current: Ledger | None = None
        self._entered = 0
        self._homes: dict[int, str] = {}

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
            if self._homes:
                self._book_update(self.current, (args, kwargs), result)
            else:
                self.current.register_all(result)
        return result

    def _book_update(self, ledger: Ledger, args: Any, result: Any) -> None:
        """What an update's op makes lies where a tensor that it reads does; what it writes is booked already."""
        tier = self._tier(ledger, args)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and storage_key(storage_of(leaf)) not in self._homes:
                (ledger.tiers[tier] if tier else ledger).register(leaf)

    def _tier(self, ledger: Ledger, args: Any) -> str:
        """The tier of the first tensor that is on one; "" where none is."""
        for leaf in tree_leaves(args):
            if isinstance(leaf, Tensor):
                home = self._homes.get(storage_key(storage_of(leaf)), "")
                found = home or next((tier for tier, of in ledger.tiers.items() if of.knows(leaf)), "")
                if found:
                    return found
        return ""

    @contextmanager
    def updating(self, ledger: Ledger, homes: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
        """Book an optimizer's step, on a tier what it makes from tensors there.

        Args:
            ledger: of the rank.
            homes: (tier, parameter or gradient on it), where there are any.
        """
        with self.homing(ledger, homes), self, self.booking(ledger):
            yield

    @contextmanager
    def homing(self, ledger: Ledger, homes: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
        """As `updating`, where an account is being kept already."""
        before, self._homes = self._homes, {storage_key(storage_of(x)): tier for tier, x in homes}
        for tier in self._homes.values():
            ledger.tiers.setdefault(tier, Ledger())
        try:
            yield
        finally:
            self._homes = before

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
