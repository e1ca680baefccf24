"""CUDA graphs where there is no CUDA: ops are noted as they are dispatched, and replayed into the same tensors.

As strict as the real ones: what is captured is undone, a read on the host within it is an error, and all that a graph
makes is filled with NaN before a replay and, but for what is read later, after it, as memory that others have used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from paraplan.runtime.executing.torch_private import TorchDispatchMode, tree_leaves

READS = frozenset(("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2"))
_WAIT = torch.ops._c10d_functional.wait_tensor.default


class HostRead(RuntimeError):
    """The host read a tensor within a graph."""


def _storages(given: object) -> dict[int, Tensor]:
    return {x.untyped_storage().data_ptr(): x for x in tree_leaves(given) if isinstance(x, Tensor)}


class _Noted(TorchDispatchMode):
    """Notes ops: what each makes, and what it overwrites.

    Attributes:
        ops: in order, each with its arguments and its result.
        made: the storages that were made, by address, held so that no other gets that address.
        before: copies of what existed before and was written, to be put back.
    """

    def __init__(self, allowed: frozenset[str]) -> None:
        super().__init__()
        self.allowed = allowed
        self.ops: list[tuple[Any, Any, Any, Any]] = []
        self.made: dict[int, Tensor] = {}
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in READS - self.allowed:
            raise HostRead(f"{name} within a graph")
        written = [
            value
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for address, x in _storages((written, kwargs.get("out"))).items():
            if address not in self.made and address not in self.before:
                whole = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
                self.before[address] = whole, whole.clone()
        given = _storages((args, kwargs))
        result = func(*args, **kwargs)
        for address, x in _storages(result).items():
            if address not in given:
                self.made[address] = x
        if name not in READS:
            self.ops.append((func, args, kwargs, result))
        return result


class NotedGraphs:
    """Captures on a CPU; see the module.

    Args:
        allowed: reads on the host that the reference kernels of a CPU make where a device's do not.
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self.allowed = frozenset(allowed)

    def capture(self, run: Callable[[], Iterable[Tensor]]) -> Callable[[], None]:
        """See `paraplan.runtime.executing.graphs.Graphs`."""
        noted = _Noted(self.allowed)
        try:
            with noted:
                left = _storages(list(run()))
        finally:
            for whole, was in noted.before.values():
                whole.copy_(was)
        inside = {address: x for address, x in noted.made.items() if address not in left}
        _poison(noted.made.values())

        def replay() -> None:
            with torch.no_grad():
                _poison(noted.made.values())
                for func, args, kwargs, result in noted.ops:
                    _again(func, args, kwargs, result)
                _poison(inside.values())

        return replay


def _poison(given: Iterable[Tensor]) -> None:
    for x in given:
        whole = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
        whole.fill_(math.nan if x.is_floating_point() or x.is_complex() else 1 if x.dtype == torch.bool else -64)


def _again(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """An op once more; what it makes goes where it went then, views are where they were."""
    given = _storages((args, kwargs))
    old = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    is_view = bool(old) and not func._schema.is_mutable and all(x.untyped_storage().data_ptr() in given for x in old)
    if is_view and func is not _WAIT:
        return
    new = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
    for was, now in zip(old, new, strict=True):
        if was.untyped_storage().data_ptr() not in given:
            was.copy_(_WAIT(now) if func.namespace == "_c10d_functional" else now)
