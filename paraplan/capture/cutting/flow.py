"""What a value of the forward graph is: shape, whether it carries gradient, whether it is a side value.

Works on fx graphs whose nodes hold their fake result in `meta["val"]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, fx

from paraplan.capture.canonical import autograd
from paraplan.capture.rewriting import contractions, losses
from paraplan.kernels.torch_private import OpOverload

_HEAVY_ATEN = frozenset(
    {
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "matmul",
        "linear",
        "conv1d",
        "conv2d",
        "conv3d",
        "convolution",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "scaled_dot_product_attention",
        "einsum",
        "sort",
        "topk",
        "lstm",
        "gru",
        "_trilinear",
        "cdist",
    }
)


class Flow(NamedTuple):
    """How a value comes about.

    Attributes:
        carries: a gradient flows through it to a trainable parameter.
        param: depends on a parameter.
        batch: depends on the batch.
        heavy: a matmul, attention, convolution or random op is among its ancestors.
    """

    carries: bool = False
    param: bool = False
    batch: bool = False
    heavy: bool = False

    @property
    def side(self) -> bool:
        """Cheap, and of constants, parameters or the batch alone: cloned wherever it is needed."""
        return not self.heavy and not (self.param and self.batch)


def value_of(node: fx.Node) -> Tensor:
    """A node's fake tensor."""
    value = node.meta["val"]
    assert isinstance(value, Tensor), f"{node} is no tensor"
    return value


def aten_name(target: object) -> str:
    """ "mm" for aten.mm.default; "" for what is no aten op."""
    if isinstance(target, OpOverload) and target.namespace == "aten":
        return target._schema.name.removeprefix("aten::")
    return ""


def is_heavy(target: object) -> bool:
    """Whether an op is worth storing the result of, rather than cloning it."""
    return (
        target in autograd.HEAVY
        or target in autograd.RANDOM
        or target in losses.HEAVY
        or target in contractions.HEAVY
        or aten_name(target) in _HEAVY_ATEN
        or (isinstance(target, OpOverload) and target.namespace not in ("aten", "prims", "paraplan"))
    )


def _is_outer(node: fx.Node) -> bool:
    """Whether a product contracts a dim of size 1, and is no more work than a broadcast multiplication (the angles of
    rotary embeddings, in some versions of transformers)."""
    if aten_name(node.target) not in ("mm", "bmm", "matmul"):
        return False
    left, right = (value_of(x) for x in node.all_input_nodes * (2 // len(node.all_input_nodes)))
    return min(left.dim(), right.dim()) > 1 and left.shape[-1] == 1


def flows(graph: fx.Graph, names: dict[fx.Node, str], trainable: Callable[[str], bool]) -> dict[fx.Node, Flow]:
    """The flow of every node.

    Args:
        graph: forward graph.
        names: what its placeholders are.
        trainable: whether a parameter of that name trains.
    """
    found: dict[fx.Node, Flow] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            kind, name = names[node].split(":", 1)
            found[node] = Flow(
                carries=kind == "param" and trainable(name), param=kind == "param", batch=kind == "batch"
            )
        elif node.op == "call_function":
            found[node] = _joined(node, [found[source] for source in node.all_input_nodes])
    return found


def _joined(node: fx.Node, sources: Iterable[Flow]) -> Flow:
    sources = list(sources)
    value = node.meta.get("val")
    made = value if isinstance(value, (tuple, list)) else (value,)
    floats = any(isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex()) for each in made)
    stops = node.target is torch.ops.aten.detach.default
    return Flow(
        carries=floats and not stops and any(source.carries for source in sources),
        param=any(source.param for source in sources),
        batch=any(source.batch for source in sources),
        heavy=(is_heavy(node.target) and not _is_outer(node)) or any(source.heavy for source in sources),
    )
