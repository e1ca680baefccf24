"""Who updates states on the host, by simulation: the host, or the device, to which they are then fetched.

Whether copies hide, one run's behind another's update or behind the backward, is not told by their work alone, which is
what layouts are chosen by. So of a plan that leaves states on the host, parameters of equal shape and layouts are given
to the device or back as long as the simulated step gets faster and fits: none, all, then one kind after the other, the
largest first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import msgspec

from paraplan.ir.plan import ParamLayouts, Plan, Stage

Group = tuple[tuple[int, ...], str]
"""Parameters of one shape that lie alike."""


def with_fetched(plan: Plan, groups: frozenset[Group]) -> Plan:
    """The plan in which the device updates these parameters of those on the host, and the host the others."""

    def changed(name: str, layouts: ParamLayouts) -> ParamLayouts:
        away = layouts.state_tier == "host"
        return msgspec.structs.replace(layouts, fetched=group_of(plan, name, layouts) in groups) if away else layouts

    def stage_of(stage: Stage) -> Stage:
        return msgspec.structs.replace(stage, params={name: changed(name, x) for name, x in stage.params.items()})

    return msgspec.structs.replace(plan, stages=tuple(map(stage_of, plan.stages)))


def choose_ahead(plan: Plan, step_s: Callable[[Plan], float]) -> Plan:
    """The plan whose first states to come to their update set out before the last backward, where that is faster."""
    if not any(layouts.staged for stage in plan.stages for layouts in stage.params.values()):
        return plan
    return min((plan, msgspec.structs.replace(plan, states_ahead=True)), key=step_s)


def group_of(plan: Plan, name: str, layouts: ParamLayouts) -> Group:
    """A parameter's."""
    return plan.program.params[name].spec.shape, f"{layouts.stored}/{layouts.grad}/{layouts.state}"


def choose_fetched(plan: Plan, step_s: Callable[[Plan], float]) -> Plan:
    """The plan with the states fetched that make it fastest.

    Args:
        plan: with states on the host, updated there.
        step_s: what a plan's step takes; infinite where it does not fit.
    """
    every = [
        (group_of(plan, name, layouts), layouts.fetched)
        for stage in plan.stages
        for name, layouts in stage.params.items()
        if layouts.state_tier == "host"
    ]
    sizes = Counter(group for group, _ in every)
    order = sorted(sizes, key=lambda group: -math.prod(group[0]) * sizes[group])
    best, best_s = frozenset(group for group, fetched in every if fetched), step_s(plan)
    for groups in (frozenset[Group](), frozenset(order)):
        best, best_s = min((best, best_s), (groups, step_s(with_fetched(plan, groups))), key=lambda each: each[1])
    for group in order if len(order) > 1 else ():
        flipped = best ^ {group}
        best, best_s = min((best, best_s), (flipped, step_s(with_fetched(plan, flipped))), key=lambda each: each[1])
    return with_fetched(plan, best)
