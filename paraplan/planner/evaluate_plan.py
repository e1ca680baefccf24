"""Decisions made a plan, lowered and simulated; where that is over a budget, a leaner one of the same layouts.

Large parameters that are gathered a segment ahead (`Plan.params_ahead`) are held beside those of the segment before;
bundles of several segments' small parameters save latency and hold a few MiB more (`lowering.blocks.bundle`), and a
stored copy that is gathered ahead of the step's first use lies beside the shard it was gathered from
(`ParamLayouts.ahead`): a plan that does not fit with them is tried without before anything dearer is. So do states
that come to their update in runs as large as bundles. The first is given up alone where that is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import msgspec

from paraplan.cost_models.realised_plan import Realised
from paraplan.ir.execution.rank_program import Block, BlockRole, InstrKind, RankProgram
from paraplan.ir.execution.schedule import ActionKind, parse_action
from paraplan.ir.plan import Plan
from paraplan.ir.process.memo import SESSION, Lately, Same
from paraplan.lowering.blocks import bundle
from paraplan.planner.assemble import Decisions, Job, assemble
from paraplan.planner.schedules.full_rounds import as_a_whole

_KEPT: Lately[Realised] = SESSION.lately("evaluate_plan.kept", 12)
FAR = 1.02
"""How much more than it may a lean plan holds where no other of the same layouts is tried."""


def realise(job: Job, decisions: Decisions, limit_bytes: float = float("inf"), is_doubtful: bool = False) -> Realised:
    """The plan of these decisions where it fits so; else the leaner of it and of `lean`.

    Args:
        job: what is planned.
        decisions: made for it.
        limit_bytes: that a device may hold.
        is_doubtful: whether it hardly fits: if the lean one by far does not, no other is made.
    """
    if is_doubtful and (other := as_decided(job, lean(decisions))).peak_bytes > FAR * limit_bytes:
        return other
    found = as_decided(job, decisions)
    if found.peak_bytes <= limit_bytes and not found.over_bytes:
        return found
    if decisions.options.params_ahead and gathers_large(found.programs) and found.peak_bytes > limit_bytes:
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


def gathers_large(programs: Sequence[RankProgram]) -> bool:
    """Whether large parameters are gathered before the block that reads them: what `params_ahead` is about.

    Args:
        programs: of a plan, one per rank class.
    """
    return any(map(_is_large, (block for program in programs for block in program.blocks.values())))


def gathers_often(programs: Sequence[RankProgram], large: bool = False) -> bool:
    """Whether parameters are gathered elsewhere than in a step's first forwards: with every microbatch, or for a
    backward.

    Args:
        programs: as of `gathers_large`.
        large: whether large ones alone are asked for.
    """
    for program in programs:
        for step in program.steps:
            block = program.blocks.get(step.block) if step.block else None
            if block is not None and (_is_large(block) if large else block.role is BlockRole.GATHER):
                action = parse_action(step.action)
                if action.kind is not ActionKind.F or action.microbatch > 0:
                    return True
    return False


def _is_large(block: Block) -> bool:
    """Whether a block issues the gather of a parameter that travels with no other (see `lowering.blocks.bundle`)."""
    if block.role is not BlockRole.GATHER or len(block.inputs) != 1:
        return False
    issues = any(instr.kind is InstrKind.COLLECTIVE for instr in block.instrs)
    return issues and block.values[block.inputs[0]].nbytes > bundle.SMALL_BYTES


def as_decided(job: Job, decisions: Decisions) -> Realised:
    """The plan of these decisions, whether it fits or not; those that keep everything are asked for again and again.

    Args:
        job, decisions: as of `realise`.
    """
    if any(decisions.activations):
        return as_a_whole(assemble(job, decisions))
    given = (getattr(job, each.name) for each in fields(job))
    key = decisions.key, *(each if isinstance(each, bool | str) else Same(each) for each in given)
    return _KEPT.get(key, lambda: as_a_whole(assemble(job, decisions)))
