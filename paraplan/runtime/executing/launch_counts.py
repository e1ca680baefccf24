"""Counting kernels: what a stretch of tensor code launches, and the bytes those kernels read and write.

A dispatch mode below autograd sees every op that reaches a backend. One launches a kernel unless all it does is to
reinterpret a tensor or to reserve memory. So a count is of calls that reach the device, on CPU, CUDA and tensors
without data alike; one of torch's kernels that is several on some device counts once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from paraplan.runtime.executing.torch_private import TorchDispatchMode, storage_key, storage_of, tree_leaves


class KernelCall(NamedTuple):
    """One call that reaches the device.

    Attributes:
        op: e.g. "aten.mm.default".
        nbytes: read and written: of every tensor given, once, and of every tensor made or overwritten.
    """

    op: str
    nbytes: int


class LaunchCounter(TorchDispatchMode):
    """Notes every kernel launched while it is entered, in order, in `launches`."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[KernelCall] = []

    @property
    def nbytes(self) -> int:
        """Of all launches."""
        return sum(each.nbytes for each in self.launches)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(func, args, kwargs or {}, result)
        return result

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Takes note of a call, if it launches a kernel.

        Args:
            func: the op.
            args, kwargs: that it was called with.
            result: that it gave.
        """
        given = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}.values()
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.numel()]
        if launches(func, list(given), made):
            written = made if not func._schema.is_mutable else [*_written(func, args, kwargs), *_own(made, given)]
            if func.namespace == "paraplan_gpu":  # says apart what it reads and what it writes
                written = []
            self.launches.append(KernelCall(str(func), sum(map(_nbytes, (*given, *written)))))


def launches(func: Any, given: list[Tensor], made: list[Tensor]) -> bool:
    """Whether a call of an op launches a kernel.

    Args:
        func: the op.
        given: tensors that it was called with.
        made: tensors with elements that it gave.
    """
    if func._schema.is_mutable:
        return any(x.numel() for x in given)
    if func.overloadpacket.__name__ in _RESERVING:
        return False
    return bool(_own(made, given))


_RESERVING = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"})


def _own(made: list[Tensor], given: Any) -> list[Tensor]:
    """Those of the results that share no storage with what was given."""
    known = {storage_key(storage_of(x)) for x in given}
    return [x for x in made if storage_key(storage_of(x)) not in known]


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors an op overwrites."""
    arguments = zip(func._schema.arguments, args, strict=False)
    named = [(arg, kwargs[arg.name]) for arg in func._schema.arguments if arg.name in kwargs]
    written = [value for arg, value in (*arguments, *named) if arg.alias_info is not None and arg.alias_info.is_write]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]


def _nbytes(x: Tensor) -> int:
    """Bytes of the elements a kernel touches: those of an expanded dim lie in one place."""
    count = x.element_size()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else 1
    return count
