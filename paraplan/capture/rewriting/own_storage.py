"""Results with storage of their own: sums over microbatches and ranks are accumulated in place."""

from __future__ import annotations

from collections.abc import Sequence

from paraplan.ir.model.graph import Graph, Op, Phase
from paraplan.rules.dims import op_def


def own_results(graph: Graph, own: Sequence[bool]) -> Graph:
    """The joint graph with a copy of every result that is to have storage of its own and has not.

    Args:
        graph: whose first outputs are the forward's results.
        own: of each result, whether nothing else may read or share it.
    """
    ops, outputs, values = list(graph.ops), list(graph.outputs), dict(graph.values)
    read = {name for op in graph.ops for name in op.tensors}
    maker = {out: op for op in graph.ops for out in op.outs if out is not None}
    at = next((index for index, op in enumerate(ops) if op.phase is Phase.BACKWARD), len(ops))
    for index in [index for index, wanted in enumerate(own) if wanted]:
        name = outputs[index]
        assert name is not None
        made = maker.get(name)
        if made is not None and name not in read and outputs.count(name) == 1 and not _is_view(made):
            continue
        out = next(each for n in range(len(values) + 1) if (each := f"own_{n}") not in values)
        source = -1 if made is None else made.source
        ops.insert(at, Op(target="aten.clone.default", args=("%" + name,), outs=(out,), source=source))
        at += 1
        outputs[index], values[out] = out, values[name]
    if len(ops) == len(graph.ops):
        return graph
    return Graph(inputs=graph.inputs, outputs=tuple(outputs), values=values, ops=tuple(ops), sources=graph.sources)


def _is_view(op: Op) -> bool:
    definition = op_def(op.target)
    return definition is not None and definition.strides == "view"
