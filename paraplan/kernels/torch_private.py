"""What kernels, capture and `jobs` share of torch's private or experimental modules.

Names here are ours; what capture alone needs is in `capture.torch_private`. The tests passed with torch 2.13 and 2.11.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch import _assert_async as assert_async
from torch import _scaled_mm as scaled_mm
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _current_graph_task_id,
    _dispatch_has_kernel_for_dispatch_key,
)
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only, tree_structure

__all__ = [
    "BatchNorm",
    "COMPILED",
    "FakeTensor",
    "OpOverload",
    "TorchDispatchMode",
    "assert_async",
    "call_within",
    "fake_mode",
    "has_kernel",
    "in_backward",
    "gives_alias",
    "is_composite",
    "is_fake",
    "lazy_module",
    "scaled_mm",
    "tree_leaves",
    "tree_map_only",
    "tree_structure",
]


def is_composite(op: OpOverload) -> bool:
    """Whether an op is written in terms of others, its gradient following from theirs."""
    return bool(_dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))


def gives_alias(target: object) -> bool:
    """Whether a call target is an op that gives back its argument, or a view of it."""
    return isinstance(target, OpOverload) and any(each.alias_info is not None for each in target._schema.returns)


def has_kernel(op: OpOverload) -> bool:
    """Whether an op has a kernel of its own, whatever else it could be written in terms of."""
    return bool(_dispatch_has_kernel_for_dispatch_key(op.name(), "CPU"))


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return bool(_current_graph_task_id() != -1)


def fake_mode() -> FakeTensorMode:
    """A mode under which tensors have shapes and no data."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def lazy_module(graph: Graph, name: str) -> GraphModule:
    """A graph module that writes its Python code when it is first called."""
    return _LazyGraphModule({}, graph, class_name=name)


def is_fake(tensor: object) -> bool:
    """Whether a tensor has no data because it was made under a fake mode."""
    return isinstance(tensor, FakeTensor)


COMPILED = frozenset(
    {"aten", "prim", "prims", "c10d", "_c10d_functional", "_c10d_functional_autograd", "quantized", "paraplan_gpu"}
)


def call_within(mode: TorchDispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an op from inside a dispatch mode, so that what a custom op's Python kernel calls passes the mode too.

    Args:
        mode: whose `__torch_dispatch__` this is called from.
        func: what it is to call; ops of the `COMPILED` namespaces are called as they are, for theirs is no Python.
        args, kwargs: func's.
    """
    if not isinstance(func, OpOverload) or func.namespace in COMPILED:
        return func(*args, **kwargs)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    keys = {"cpu": DispatchKey.CPU, "cuda": DispatchKey.CUDA}
    key = keys.get(tensors[0].device.type) if tensors else None
    if key is None:
        return func(*args, **kwargs)
    with mode:
        return func.redispatch(DispatchKeySet(key), *args, **kwargs)
