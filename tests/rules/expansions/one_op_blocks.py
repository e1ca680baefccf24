"""Blocks of one op, lowered under a strategy by its key."""

from __future__ import annotations

from paraplan.ir.execution.rank_program import Block, BlockRole
from paraplan.ir.machine.mesh import R
from paraplan.ir.model.graph import Graph
from paraplan.lowering.blocks.emit import BlockEmitter
from paraplan.rules.strategies import AxisChoice, Strategy, op_strategies
from paraplan.rules.time_axis import extend


def strategy(graph: Graph, key: str, mesh: tuple[int, ...]) -> Strategy:
    found = next(s for s in op_strategies(graph.ops[0], graph.values, mesh) if s.key == key)
    places = tuple(None if out is None else R for out in found.outputs)
    return extend(found, AxisChoice("-", (R,) * len(found.inputs), places))


def lowered(graph: Graph, key: str, mesh: tuple[int, ...]) -> Block:
    chosen = strategy(graph, key, mesh)
    emitter = BlockEmitter("block", (1, *mesh), BlockRole.FORWARD)
    for name, layout in zip(graph.ops[0].tensors, chosen.inputs, strict=True):
        emitter.give(name, graph.values[name], layout)
    emitter.op(graph.ops[0], graph, chosen, 0)
    pairs = zip(graph.ops[0].outs, chosen.outputs, strict=True)
    return emitter.finish([emitter.get(out, layout) for out, layout in pairs if out is not None and layout], ())
