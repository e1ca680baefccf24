"""How many reductions of gradients may be under way: as many as memory has room for, where that is faster.

A reduce-scatter holds what it reads until it is through, as does a sum over two axes, so lowering lets two be under
way and then waits, which costs little memory and, where reductions are slower than the backward that makes gradients,
time; in a pipeline every stage's wait is the next one's. `Plan.reducing_bytes` allows more. Of a finished plan two
more are lowered and simulated: without a limit, and with what the plan left free; the first that fits counts, if it is
faster.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from paraplan.ir.mesh import P, parse_layout
from paraplan.ir.plan import Plan, Stage
from paraplan.ir.program import trained_params
from paraplan.planner.realise import Realised, realised


def reducing(made: Realised, budget_bytes: int) -> Realised:
    """The plan with as many reductions under way as memory allows, where that is faster by more than a rounding."""
    for plan in more_under_way(made.plan, made.peak_bytes, budget_bytes):
        tried = realised(plan)
        if tried.peak_bytes <= budget_bytes:
            return tried if tried.simulation.step_s < made.simulation.step_s * (1 - 1e-9) else made
    return made


def more_under_way(plan: Plan, peak_bytes: int, budget_bytes: int) -> Iterator[Plan]:
    """The plan with more reductions under way, most first; nothing where no gradient is left to reduce.

    Args:
        plan: finished.
        peak_bytes: what it peaks at.
        budget_bytes: what a device may hold.
    """
    if plan.memory_actions is not None or not any(map(_reduces, plan.stages)):
        return
    whole = sum(8 * plan.program.params[name].spec.numel for name in trained_params(plan.program))
    yield msgspec.structs.replace(plan, reducing_bytes=whole)
    if (room := budget_bytes - peak_bytes) > 0:
        yield msgspec.structs.replace(plan, reducing_bytes=min(room, whole))


def _reduces(stage: Stage) -> bool:
    """Whether some gradient is a sum over ranks when the backward is through."""
    return any(P in parse_layout(layouts.grad) for layouts in set(stage.params.values()))
