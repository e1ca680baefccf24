"""Where a lowered instruction comes from: the user's own line."""

from __future__ import annotations

from collections.abc import Callable

from paraplan.ir.execution.rank_program import Block
from paraplan.ir.model.graph import Graph
from paraplan.ir.model.program import Program

Locate = Callable[[Block, int], str]
"""(block, op of its joint graph) -> the user's source line."""

UNKNOWN = "unknown line"


def no_source(block: Block, origin: int) -> str:
    """Where an op comes from, when nobody knows."""
    return UNKNOWN


def graph_of_block(program: Program) -> Callable[[Block], Graph | None]:
    """(block) -> the joint graph it comes from; None for what is no kind's."""
    graphs = {kind.name: kind.graph for kind in program.kinds}
    graphs |= {f"den{index}": entry.graph for index, entry in enumerate(program.denominators)}
    return lambda block: graphs.get(block.kind)


def source_lines(program: Program) -> Locate:
    """The lines of a program's ops."""
    graphs = graph_of_block(program)

    def locate(block: Block, origin: int) -> str:
        graph = graphs(block)
        if graph is None or not 0 <= origin < len(graph.ops):
            return UNKNOWN
        return graph.source_of(graph.ops[origin])

    return locate
