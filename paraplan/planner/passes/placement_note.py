"""Why states and parameters are where a plan has them, in words for its notes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from paraplan.ir.errors import ParaplanError
from paraplan.ir.machine.mesh import local_shape, parse_layout
from paraplan.ir.machine.tiers import TIERS, is_in_files
from paraplan.ir.model.program import master_dtype, trained_params
from paraplan.ir.model.tensor import DTYPE_BYTES
from paraplan.ir.param_layouts import ParamLayouts
from paraplan.ir.plan import Plan
from paraplan.ir.sizes import say_size
from paraplan.planner.constraints import Constraints
from paraplan.planner.sharding.solve import Candidate


def places_note(
    best: Candidate, found: Sequence[Candidate], failures: Sequence[ParaplanError], constraints: Constraints
) -> tuple[str, ...]:
    """What was moved off the device where that was the planner's choice, and what plans without take.

    Args:
        best: the plan.
        found: every plan it was chosen among.
        failures: what was said of those that were not found.
        constraints: what was pinned.
    """
    if len(constraints.places) < 2:
        return ()
    notes = []
    stored = _bytes_where(best.plan, lambda layouts: layouts.stored_tier)
    if stored and not all(place.params for place in constraints.places):
        said = " and ".join(f"{say_size(nbytes)} of parameters on the {tier}" for tier, nbytes in stored.items())
        others = [each for each in found if not _bytes_where(each.plan, lambda layouts: layouts.stored_tier)]
        notes.append(
            f"per device {said}, copied here a segment ahead of their use: "
            + _instead(best, others, failures, "keep parameters on the device")
        )
    in_memory = any(not is_in_files(place.states) for place in constraints.places)
    for tier in _bytes_where(best.plan, _filed) if in_memory else ():
        others = [each for each in found if not _bytes_where(each.plan, _filed)]
        kept = f"keep all states in {TIERS[TIERS[tier].through].noun}'s memory"
        notes.append(f"optimizer states {TIERS[tier].where}: " + _instead(best, others, failures, kept))
    waiting = _bytes_where(best.plan, _waiting)
    if waiting and not all(place.grads_wait for place in constraints.places):
        others = [each for each in found if not _bytes_where(each.plan, _waiting)]
        notes.append(
            f"gradients wait on {' and '.join(TIERS[tier].noun for tier in waiting)}: "
            + _instead(best, others, failures, "keep gradients where they are used")
        )
    return tuple(notes)


def _waiting(layouts: ParamLayouts) -> str:
    return layouts.grad_tier


def _filed(layouts: ParamLayouts) -> str:
    return layouts.state_tier if is_in_files(layouts.state_tier) else ""


def _instead(best: Candidate, others: Sequence[Candidate], failures: Sequence[ParaplanError], what: str) -> str:
    """What plans that do otherwise take, or why there are none."""
    now = best.simulation.step_s
    if others:
        least = min(each.simulation.step_s for each in others)
        return f"a step of {now:.4g} s, and at best {least:.4g} s in plans that {what}"
    reason = f" ({str(failures[0]).split(';')[0]})" if failures else ""
    return f"no plan was found to {what}{reason}"


def _bytes_where(plan: Plan, tier_of: Callable[[ParamLayouts], str]) -> dict[str, int]:
    """Per tier, local bytes of the parameters said to be there."""
    found: dict[str, int] = {}
    trained = set(trained_params(plan.program))
    for name, (layouts, mesh) in {n: (x, s.mesh.shape) for s in plan.stages for n, x in s.params.items()}.items():
        spec, tier = plan.program.params[name].spec, tier_of(layouts)
        if tier:
            kept = master_dtype(plan.program.precision, spec.dtype) if name in trained else spec.dtype
            size = math.prod(local_shape(spec.shape, parse_layout(layouts.stored), mesh)) * DTYPE_BYTES[kept]
            found[tier] = found.get(tier, 0) + size
    return found
