"""Why a plan takes what it takes, what more would be worth, and why it is not another: `paraplan.explain`.

Three kinds of answers, told apart wherever they are shown: what the plan's own simulation says; the same plan simulated
on a faster cluster, or without what it does to hold less; and plans made anew of the plan's job. Needs no torch: a plan
file has its program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from paraplan.api import Plan, Progress
from paraplan.cost_models.realised_plan import Realised, realised
from paraplan.ir import plan as ir_plan
from paraplan.ir.errors import ConstraintError
from paraplan.ir.options import keywords_of
from paraplan.ir.plan_words import plan_phrases, plan_words
from paraplan.ir.sizes import say_size
from paraplan.planner.alternatives.replan import Alternative, WithMore, alternative, constraints_of, with_more_memory
from paraplan.planner.constraints import Constraints, device_budget
from paraplan.planner.mixed.idle_groups import IDLE
from paraplan.report.diagnosis.faster import faster
from paraplan.report.diagnosis.html import ShownDiagnosis
from paraplan.report.diagnosis.memory_use import (
    AWAY,
    RECOMPUTATION,
    keeping_compute_s,
    memory_use,
    priced_without,
    saving,
)
from paraplan.report.diagnosis.records import (
    AS_FAST,
    CONTRADICTS,
    FASTER,
    NOT_FOUND,
    SLOWER,
    TOO_LARGE,
    Breakdown,
    Diagnosis,
    MoreMemory,
    Over,
    PartDifference,
    WhyNot,
)
from paraplan.report.diagnosis.step_parts import breakdowns, critical

EXTRA_BYTES = 1 << 30
"""How much more memory is asked about."""
_SHOWN = 6
"""Stages named one by one."""
ALIKE = 1e-6
"""Relative difference up to which two steps are as fast."""


def explain(
    plan: Plan,
    why_not: Mapping[str, Any] | None = None,
    *,
    time_limit_s: float = 20.0,
    progress: Progress | None = None,
) -> Diagnosis:
    """Find out what binds a plan, what more would be worth, what else was tried, and why it is not another.

    Args:
        plan: made by `compile`, or loaded.
        why_not: options of `Constraints` by keyword, such as {"tp": 8, "pp": 4}: what the same job comes to with them.
        time_limit_s: for each search of a plan made anew; 0: none is, and what a GiB more is worth is not said.
        progress: told what is being done.
    Raises:
        ConstraintError: a value of `why_not` cannot be read, or there is no time to plan with it; or the limit is no
            time.
        InvalidPlanError: what the plan's file says was pinned is none.
        TypeError: there is no such option.
    """
    if why_not is not None and not time_limit_s > 0:
        raise ConstraintError(
            f"why_not is planned anew, and time_limit_s={time_limit_s} (--time-limit) leaves no time: give some seconds"
        )
    if not time_limit_s >= 0:
        raise ConstraintError(f"a time limit of {time_limit_s} s: give a number of seconds, or 0 to plan nothing anew")
    tell = progress or (lambda text: None)
    tell("simulating")
    data, asked = plan.data, constraints_of(plan.data)
    made = Realised(data, plan.programs, plan.simulate())
    budget = device_budget(data.cluster, asked)
    others = priced_without(data)
    positions = breakdowns(data, made.programs, made.simulation, keeping_compute_s(others))
    binding = critical(data, made.programs, made.simulation, positions)
    other = None if why_not is None else alternative(data, why_not, time_limit_s, tell)
    more = with_more_memory(data, EXTRA_BYTES, time_limit_s, tell) if time_limit_s > 0 else None
    return ShownDiagnosis(
        title=f"{data.model.display} on {data.cluster.name}",
        plan=plan_words(data),
        step_s=made.simulation.step_s,
        bound_s=None if data.certificate is None else data.certificate.bound_s,
        binding=binding,
        positions=positions if len(positions) > 1 else (),
        memory=memory_use(made, _class_budgets(data, asked)),
        saving=saving(made, others, budget, lambda what: _is_pinned(what, asked)),
        faster=faster(data, plan.programs, made.simulation),
        more_memory=None if more is None else _more_memory(data, more),
        tried=data.tried,
        why_not=None if other is None or why_not is None else _why_not(binding, other, why_not, budget),
        notes=_notes(data, searched=time_limit_s > 0),
    )


def _class_budgets(data: ir_plan.Plan, asked: Constraints) -> tuple[int, ...]:
    """Per rank class, what each of its devices may hold."""
    cluster, first = data.cluster, dict[int, int]()
    for rank, of in enumerate(data.schedule.rank_class):
        first.setdefault(of, rank)
    groups = {of: cluster.groups.index(cluster.group_of(rank)) for of, rank in first.items()}
    return tuple(device_budget(cluster, asked, groups.get(of)) for of in range(len(data.schedule.classes)))


def _is_pinned(what: str, asked: Constraints) -> bool:
    """Whether what is done to hold less was asked for, and not the planner's choice."""
    if what == RECOMPUTATION:
        return asked.recompute not in (None, "none")
    if what in AWAY:
        return asked.pins_away
    return False


def _more_memory(data: ir_plan.Plan, found: WithMore) -> MoreMemory:
    step_s = _step_s(data)
    family = f"{_words(found.family)}"
    if found.plan is None:
        return MoreMemory(
            extra_bytes=EXTRA_BYTES, family=family, step_s=None, again_s=None, saved_s=0.0, said=found.said
        )
    again_s = None if found.again is None else _step_s(found.again)
    base = data if found.again is None or _step_s(found.again) > step_s else found.again
    saved = max(_step_s(base) - _step_s(found.plan), 0.0)
    return MoreMemory(
        extra_bytes=EXTRA_BYTES,
        family=family,
        step_s=_step_s(found.plan),
        again_s=again_s,
        saved_s=saved,
        changed=_changed(base, found.plan) if saved else (),
    )


def _changed(before: ir_plan.Plan, after: ir_plan.Plan) -> tuple[str, ...]:
    """What a plan does that another does not, both ways, in words."""
    old, new = plan_phrases(before), plan_phrases(after)
    gone = [f"no longer {word}" for word in old if word not in new]
    return (*gone, *(f"now {word}" for word in new if word not in old))


def _why_not(binding: Breakdown, other: Alternative, asked: Mapping[str, Any], budget: int) -> WhyNot:
    said = WhyNot(
        asked=_pins(asked),
        kept=_pins(other.kept),
        dropped=_pins(other.dropped),
        verdict=CONTRADICTS,
        said=other.contradiction or other.no_plan,
    )
    if other.contradiction:
        return said
    if other.plan is None:
        allowed = min(other.constraints.memory_bytes or budget, budget)
        over = tuple(each for how, made in other.too_large if (each := _over(how, realised(made), allowed)))
        return msgspec.structs.replace(said, verdict=TOO_LARGE if over else NOT_FOUND, over=over)
    made = realised(other.plan)
    kept_s = keeping_compute_s(priced_without(made.plan))
    positions = breakdowns(made.plan, made.programs, made.simulation, kept_s)
    there = critical(made.plan, made.programs, made.simulation, positions)
    longer = there.step_s - binding.step_s
    keys = dict.fromkeys(part.key for part in (*binding.parts, *there.parts))
    differences = [PartDifference(key=key, here_s=binding.of(key), there_s=there.of(key)) for key in keys]
    return msgspec.structs.replace(
        said,
        verdict=AS_FAST if abs(longer) <= ALIKE * binding.step_s else SLOWER if longer > 0 else FASTER,
        plan=plan_words(other.plan),
        step_s=there.step_s,
        peak_bytes=made.peak_bytes,
        breakdown=there,
        differences=tuple(sorted(differences, key=lambda each: -abs(each.there_s - each.here_s))),
    )


def _over(how: str, made: Realised, budget: int) -> Over | None:
    use = memory_use(made, budget)
    if use.needed_bytes <= budget:
        return None
    return Over(how=how, peak_bytes=use.needed_bytes, over_bytes=use.needed_bytes - budget, parts=use.parts)


def _notes(data: ir_plan.Plan, searched: bool) -> tuple[str, ...]:
    """What the answers rest on."""
    measured = "plans made anew price ops that this plan lacks by the model, for its file has the times of its own ops"
    layered = "plans made anew have a layer as one segment, as this plan does"
    idle = f"all answers are of {data.cluster.name} alone; plan anew for those of the groups that the plan leaves idle"
    pins = constraints_of(data)
    return (
        *((idle,) if any(IDLE in note for note in data.notes) else ()),
        *((measured,) if searched and data.profile is not None else ()),
        *((layered,) if searched and pins.recompute not in (None, "none") else ()),
    )


def _pins(pins: Mapping[str, Any]) -> str:
    """`tp=8, pp=4`."""
    return ", ".join(f"{word}={_value(word, value)}" for word, value in pins.items())


def _words(constraints: Constraints) -> str:
    return _pins(keywords_of(constraints))


def _value(word: str, value: Any) -> str:
    if word in ("memory", "reserve") and isinstance(value, int):
        return say_size(value).replace(" ", "")
    if word == "stages" and len(value) > _SHOWN:
        return f"{len(value)} as they are"
    if isinstance(value, (tuple, list)):
        return ",".join(":".join(map(str, each)) if isinstance(each, (tuple, list)) else str(each) for each in value)
    return str(value)


def _step_s(plan: ir_plan.Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s
