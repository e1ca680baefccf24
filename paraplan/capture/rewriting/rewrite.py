"""Small helpers that passes over the forward fx graph share."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx

from paraplan.kernels.torch_private import FakeTensorMode, tree_map_only


class Rewriter:
    """Adds nodes before a given one, with their fake results and its source line."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode):
        self.graph, self.mode = graph, mode
        self._results: dict[object, Tensor] = {}

    def call(
        self, before: fx.Node, target: Callable[..., object], *args: object, val: Tensor | None = None, **kwargs: object
    ) -> fx.Node:
        """A new call, with its fake result and the source line of the node it stands before.

        Args:
            before: the node it is placed before.
            target: what is called.
            args, kwargs: its arguments; nodes stand for their results.
            val: its fake result, where it cannot be run (random functions want a seed); None to run it.
        """
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        node.meta = {key: before.meta[key] for key in ("stack_trace",) if key in before.meta}
        node.meta["val"] = self.evaluate(node) if val is None else val
        return node

    def evaluate(self, node: fx.Node) -> Tensor:
        """A node's fake result from those of its inputs; one tensor stands for the results of equal calls."""
        key = node.target, repr(fx.map_arg((node.args, node.kwargs), _Described))  # type: ignore[arg-type]
        if key not in self._results:
            args, kwargs = tree_map_only(fx.Node, lambda x: x.meta["val"], (node.args, node.kwargs))
            with self.mode:
                self._results[key] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self._results[key]

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Uses `new` wherever `old` was used, and removes `old`."""
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)


class _Described:
    """A node, printed as what ops on fake tensors see of its value."""

    def __init__(self, node: fx.Node) -> None:
        self._value = node.meta["val"]

    def __repr__(self) -> str:
        return _described(self._value)


def _described(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_described, value))})"
    if not isinstance(value, Tensor):
        return repr(value)
    seen = value.dtype, tuple(value.shape), value.stride(), value.storage_offset(), value.device, value.requires_grad
    return f"{seen} {value.is_conj()} {value.is_neg()}"


def remove_dead(graph: fx.Graph) -> None:
    """Removes calls nobody reads (every op here is free of effects)."""
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
