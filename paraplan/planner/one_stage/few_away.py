"""A plan that hardly fits, with the states of a few parameters off the device.

Layouts and places are chosen per kind of segment: where some MiB are missing, that moves the states of every layer, and
what recomputes has nothing left to make again but in chunks. Of a plan that is over its room by little, as many single
parameters' states wait on a tier as make room.

Limits: the states are all in one place; whose they are is a matter of size alone: of the shape that makes up most.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from paraplan.cost_models.predict import predict, with_reserved
from paraplan.cost_models.realised_plan import Realised
from paraplan.ir.machine.mesh import local_shape, parse_layout
from paraplan.ir.machine.tier_placement import HERE, TierPlacement
from paraplan.ir.model.program import trained_params
from paraplan.ir.plan import Plan, Prediction
from paraplan.planner.certificate import certified_as
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.passes.state_placement import NEAR, with_places
from paraplan.planner.schedules.full_rounds import as_a_whole

MOST, LEAST_BYTES, SPARE = 4, 8, 1.02
"""Plans made per place; of the states of a parameter's element, what is freed at least; times what is missing, what is
freed first."""

Needs = Callable[[Plan], int]
"""What a priced plan needs of a device."""


def with_few_away(plan: Plan, constraints: Constraints, budget: int, deadline: Deadline, needs: Needs) -> list[Plan]:
    """The plan with the states of a few parameters on a tier, if that makes it fit: the fastest of the places they may
    have; none where they may not leave the device, or not all of them suffice.

    Args:
        plan: priced, with what is reserved for it, which is more than the budget.
        constraints: under which it was planned.
        budget: bytes a device may hold.
        deadline: after which no other place is tried.
        needs: bytes a plan needs.
    """
    places = [place for place in NEAR if place in constraints.places]
    if plan.memory_actions is not None or plan.certificate is None:
        return []
    found: list[Plan] = []
    for place in places:
        if found and deadline.is_over:
            break
        found += _at(plan, place, constraints, budget, needs)
    return sorted(found, key=lambda each: _predicted(each).step_s)[:1]


def _at(plan: Plan, place: TierPlacement, constraints: Constraints, budget: int, needs: Needs) -> Iterator[Plan]:
    """The plan with as few states there as make it fit."""
    sizes = {name: size for name, size in _sizes(plan).items() if name not in constraints.params}
    alike = Counter[int]()
    for size in sizes.values():
        alike[size] += size
    free = sorted(sizes, key=lambda name: -alike[sizes[name]])
    least = [0, *itertools.accumulate(sizes[name] for name in free)]
    missing, freed, count = needs(plan) - budget, float(LEAST_BYTES), 0
    for _ in range(MOST):
        count = max(count + 1, bisect.bisect_left(least, SPARE * missing / freed))
        if count > len(free):
            return
        made = _priced(plan, with_places(plan, dict.fromkeys(free[:count], place)), budget)
        if made is None:
            return
        if needs(made) <= budget:
            yield made
            return
        freed = max((needs(plan) - needs(made)) / least[count], freed / 2)


def _sizes(plan: Plan) -> dict[str, int]:
    """Per parameter whose states are on the device, how many elements of a state a rank has."""
    trained, specs, found = trained_params(plan.program), plan.program.params, dict[str, int]()
    for stage in plan.stages:
        for name, layouts in stage.params.items():
            if name in trained and layouts.place == HERE:
                here = local_shape(specs[name].spec.shape, parse_layout(layouts.state), stage.mesh.shape)
                found[name] = math.prod(here)
    return found


def _priced(plan: Plan, moved: Plan, budget: int) -> Plan | None:
    """A plan made of another, with its prices and that one's proof; None where a tier has no room for it."""
    made: Realised = as_a_whole(moved)
    if made.over_bytes:
        return None
    prediction = predict(moved, made.programs, made.simulation)
    assert plan.certificate is not None
    proved = certified_as(msgspec.structs.replace(moved, prediction=prediction), plan.certificate)
    return with_reserved(proved, made.programs, budget)


def _predicted(plan: Plan) -> Prediction:
    assert plan.prediction is not None
    return plan.prediction
