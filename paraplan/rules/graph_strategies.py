"""Strategies of all ops of a graph, found once for ops that differ in the names of their values alone."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from paraplan.ir.model.graph import Graph, Op, map_refs
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.process.memo import SESSION
from paraplan.rules.choices import AxisChoice
from paraplan.rules.strategies import Strategy, op_strategies


@dataclass(frozen=True, eq=False)
class GraphKey:
    """Cache key of `graph_strategies`; compares by identity of the graph."""

    graph: Graph
    mesh_shape: tuple[int, ...]
    micro: tuple[AxisChoice | None, ...] = ()
    num_microbatches: int = 1

    def __hash__(self) -> int:
        return hash((id(self.graph), self.mesh_shape, self.num_microbatches))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, GraphKey)
            and self.graph is other.graph
            and self.mesh_shape == other.mesh_shape
            and self.micro == other.micro
            and self.num_microbatches == other.num_microbatches
        )


@SESSION.cached(256)
def graph_strategies(graph_key: GraphKey) -> tuple[tuple[Strategy, ...], ...]:
    """Per op of a graph, its strategies; cached by graph identity and mesh, found once for ops alike."""
    graph = graph_key.graph
    micros = graph_key.micro or (None,) * len(graph.ops)
    known: dict[object, tuple[Strategy, ...]] = {}
    found = []
    for op, micro in zip(graph.ops, micros, strict=True):
        key = (op_signature(op, graph.values), micro)
        if key not in known:
            known[key] = op_strategies(op, graph.values, graph_key.mesh_shape, micro, graph_key.num_microbatches)
        found.append(known[key])
    return tuple(found)


def op_signature(op: Op, values: dict[str, TensorSpec]) -> Hashable:
    """Equal for ops that differ in the names of their values only: they have equal strategies and prices."""
    numbers: dict[str, str] = {}
    args, kwargs = (
        map_refs(given, lambda name: numbers.setdefault(name, str(len(numbers))))
        for given in (op.args, tuple(sorted(op.kwargs.items())))
    )
    specs = tuple(values[name] for name in numbers)
    outs = tuple(None if name is None else values[name] for name in op.outs)
    return (op.target, args, kwargs, specs, outs, op.phase, repr(op.rule) if op.rule is not None else "")
