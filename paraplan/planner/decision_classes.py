"""What must be decided together: equal parameters of equal segments, and gradients that meet.

Instances of one kind take one choice here, so parameters that fill the same slot of a kind share their
layouts, and so do slots that one parameter fills (tied weights). The gradient of a program value must
reach it in one layout, whoever reads it. Both are classes of a union-find.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import networkx as nx

from paraplan.ir.model.program import Program
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.sizes import say_size


@dataclass(frozen=True)
class ParamClass:
    """Parameters with one layout decision.

    Attributes:
        params: names, in the model's order.
        slots: (kind, slot) pairs they fill.
        spec: their common spec.
        trained: whether they receive gradients.
    """

    params: tuple[str, ...]
    slots: tuple[tuple[int, int], ...]
    spec: TensorSpec
    trained: bool


@dataclass(frozen=True)
class GradClass:
    """Program values whose gradients are handed over in one layout.

    Attributes:
        readers: (kind, input index) pairs that give the gradient.
        makers: (kind, output index) pairs that receive it.
        spec: the values' common spec.
    """

    readers: tuple[tuple[int, int], ...]
    makers: tuple[tuple[int, int], ...]
    spec: TensorSpec


def _components(edges: Iterable[tuple[Hashable, Hashable]]) -> list[list[Hashable]]:
    graph: nx.Graph = nx.Graph()
    graph.add_edges_from(edges)
    order = {node: index for index, node in enumerate(graph.nodes)}
    return sorted(
        (sorted(part, key=order.__getitem__) for part in nx.connected_components(graph)),
        key=lambda part: order[part[0]],
    )


def param_classes(program: Program) -> tuple[ParamClass, ...]:
    """Classes of all parameters the segments read."""
    edges: list[tuple[Hashable, Hashable]] = []
    trained = set()
    for segment in program.segments:
        kind = program.kinds[segment.kind]
        for slot, name in enumerate(segment.params):
            edges.append((("param", name), ("slot", segment.kind, slot)))
            if kind.param_grads[slot] is not None:
                trained.add(name)
    found = []
    position = {name: index for index, name in enumerate(program.params)}
    for part in _components(edges):
        params = sorted((node[1] for node in part if node[0] == "param"), key=position.__getitem__)  # type: ignore[index]
        slots = tuple(sorted((node[1], node[2]) for node in part if node[0] == "slot"))  # type: ignore[index]
        spec = program.params[params[0]].spec
        found.append(ParamClass(tuple(params), slots, spec, any(name in trained for name in params)))
    return tuple(found)


def grad_classes(program: Program) -> tuple[GradClass, ...]:
    """Classes of all gradients that cross between segments."""
    edges: list[tuple[Hashable, Hashable]] = []
    for segment in program.segments:
        kind = program.kinds[segment.kind]
        for index, (name, grad) in enumerate(zip(segment.inputs, kind.input_grads, strict=True)):
            if grad is not None:
                edges.append((("value", name), ("reader", segment.kind, index)))
        for index, (name, tangent) in enumerate(zip(segment.outputs, kind.tangents, strict=True)):
            if tangent is not None:
                edges.append((("value", name), ("maker", segment.kind, index)))
    found = []
    for part in _components(edges):
        readers = tuple(sorted((node[1], node[2]) for node in part if node[0] == "reader"))  # type: ignore[index]
        makers = tuple(sorted((node[1], node[2]) for node in part if node[0] == "maker"))  # type: ignore[index]
        if readers:
            kind = program.kinds[readers[0][0]]
            found.append(GradClass(readers, makers, kind.graph.values[kind.inputs[readers[0][1]]]))
    return tuple(found)


def largest_param(program: Program) -> str:
    """The parameter that takes most, for messages."""
    name, spec = max(((n, p.spec) for n, p in program.params.items()), key=lambda item: item[1].nbytes)
    return f"the largest tensor is {name} {spec} ({say_size(spec.nbytes)})"
