"""How gradients come to their accumulators: in which dtype, and in what order of dims.

A parameter's first gradient becomes its accumulator, cast to its dtype; those that follow are cast as they are added. A
fused optimizer kernel reads its gradient as a flat array (`ir.model.fused_updates`): one that it gets as it was made
is copied row by row first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import Block, BlockRole, LocalValue
from paraplan.ir.machine.mesh import R
from paraplan.ir.machine.reshard import Move
from paraplan.ir.model.strides import is_contiguous
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.emit import BlockEmitter
from paraplan.lowering.rank_group import RankGroup
from paraplan.lowering.steps.step_writer import StepWriter

Dims = tuple[int, ...]


@dataclass
class Accumulators:
    """Those of a group of ranks.

    Attributes:
        rank, writer: whose steps are written.
        dtypes: of every accumulator.
        fused: the places whose updates fused kernels make.
    """

    rank: RankGroup
    writer: StepWriter
    dtypes: Mapping[str, str]
    fused: frozenset[str]
    _begun: set[str] = field(default_factory=set)
    _first_paths: dict[str, tuple[Move, ...]] = field(default_factory=dict)

    def mark(self, name: str) -> None:
        """A parameter has an accumulator."""
        self._begun.add(name)

    def begin(self, name: str, out: Name, value: LocalValue, m: int, index: int) -> tuple[Name, LocalValue]:
        """A gradient that its accumulator begins with, as that is to be; others as they are.

        Args:
            name: of the parameter.
            out: name of the gradient.
            value: what it is.
            m: microbatch.
            index: of the segment that made it, for the step.
        """
        if name in self._begun:
            return out, value
        self.mark(name)
        return self.laid_out(name, out, value, self.dtypes[name], m, index)

    def laid_out(
        self, name: str, out: Name, value: LocalValue, dtype: str, m: int, index: int
    ) -> tuple[Name, LocalValue]:
        """A gradient in a dtype and, where a fused kernel is to read it as it was made, row by row.

        Args:
            name, out, value, m, index: as of `begin`.
            dtype: that it is to have.
        """
        layouts = self.rank.holding.params[name]
        rows = layouts.update_tier in self.fused and not layouts.grad_tier
        rows = rows and not is_contiguous(value.shape, value.strides)
        if value.dtype == dtype and not rows:
            return out, value
        spec = TensorSpec(value.dtype, value.shape)
        block = self.writer.cache.get("cast.", _begin_block, spec, value.strides, dtype, rows, self.rank.extended)
        made = out.cast(dtype)
        self.writer.call(block, (out,), (made,), m, index)
        return made, block.values[str(block.outputs[0])]

    def dtype_on_arrival(self, name: str, path: tuple[Move, ...]) -> str:
        """What a gradient that moves to its accumulator is cast to when it is there; "" where the addition casts it."""
        follows = name in self._begun or self._first_paths.get(name) == path  # what goes as the first does comes later
        self._first_paths.setdefault(name, path)
        return "" if follows else self.dtypes[name]


def _begin_block(name: str, local: TensorSpec, strides: Dims, dtype: str, rows: bool, extended: Dims) -> Block:
    """A rank's part of a gradient in another dtype, in the order it has or (`rows`) row by row."""
    emitter = BlockEmitter(name, extended, BlockRole.CAST)
    whole = (R,) * len(extended)
    emitter.give("x", local, whole, strides)
    made = emitter.get("x", whole)
    if rows:
        made = emitter.copy_rows(made, "rows")
    if local.dtype != dtype:
        made = emitter.cast(made, dtype, "cast")
    return emitter.finish((made,), ())
