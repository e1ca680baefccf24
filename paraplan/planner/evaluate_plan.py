"""Decisions made a plan, lowered and simulated; where that is over a budget, a leaner one of the same layouts.

Large parameters that are gathered a segment ahead (`Plan.params_ahead`) are held beside those of the segment before;
bundles of several segments' small parameters save latency and hold a few MiB more (`lowering.blocks.bundle`), and a
stored copy that is gathered ahead of the step's first use lies beside the shard it was gathered from
(`ParamLayouts.ahead`): a plan that does not fit with them is tried without before anything dearer is. So do states
that come to their update in runs as large as bundles. The first is given up alone where that is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from paraplan.cost_models.realised_plan import Realised
from paraplan.ir.execution.rank_program import BlockRole, RankProgram
from paraplan.ir.execution.schedule import ActionKind, parse_action
from paraplan.ir.plan import Plan
from paraplan.planner.assemble import Decisions, Job, assemble
from paraplan.planner.schedules.full_rounds import as_a_whole


def realise(job: Job, decisions: Decisions, limit_bytes: float = float("inf")) -> Realised:
    """The plan of these decisions where it fits so; else the leaner of it and of `lean`.

    Args:
        job: what is planned.
        decisions: made for it.
        limit_bytes: that a device may hold.
    """
    found = as_decided(job, decisions)
    if found.peak_bytes <= limit_bytes and not found.over_bytes:
        return found
    if decisions.options.params_ahead and gathers(found.programs) and found.peak_bytes > limit_bytes:
        here = replace(decisions, options=decisions.options.but(params_ahead=False))
        found = min(found, as_decided(job, here), key=lambda made: made.peak_bytes)
        if found.peak_bytes <= limit_bytes and not found.over_bytes:
            return found
    other = as_decided(job, lean(decisions))
    if found.peak_bytes <= limit_bytes and other.peak_bytes <= limit_bytes:
        return other if sum(other.over_bytes.values()) < sum(found.over_bytes.values()) else found
    return other if other.peak_bytes < found.peak_bytes else found


def lean(decisions: Decisions) -> Decisions:
    """Without bundles across segments, and with stored copies whole between steps where layouts are not pinned."""
    params = tuple(
        msgspec.structs.replace(layouts, ahead=layouts.ahead and decisions.fixed) for layouts in decisions.params
    )
    return replace(decisions, options=decisions.options.lean, params=params)


def gave_up(plan: Plan, decisions: Decisions) -> bool:
    """Whether a plan of these decisions is a leaner one: without what `realise` gives up to fit.

    Args:
        plan: what `realise` made.
        decisions: of which.
    """
    return plan.options.before_passes != decisions.options.before_passes


def gathers(programs: Sequence[RankProgram]) -> bool:
    """Whether parameters are gathered before the block that reads them.

    Args:
        programs: of a plan, one per rank class.
    """
    return any(block.role is BlockRole.GATHER for program in programs for block in program.blocks.values())


def gathers_often(programs: Sequence[RankProgram]) -> bool:
    """Whether that is so elsewhere than in a step's first forwards: with every microbatch, or for a backward.

    Args:
        programs: as of `gathers`.
    """
    for program in programs:
        for step in program.steps:
            if step.block and program.blocks[step.block].role is BlockRole.GATHER:
                action = parse_action(step.action)
                if action.kind is not ActionKind.F or action.microbatch > 0:
                    return True
    return False


def as_decided(job: Job, decisions: Decisions) -> Realised:
    """The plan of these decisions, whether it fits or not.

    Args:
        job, decisions: as of `realise`.
    """
    return as_a_whole(assemble(job, decisions))
