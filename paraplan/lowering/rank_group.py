"""A group of ranks as its steps are written: what it holds of the plan, and how values are there."""

from __future__ import annotations

from paraplan.ir.execution import names as outer_names
from paraplan.ir.execution.name import Name
from paraplan.ir.model.program import Source, master_dtype, source_of
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.forward import Given
from paraplan.lowering.stage_blocks import PlanBlocks, StageBlocks


class RankGroup:
    """A group of ranks of a plan.

    Args:
        lowered: the blocks of the plan.
        group: the group's index.
    """

    def __init__(self, lowered: PlanBlocks, group: int) -> None:
        plan = lowered.plan
        self.plan, self.program, self.lowered, self.group = plan, plan.program, lowered, group
        self.holding, self.m, self.micro = lowered.held[group], plan.num_microbatches, lowered.micro
        self.trained = self.holding.trained
        self.extended = (plan.num_shares, *self.holding.mesh.shape)

    def parts(self, m: int) -> StageBlocks:
        """What is run here for a microbatch; the tail for all of them."""
        return self.lowered.route(m % self.m).parts[self.group]

    def made(self, value: str) -> Given:
        """How a value that is made here lies; strides apart, the same for every microbatch."""
        return self.lowered.part(self.lowered.maker[value], self.group).given[value]

    def spec_of(self, value: str) -> TensorSpec:
        """The global spec of what a segment may be given."""
        source, name = source_of(value)
        return self.program.batch[name].spec if source is Source.BATCH else self.lowered.spec_of(value)

    def grad_spec(self, name: str) -> TensorSpec:
        """The spec of a parameter's gradient as it accumulates."""
        spec = self.program.params[name].spec
        return TensorSpec(master_dtype(self.program.precision, spec.dtype), spec.shape)

    def at(self, value: str, m: int) -> Name:
        """The outer name of what a segment is given."""
        if m == self.m and value not in self.micro.after and value not in self.parts(0).wholes:
            m = 0  # every microbatch has the same
        return outer_names.value(value, m)

    def stored(self, name: str) -> Name:
        """The outer name of a parameter as segments read it."""
        return outer_names.held(name) if self.holding.params[name].ahead else outer_names.param(name)
