"""Casts of weights that are held through a step (`transfers.held_casts`), written before their first reader."""

from __future__ import annotations

from paraplan.ir.execution.names import held
from paraplan.ir.execution.rank_program import Block, BlockRole
from paraplan.ir.machine.mesh import Layout, Partial, R, Shard, parse_layout
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.emit import BlockEmitter
from paraplan.lowering.rank_group import RankGroup
from paraplan.lowering.steps.step_writer import StepWriter
from paraplan.lowering.transfers.held_casts import ROWS, SUFFIXES, TURNED, cast_graph, form_layout
from paraplan.rules.strategies import Strategy

Dims = tuple[int, ...]


class CastSteps:
    """Writes the casts of weights.

    Args:
        rank, writer: whose steps are written.
    """

    def __init__(self, rank: RankGroup, writer: StepWriter) -> None:
        self._rank, self._writer = rank, writer
        self._cast: set[str] = set()

    def reach(self, index: int) -> None:
        """A segment is run next: the weights that it is the first to read are cast."""
        rank = self._rank
        for name in rank.program.segments[index].params:
            cast = rank.lowered.casts.get(name)
            if cast is None or cast.form != ROWS or cast.weight in self._cast:
                continue
            weight, dtype = cast.weight, cast.dtype
            self._cast.add(weight)
            spec, stored = rank.program.params[weight].spec, parse_layout(rank.holding.params[weight].stored)
            block = self._writer.cache.get("held.", _cast_block, spec, stored, dtype, rank.extended)
            self._writer.call(block, (rank.stored(weight),), tuple(held(f"{weight}{suffix}") for suffix in SUFFIXES))


def _cast_block(name: str, spec: TensorSpec, stored: Layout, dtype: str, extended: Dims) -> Block:
    """A weight's shard scaled by the whole weight's maximum, cast, and cast to its transpose."""
    emitter, graph = BlockEmitter(name, extended, BlockRole.HOLD_CAST), cast_graph(spec, dtype)
    lies, turned, whole = (R, *stored), (R, *form_layout(TURNED, stored)), (R,) * len(extended)
    emitter.give("w", spec, lies, zeros=True)
    partial = tuple(Partial(op="max") if isinstance(place, Shard) else R for place in lies)
    emitter.op(graph.ops[0], graph, Strategy("", (lies,), (partial,), (whole,)), -1)
    emitter.op(graph.ops[1], graph, Strategy("", (lies, whole), (lies, turned), (lies, turned)), -1)
    results = (emitter.get("rows", lies), emitter.get("turned", turned), emitter.get("scale", whole))
    return emitter.finish(results, ())
