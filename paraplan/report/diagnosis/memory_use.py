"""What memory does to a plan: the fullest device; what is done to hold less, each with the same plan without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from paraplan.cost_models.realised_plan import Realised, realised
from paraplan.ir.errors import ParaplanError
from paraplan.ir.machine.tier_placement import HERE
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.param_layouts import ParamLayouts
from paraplan.ir.plan import KindChoice, Plan
from paraplan.lowering.blocks.bundle import BUNDLE_BYTES
from paraplan.lowering.blocks.remat import RECOMPUTE, RERUN
from paraplan.report.diagnosis.records import MemoryUse, SavedMemory
from paraplan.report.diagnosis.step_parts import own_compute_s
from paraplan.report.memory_report import class_told
from paraplan.report.units import show_ranks

RECOMPUTATION, CHUNKS, UNBUNDLED = "recomputation", "running in chunks", "a collective for every small parameter"
HERE_READ = "gathering large parameters where they are read"
ORDERED = "a schedule of ops, executed again or waiting elsewhere"
STATES, PARAMS = "states", "parameters"
AWAY = frozenset(f"{what} on {tier}" for what in (STATES, PARAMS) for tier in TIERS)
"""What a plan keeps off the device between steps."""


def memory_use(made: Realised, budget_bytes: int | Sequence[int]) -> MemoryUse:
    """The fullest device, which leaves least of what it may hold.

    Args:
        made: of a plan.
        budget_bytes: what it may hold on a device; or, per rank class, on each of its devices.
    """
    peaks, prediction = made.simulation.peak_bytes, made.plan.prediction
    reserved = prediction.reserved_bytes if prediction is not None else ()
    needs = reserved if len(reserved) == len(peaks) else peaks
    budgets = (budget_bytes,) * len(peaks) if isinstance(budget_bytes, int) else budget_bytes
    fullest = max(range(len(peaks)), key=lambda index: (needs[index] - budgets[index], peaks[index]))
    told = class_told(made.plan, made.programs, made.simulation, fullest, 0)
    return MemoryUse(
        ranks=show_ranks(told.ranks),
        peak_bytes=told.peak_bytes,
        reserved_bytes=reserved[fullest] if needs is reserved else 0,
        budget_bytes=budgets[fullest],
        memory_bytes=told.memory_bytes,
        running=told.running,
        parts=told.by_role(),
    )


def saving(
    made: Realised, others: Mapping[str, Realised], budget_bytes: int, pinned: Callable[[str], bool]
) -> tuple[SavedMemory, ...]:
    """What a plan does to hold less, the dearest first.

    Args:
        made: of a plan.
        others: of the plan without each of these (`priced_without`).
        budget_bytes: what it may hold on a device.
        pinned: whether something was asked for.
    """
    found = [
        SavedMemory(
            what=what,
            pinned=pinned(what),
            costs_s=made.simulation.step_s - other.simulation.step_s,
            peak_bytes=other.peak_bytes,
            over_bytes=max(other.peak_bytes - budget_bytes, 0),
        )
        for what, other in others.items()
    ]
    found = [each for each in found if each.what not in (UNBUNDLED, HERE_READ) or each.costs_s > 0]  # else nobody minds
    return tuple(sorted(found, key=lambda each: -each.costs_s))


def priced_without(plan: Plan) -> dict[str, Realised]:
    """By what a plan does to hold less, the plan without it; not what cannot be executed so."""
    found = {what: _priced_or_none(other) for what, other in _without(plan)}
    return {what: other for what, other in found.items() if other is not None}


def keeping_compute_s(others: Mapping[str, Realised]) -> tuple[float, ...] | None:
    """Per rank class, the compute of the plan that recomputes nothing; None where the plan is that.

    Args:
        others: as for `saving`.
    """
    other = others.get(RECOMPUTATION) or others.get(ORDERED)
    return None if other is None else own_compute_s(other.plan, other.programs, other.simulation)


def _without(plan: Plan) -> list[tuple[str, Plan]]:
    """What a plan does to hold less, and the plan without it."""
    if plan.memory_actions is not None:  # an order of ops that runs some again and copies some away
        return [(ORDERED, msgspec.structs.replace(plan, memory_actions=None))]
    tiers = [("activations on " + tier, _fates(plan, (tier,))) for tier in TIERS]
    placed = [(f"{what} on {tier}", _home(plan, what, tier)) for what in (STATES, PARAMS) for tier in TIERS]
    bundled = msgspec.structs.replace(plan, bundle_bytes=BUNDLE_BYTES)
    ways = [(RECOMPUTATION, _fates(plan, (RECOMPUTE, RERUN))), (CHUNKS, _choices(plan, _whole)), *tiers, *placed]
    found = [(what, other) for what, other in ways if other.stages != plan.stages]
    found += [] if plan.params_ahead else [(HERE_READ, msgspec.structs.replace(plan, params_ahead=True))]
    return [*found, (UNBUNDLED, bundled)] if plan.bundle_bytes == 0 else found


def _fates(plan: Plan, fates: Sequence[str]) -> Plan:
    def kept(choice: KindChoice) -> KindChoice:
        left = {name: fate for name, fate in choice.activations.items() if fate not in fates}
        return msgspec.structs.replace(choice, activations=left)

    return _choices(plan, kept)


def _whole(choice: KindChoice) -> KindChoice:
    return msgspec.structs.replace(choice, split=None)


def _choices(plan: Plan, changed: Callable[[KindChoice], KindChoice]) -> Plan:
    stages = tuple(msgspec.structs.replace(stage, choices=tuple(map(changed, stage.choices))) for stage in plan.stages)
    return msgspec.structs.replace(plan, stages=stages)


def _home(plan: Plan, what: str, tier: str) -> Plan:
    """The plan whose states (and with them parameters) of a tier, or whose parameters alone, are on the device."""

    def back(layouts: ParamLayouts) -> ParamLayouts:
        if what == STATES and layouts.state_tier == tier:
            return layouts.placed(HERE, layouts.ahead)
        if what == PARAMS and layouts.stored_tier == tier:
            return layouts.placed(layouts.place._replace(params=""), layouts.ahead)
        return layouts

    stages = tuple(
        msgspec.structs.replace(stage, params={name: back(layouts) for name, layouts in stage.params.items()})
        for stage in plan.stages
    )
    away = any(layouts.state_tier for stage in stages for layouts in stage.params.values())
    late = plan.delayed_update if away else None
    return msgspec.structs.replace(plan, stages=stages, delayed_update=late, states_ahead=plan.states_ahead and away)


def _priced_or_none(plan: Plan) -> Realised | None:
    """A plan made of another by leaving something out; None where that cannot be executed so."""
    try:
        return realised(plan)
    except (ParaplanError, LookupError, ValueError):
        return None
