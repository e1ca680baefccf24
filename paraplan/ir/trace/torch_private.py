"""The only place of capture that touches torch's private or experimental modules.

Names here are ours; everything else in `ir.trace` imports them from this file. Checked on torch 2.13; the
names exist with the same meaning in 2.11 and 2.12.
"""

from __future__ import annotations

from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "FakeTensor", "OpOverload", "fake_mode", "is_fake", "recording_graph", "trace_ops", "tree_leaves", "tree_map_only",
]  # fmt: skip

trace_ops = make_fx


def fake_mode() -> FakeTensorMode:
    """A mode under which tensors have shapes and no data."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: object) -> bool:
    """Whether a tensor has no data because it was made under a fake mode."""
    return isinstance(tensor, FakeTensor)


def recording_graph() -> Graph:
    """The fx graph the running `trace_ops` records into."""
    mode = get_proxy_mode()
    assert mode is not None, "recording_graph outside trace_ops"
    graph = mode.tracer.graph
    assert isinstance(graph, Graph)
    return graph
