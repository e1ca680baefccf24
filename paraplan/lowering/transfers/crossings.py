"""Values and gradients that cross between stages, and which gradients may arrive in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paraplan.ir.machine.rank_groups import Holding
from paraplan.ir.plan import Plan
from paraplan.lowering.transfers.mesh_transfers import Message


@dataclass(frozen=True)
class Crossing:
    """A message, the value it is, and the stages whose actions send and receive it."""

    message: Message
    value: str
    begin: int
    end: int


def arrives_in_parts(plan: Plan, held: Sequence[Holding], groups: Sequence[int], value: str, maker: int) -> bool:
    """Whether the gradient of a value is sent in parts (`Plan.parted_messages`) to the ranks that made the value.

    All that is added up there has to have one layout. What a reader on those ranks gives is whole, and so is what
    comes from a mesh of another shape: where there is either, every gradient of the value is sent whole.

    Args:
        plan: the plan.
        held: its groups of ranks.
        groups: per stage, the index of the group that runs it.
        value: an output of a segment.
        maker: the group that made it.
    """
    if not plan.parted_messages:
        return False
    for stage, group in zip(plan.stages, groups, strict=True):
        if group != maker and held[group].mesh.shape == held[maker].mesh.shape:
            continue
        for segment in plan.program.segments[stage.first : stage.stop]:
            grads = plan.program.kinds[segment.kind].input_grads
            if any(name == value and grad for name, grad in zip(segment.inputs, grads, strict=True)):
                return False
    return True
