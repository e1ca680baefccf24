"""The only place of the runtime that touches torch's private modules. Checked on torch 2.13.

A storage's Python object lives exactly as long as the storage (torch preserves it), so a weak reference to it
fires when the memory is given back; `storage_key` identifies it meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch._C._distributed_c10d import _register_work
from torch._C._functorch import maybe_current_level
from torch.distributed.distributed_c10d import _get_default_store, _resolve_process_group, _set_pg_timeout
from torch.overrides import _get_current_function_mode_stack, _len_torch_function_stack
from torch.utils._python_dispatch import TorchDispatchMode as AnyDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "TorchDispatchMode",
    "default_store",
    "exchange_rows",
    "find_backend",
    "function_modes",
    "group_timeout",
    "in_transform",
    "norms_of",
    "rank_in_group",
    "scale_all",
    "set_group_timeout",
    "storage_key",
    "storage_of",
    "tree_leaves",
    "untracked",
]


class TorchDispatchMode(AnyDispatchMode):
    """A dispatch mode that only eager code passes: torch's guard against compiling it, a third of the time a small op
    takes in a mode, is left out."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def untracked() -> AbstractContextManager[None]:
    """While inside, ops pass no dispatch mode."""
    keys = DispatchKeySet(DispatchKey.Python) | DispatchKeySet(DispatchKey.PythonTLSSnapshot)
    return _ExcludeDispatchKeyGuard(keys)  # type: ignore[no-any-return]


def in_transform() -> bool:
    """Whether a transform of torch.func is under way."""
    return maybe_current_level() is not None


def function_modes() -> list[str]:
    """Classes of the function modes that are active, outermost first; torch's own (a default device) left out."""
    if not _len_torch_function_stack():
        return []
    kinds = [type(mode) for mode in _get_current_function_mode_stack()]
    return [kind.__qualname__ for kind in kinds if kind.__module__.split(".")[0] != "torch"]


storage_of: Callable[[Tensor], UntypedStorage] = Tensor.untyped_storage
"""The storage behind a tensor."""

storage_key: Callable[[UntypedStorage], int] = attrgetter("_cdata")
"""A number no other living storage has."""


def norms_of(tensors: Sequence[Tensor], norm_type: float, dtype: torch.dtype | None) -> Sequence[Tensor]:
    """The p-norm of each of some tensors of one device and dtype, in it or in another; one launch for all.

    Args:
        tensors: of one device and dtype.
        norm_type: p; infinity for the largest.
        dtype: of the norms; None for the tensors'.
    """
    return torch._foreach_norm(tensors, norm_type, dtype)  # type: ignore[no-any-return]


def scale_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Tensors of one device and dtype multiplied in place by a scalar of theirs; one launch for all."""
    torch._foreach_mul_(tensors, factor)


def rank_in_group(name: str) -> int:
    """This process' place in a process group, by the group's name."""
    return int(_resolve_process_group(name).rank())  # type: ignore[arg-type]


def exchange_rows(out: Tensor, x: Tensor, receives: list[int], sends: list[int], group: str) -> None:
    """Starts an all-to-all of unequal parts; waiting for any tensor on `out`'s storage waits for it.

    Args:
        out: where rows arrive.
        x: rows that are sent.
        receives, sends: rows from and to each rank.
        group: name of the process group.
    """
    work = dist.all_to_all_single(out, x, receives, sends, _resolve_process_group(group), async_op=True)  # type: ignore[arg-type]
    _register_work(out, work)


def default_store() -> dist.Store:
    """The store through which the job's processes found each other."""
    return _get_default_store()


def group_timeout(group: dist.ProcessGroup | None = None) -> timedelta:
    """How long a collective of a group waits for its peers; of the job's where left out."""
    group = dist.group.WORLD if group is None else group
    assert group is not None
    return group._get_backend(group._device_types[0]).options._timeout  # type: ignore[attr-defined,no-any-return]


def set_group_timeout(limit: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set it; the job's where left out."""
    _set_pg_timeout(limit, group)


def find_backend(name: str) -> Callable[..., Any]:
    """torch.compile's backend of that name."""
    return torch._dynamo.lookup_backend(name)  # type: ignore[no-any-return]


CYCLES_PER_S = 2e9
"""Of the clock that a CUDA device spins by, at most."""


def hold_up(seconds: float) -> None:
    """Have the current CUDA stream do nothing for so long; the host goes on."""
    torch.cuda._sleep(int(CYCLES_PER_S * seconds))
