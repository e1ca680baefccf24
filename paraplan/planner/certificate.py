"""A plan's certificate: what was proved of its step, and over which plans."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from paraplan.cost_models.predict import predict
from paraplan.ir.plan import Certificate, Plan
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import SolveLimits
from paraplan.planner.passes.cast_holding import AT_EVERY_USE
from paraplan.planner.schedules.full_rounds import programs_of
from paraplan.planner.sharding.solve import SCOPE, Candidate

IN_EACH_PHASE = "; what forward and backward both read moved in each"
"""Of what a bound is where a segment's forward and backward run as one."""

MEASURED_APART = "; ops that one kernel does together as measured one by one"
"""Of what a bound is where such times were measured."""

PINNED = "; pinned:"
"""Before what was pinned, in a bound's scope."""

IN_SPACE = (
    "{count} combinations of pp, mesh (one axis, or two with the inner one in a node), microbatches, named schedule "
    "and stages a position, however stages are cut where a position has one, and evenly but for {spread} where it has "
    "more; one sharding per segment kind, captured op order, no op or transfer taking less in all when its samples or "
    "its work are divided further"
)
"""Of what a joint search's bound is."""

OPTIMAL_GAP = SolveLimits.relative_gap
"""What a plan may be above its bound and be called optimal within the bound's scope: as much as solvers leave."""

FAULT = "this is a fault of the planner's, not of your model; please report it"


def status_of(gap: float) -> str:
    """What is proved of a plan whose step is so much of itself above what no plan in scope is below."""
    return "optimal" if gap <= OPTIMAL_GAP else "feasible"


def with_pins(plan: Plan, constraints: Constraints) -> Plan:
    """The plan, its certificate's scope naming what was pinned of every plan in it, numerics included.

    Args:
        plan: certified.
        constraints: as the user gave them.
    """
    pins = ", ".join(f"{name}={_word(value)}" for name, value in constraints.as_data.items())
    if plan.certificate is None or not pins or PINNED in plan.certificate.bound_scope:
        return plan
    scope = f"{plan.certificate.bound_scope}{PINNED} {pins}"
    return msgspec.structs.replace(plan, certificate=msgspec.structs.replace(plan.certificate, bound_scope=scope))


def _word(value: object) -> str:
    return f"{len(value)} of them" if isinstance(value, dict) else str(value).replace(" ", "")


def certified(best: Candidate, bound_s: float, num_meshes: int) -> Plan:
    """The plan with its prediction and certificate; a bound above the step is our fault, withdrawn and told.

    Args:
        best: the plan, with its simulation.
        bound_s: no plan in scope has a shorter step.
        num_meshes: that were solved.
    """
    step_s, plan = best.simulation.step_s, best.plan
    bound_s, notes = _withdrawn(plan, bound_s, step_s)
    plan = msgspec.structs.replace(plan, notes=(*plan.notes, *notes))
    bound_s = min(bound_s, step_s)
    scope = SCOPE if num_meshes == 1 else f"{SCOPE}; best of {num_meshes} meshes"
    scope += "".join(_outside(plan))
    gap = (step_s - bound_s) / step_s
    certificate = Certificate(
        status=status_of(gap), objective_s=best.objective_s, bound_s=bound_s, bound_scope=scope, gap=gap
    )
    prediction = predict(best.plan, programs_of(best.plan), best.simulation)
    return msgspec.structs.replace(plan, prediction=prediction, certificate=certificate)


def certified_as(plan: Plan, known: Certificate) -> Plan:
    """A priced plan under a bound that was found beside another plan; one above its step is withdrawn and told."""
    assert plan.prediction is not None
    step_s = plan.prediction.step_s
    bound_s, notes = _withdrawn(plan, known.bound_s, step_s)
    gap = (step_s - min(bound_s, step_s)) / step_s
    own = known if plan.certificate is None else plan.certificate
    certificate = Certificate(
        status=status_of(gap),
        objective_s=own.objective_s,
        bound_s=min(bound_s, step_s),
        bound_scope=known.bound_scope,
        gap=gap,
    )
    return msgspec.structs.replace(plan, certificate=certificate, notes=(*plan.notes, *notes))


def _outside(plan: Plan) -> list[str]:
    """What a plan does that bounds do not count, said in their scope."""
    joined = any(choice.split is not None and choice.split.at_once for s in plan.stages for choice in s.choices)
    apart = plan.profile is not None and plan.cluster.backend != "cpu"
    ways = (plan.hold_casts, AT_EVERY_USE), (joined, IN_EACH_PHASE), (apart, MEASURED_APART)
    return [words for does, words in ways if does]


def _withdrawn(plan: Plan, bound_s: float, step_s: float) -> tuple[float, tuple[str, ...]]:
    """A bound; 0 and a note of it where it is above the step of a plan that does nothing outside its scope."""
    if _outside(plan) or bound_s <= step_s * (1 + 1e-6):
        return bound_s, ()
    return 0.0, (f"no bound is certified: {bound_s:.6g} s was found, above the simulated step; {FAULT}",)


def certified_alike(plan: Plan, others: Iterable[Plan]) -> Plan:
    """A plan of one stage of which nothing is proved, with what is proved of others on its mesh in its microbatches.

    Args:
        plan: priced and certified.
        others: likewise.
    """
    assert plan.prediction is not None and plan.certificate is not None
    step_s, best = plan.prediction.step_s, plan.certificate
    for other in others if best.bound_s <= 0.0 else ():
        known = other.certificate
        meshes, counts = [{each.mesh.shape for each in one.stages} for one in (plan, other)], plan.num_microbatches
        alike = meshes[0] == meshes[1] and counts == other.num_microbatches and len(plan.stages) == len(other.stages)
        if known is not None and alike and len(plan.stages) == 1 and best.bound_s < known.bound_s <= step_s:
            gap = (step_s - known.bound_s) / step_s
            best = msgspec.structs.replace(known, status=status_of(gap), objective_s=best.objective_s, gap=gap)
    return msgspec.structs.replace(plan, certificate=best)


def certified_in_space(plan: Plan, bound_s: float, count: int, spread: int = 1) -> Plan:
    """A joint search's plan with a bound on every combination searched; as it is where nothing was proved of them.

    Args:
        plan: priced; what it was certified by alone is of fewer plans.
        bound_s: no combination has a shorter step.
        count: of combinations.
        spread: stages that a segment may be off an even cut.
    """
    assert plan.prediction is not None and plan.certificate is not None
    step_s = plan.prediction.step_s
    if bound_s <= 0.0:
        return plan
    if bound_s > step_s * (1 + 1e-6):
        note = f"no bound of the space is certified: {bound_s:.6g} s was found, above the simulated step; {FAULT}"
        return msgspec.structs.replace(plan, notes=(*plan.notes, note))
    gap = (step_s - bound_s) / step_s
    certificate = Certificate(
        status=status_of(gap),
        objective_s=plan.certificate.objective_s,
        bound_s=bound_s,
        bound_scope=IN_SPACE.format(count=count, spread="a stage" if spread == 1 else f"{spread} stages"),
        gap=gap,
    )
    return msgspec.structs.replace(plan, certificate=certificate)
