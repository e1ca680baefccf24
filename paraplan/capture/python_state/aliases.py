"""Parameters and buffers that a model also holds in plain attributes, lists or mappings (`self.ws = [self.l.weight]`).

An export puts tensors of its own in place of the registered ones alone. What an attribute holds is still that of the
copy, so it is replaced where it is used, by identity: an alias reads and writes what is registered.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paraplan.kernels.torch_private import tree_leaves, tree_map_only


def registered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all parameters and buffers, under all of their names."""
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def names_of(model: nn.Module) -> dict[int, str]:
    """First names of parameters and buffers by id, valid as long as they are the model's."""
    return {id(x): name for name, x in reversed(list(registered(model)))}


class Aliases(TorchFunctionMode):
    """Under it, functions get the traced parameters and buffers for those of the copy.

    Args:
        model: the fake copy that is exported.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._own = tuple(registered(model))
        self._traced: dict[int, Tensor] = {}
        self._used: set[int] = set()

    def begin(self, model: nn.Module) -> None:
        """A forward of the model follows, with other tensors registered."""
        traced = dict(registered(model))
        self._traced = {id(x): traced[name] for name, x in self._own if traced[name] is not x}
        self._used = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every function as it is, of other tensors."""
        kwargs = kwargs or {}
        found = [id(x) for x in tree_leaves((args, kwargs)) if id(x) in self._traced]
        if found:
            self._used.update(id(self._traced[number]) for number in found)
            args, kwargs = tree_map_only(Tensor, lambda x: self._traced.get(id(x), x), (args, kwargs))
        return func(*args, **kwargs)

    def is_used(self, x: Tensor) -> bool:
        """Whether this forward has taken a registered tensor from elsewhere."""
        return id(x) in self._used
