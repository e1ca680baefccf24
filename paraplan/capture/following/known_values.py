"""Tensors that depend on no data, with their values: Python may read them, and they may say what is taken of others.

`h[~torch.eye(n, dtype=torch.bool)]` gives as many elements whatever the data are, and `torch.arange(4).tolist()` is the
same list, but tensors of a trace have no data. Under this mode what is made of numbers alone has its value beside it,
and what is computed of such tensors alone, too, views and writes in place included, as long as every write is seen. A
boolean index becomes the indices of its true elements: as they are where these are few, else sorted out by the program
itself, lest a long list becomes part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paraplan.capture.following.followed import is_write
from paraplan.capture.torch_private import below_modes, unrecorded
from paraplan.kernels.torch_private import tree_leaves, tree_map_only

LARGEST, LISTED = 1 << 20, 1 << 12
"""Elements of a tensor that has its value beside it, and of indices that become numbers of the program."""

_MADE = frozenset(
    {
        *(torch.arange, torch.as_tensor, torch.empty, torch.eye, torch.full, torch.linspace, torch.logspace),
        *(torch.ones, torch.tensor, torch.tril_indices, torch.triu_indices, torch.zeros),
    }
)
_MADE_LIKE = frozenset(
    {
        *(torch.full_like, torch.ones_like, torch.zeros_like, Tensor.new_full, Tensor.new_ones, Tensor.new_tensor),
        Tensor.new_zeros,
    }
)
_READ = frozenset(
    {
        *(Tensor.__bool__, Tensor.__float__, Tensor.__index__, Tensor.__int__, Tensor.item, Tensor.tolist),
        *(torch.allclose, torch.equal, torch.is_nonzero, Tensor.allclose, Tensor.equal, Tensor.is_nonzero),
    }
)
_INDEXED = frozenset({Tensor.__getitem__, Tensor.__setitem__})
_FOUND = frozenset({torch.argwhere, torch.nonzero, torch.where, Tensor.argwhere, Tensor.nonzero})
_REPEATED = frozenset({torch.repeat_interleave, Tensor.repeat_interleave})
_VIEWED = frozenset(getattr(Tensor, name).__get__ for name in ("T", "H", "mT", "mH", "data"))
_SELECTED = frozenset({torch.masked_select, Tensor.masked_select})


class _Known(NamedTuple):
    """A tensor, its version when its value was noted, and that."""

    tensor: ref[Tensor]
    version: int
    value: Tensor


class _Worked(NamedTuple):
    """What a call of values gave."""

    made: Any


class KnownValues(TorchFunctionMode):
    """Under it, what depends on no data is known."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, _Known] = {}  # by id

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, or what stands for it where values decide."""
        kwargs = kwargs or {}
        if func in _MADE or func in _MADE_LIKE:
            return self._run(func, args, kwargs)
        tensors = list(_tensors((*args, *kwargs.values())))
        num_known = sum(map(self._is_known, tensors))
        if num_known == 0 or (getattr(func, "__name__", "") == "__get__" and func not in _VIEWED):
            return func(*args, **kwargs)
        if num_known < len(tensors):
            func, args, kwargs = self._decided(func, args, kwargs)
            return func(*args, **kwargs)
        if func is Tensor.__iter__ and args[0].dim():
            return iter(self._run(Tensor.unbind, args, kwargs))
        if func in _READ or (func in _FOUND and len(tensors) == 1):
            worked = self._worked(func, args, kwargs)
            if worked is not None:
                return worked.made if func in _READ else self._listed(worked.made)
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call of what is known, or numbers, with the value of what it makes or writes."""
        made = func(*args, **kwargs)
        is_small = all(x.numel() <= LARGEST for x in tree_leaves(made) if isinstance(x, Tensor))
        worked = self._worked(func, args, kwargs) if is_small else None
        if worked is not None:
            written = self._known.get(id(args[0])) if args and is_write(func) else None
            if written is not None:
                self._keep(args[0], written.value)
            self._keep(made, worked.made)
        return made

    def _decided(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """A call of what is not known, some of which is: what it takes of the former said in numbers."""
        if func in _INDEXED:
            return func, (args[0], self._indices(args[1]), *args[2:]), kwargs
        if func in _SELECTED and len(args) == 2 and self._is_known(args[1]) and args[0].shape == args[1].shape:
            return Tensor.__getitem__, (args[0], self._indices(args[1])), {}
        if func in _REPEATED and len(args) > 1 and self._is_known(args[1]) and not kwargs.get("output_size"):
            dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
            x = args[0] if dim is not None else args[0].flatten()
            with unrecorded(), below_modes():
                of = torch.repeat_interleave(self._value(args[1]).expand(x.shape[dim or 0]))
            return torch.index_select, (x, dim or 0, self._listed(of)), {}
        return func, args, kwargs

    def _is_known(self, x: Tensor) -> bool:
        """Whether a tensor has its value beside it, and was not written since."""
        found = self._known.get(id(x))
        return found is not None and found.tensor() is x and x._version == found.version

    def _keep(self, made: object, value: object) -> None:
        if isinstance(made, tuple | list) and isinstance(value, tuple | list):
            for each, its in zip(made, value, strict=False):
                self._keep(each, its)
        elif isinstance(made, Tensor) and isinstance(value, Tensor) and not made.is_inference():
            if (made.shape, made.dtype) == (value.shape, value.dtype):
                number = id(made)
                self._known[number] = _Known(ref(made, lambda _: self._known.pop(number, None)), made._version, value)

    def _worked(self, func: Any, args: Any, kwargs: Any) -> _Worked | None:
        """A call, of values; None where it draws numbers, or gives an error."""
        if "out" in kwargs:
            return None
        with unrecorded(), below_modes():
            state = torch.get_rng_state()
            try:
                given, named = tree_map_only(Tensor, self._value if func not in _MADE_LIKE else _shaped, (args, kwargs))
                if "device" in named:
                    named["device"] = "cpu"
                made = func(*given, **named)
            except Exception:  # noqa: BLE001  (whatever is wrong with it, the call itself says so)
                return None
            if not torch.equal(torch.get_rng_state(), state):
                torch.set_rng_state(state)
                return None
        return _Worked(made)

    def _value(self, x: Tensor) -> Tensor:
        return self._known[id(x)].value

    def _listed(self, value: Any) -> Any:
        """Indices as tensors of the trace."""
        if isinstance(value, tuple):
            return tuple(map(self._listed, value))
        with unrecorded(), below_modes():
            numbers = value.tolist()
        made = torch.tensor(numbers, dtype=value.dtype).reshape(value.shape)
        self._keep(made, value)
        return made

    def _indices(self, index: Any) -> Any:
        """An index whose known masks are the indices of their true elements, and known numbers are numbers."""
        found: list[Any] = []
        for each in index if isinstance(index, tuple) else (index,):
            if isinstance(each, slice):
                found.append(slice(*map(self._number, (each.start, each.stop, each.step))))
                continue
            value = self._value(each) if isinstance(each, Tensor) and self._is_known(each) else None
            if value is None or (value.dtype != torch.bool and value.dim() > 0):
                found.append(each)
            elif value.dtype != torch.bool:
                found.append(self._number(each))
            elif value.dim() == 0:
                found.append(each)
            else:
                found += self._true(each, value)
        return tuple(found) if isinstance(index, tuple) or len(found) != 1 else found[0]

    def _number(self, x: Any) -> Any:
        """A known tensor of a number as that number; anything else as it is."""
        if not (isinstance(x, Tensor) and self._is_known(x)):
            return x
        with unrecorded(), below_modes():
            return self._value(x).item()

    def _true(self, mask: Tensor, value: Tensor) -> list[Tensor]:
        """Per dim of a mask, where its elements are true."""
        with unrecorded(), below_modes():
            count = int(value.sum())
            places = value.nonzero(as_tuple=True) if count * value.dim() <= LISTED else None
            numbers = None if places is None else [each.tolist() for each in places]
        if numbers is not None:
            return [torch.tensor(each, dtype=torch.int64, device=mask.device) for each in numbers]
        flat, found, below = (~mask.flatten()).to(torch.int32).argsort(stable=True)[:count], list[Tensor](), 1
        for size in reversed(mask.shape):
            found.insert(0, (flat // below) % size)
            below *= size
        return found


def _tensors(given: Iterable[Any]) -> Iterator[Tensor]:
    for each in given:
        if isinstance(each, Tensor):
            yield each
        elif type(each) in (tuple, list):
            yield from _tensors(each)
        elif type(each) is slice:
            yield from _tensors((each.start, each.stop, each.step))


def _shaped(x: Tensor) -> Tensor:
    """One of whose shape and dtype alone is asked."""
    return torch.empty((), dtype=x.dtype).expand(x.shape)
