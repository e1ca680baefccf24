"""How gradients are reduced: after how many microbatches, and how many reductions may be under way.

A reduce-scatter holds what it reads until it is through, as does a sum over two axes, so lowering lets two be under
way and then waits, which costs little memory and, where reductions are slower than the backward that makes gradients,
time. `Plan.reducing_bytes` allows more; a pipeline's plans begin with a sixteenth of a device's memory. Where gradients
accumulate in shards, every microbatch's is reduced; `Plan.reduce_every` adds those of several up first, for the room of
whole gradients. Of a finished plan a few more are lowered and simulated: without a limit, and with what the plan left
free; reduced once a step and, in a pipeline, once for as many microbatches as it has positions. The fastest that fits
counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from paraplan.cost_models.realised_plan import Realised
from paraplan.ir.execution.rank_program import BlockRole, StepKind
from paraplan.ir.machine.mesh import P, parse_layout
from paraplan.ir.model.program import trained_params
from paraplan.ir.plan import Plan, Stage
from paraplan.planner.passes.pass_context import PassContext
from paraplan.planner.schedules.full_rounds import as_a_whole

GAIN = 1e-9
"""A step is shorter by more than a rounding."""
ROOM = 16
"""Of a device's memory, the part that reductions under way may hold where activations make room for them."""
WORTH_ROOM = 0.05
"""Share of a step that communication is waited for, from which on activations make room for reductions under way."""
OFTEN = 0.01
"""Of the bytes of gradients added up, what has to be reduced for every microbatch for fewer reductions to be tried:
those of norms alone are not."""
WORTH = 0.005
"""Share of a step that communication is waited for, from which on it is asked whether reductions can wait longer."""


def reducing(made: Realised, context: PassContext) -> Realised:
    """The plan with gradients reduced after as many microbatches, and as many at a time, as memory allows and is
    faster."""
    worth = WORTH_ROOM if made.plan.reducing_bytes else WORTH
    if made.simulation.exposed_comm_s < worth * made.simulation.step_s:
        return made
    best = _first_that_fits(made, more_under_way(made.plan, made.left_bytes(context.budget)), context)
    if _reduces_often(made):
        for plan in grouped(made.plan):
            best = _first_that_fits(best, _under_way(plan), context)
    return best


def _first_that_fits(made: Realised, plans: Iterable[Plan], context: PassContext) -> Realised:
    """The first of these plans that fits where that is faster, else what there is."""
    for plan in plans:
        tried = as_a_whole(plan)
        if context.fits(tried, made):
            return tried if tried.simulation.step_s < made.simulation.step_s * (1 - GAIN) else made
    return made


def grouped(plan: Plan) -> Iterator[Plan]:
    """The plan with gradients of more microbatches reduced at once, most first."""
    if plan.memory_actions is not None or len({each for stage in plan.stages for each in stage.mesh.devices}) < 2:
        return
    positions = len({stage.mesh.devices for stage in plan.stages})
    for every in dict.fromkeys((plan.num_microbatches, positions)):
        if 1 < every <= plan.num_microbatches:
            yield msgspec.structs.replace(plan, reduce_every=every)


def waiting_less(made: Realised) -> Iterator[Plan]:
    """The plan with gradients reduced after more microbatches, most first; nothing where waits for communication are
    not worth the room of whole gradients, or gradients accumulate whole already."""
    simulation, plan = made.simulation, made.plan
    if simulation.exposed_comm_s >= WORTH_ROOM * simulation.step_s and _reduces_often(made):
        yield from grouped(plan)


def _reduces_often(made: Realised) -> bool:
    """Whether gradients that matter are reduced before they are added up, and so for every microbatch."""
    params = made.plan.program.params
    often = every = 0
    for program in made.programs:
        reduced = {
            out
            for step in program.steps
            if step.kind is StepKind.CALL and program.role_of(step) is BlockRole.REDUCE
            for out in step.outs
        }
        for step in program.steps:
            if step.kind is StepKind.ACCUMULATE and step.args[0].source in params:
                elements = params[step.args[0].source].spec.numel
                every, often = every + elements, often + elements * (step.args[1] in reduced)
    return often > OFTEN * every


def _under_way(plan: Plan) -> Iterator[Plan]:
    whole = sum(8 * plan.program.params[name].spec.numel for name in trained_params(plan.program))
    return (msgspec.structs.replace(plan, reducing_bytes=most) for most in (whole, 0))


def more_under_way(plan: Plan, left_bytes: int) -> Iterator[Plan]:
    """The plan with more reductions under way, most first; nothing where no gradient is left to reduce.

    Args:
        plan: finished.
        left_bytes: what the fullest device leaves free.
    """
    if plan.memory_actions is not None or not any(map(_reduces, plan.stages)):
        return
    whole = sum(8 * plan.program.params[name].spec.numel for name in trained_params(plan.program))
    yield msgspec.structs.replace(plan, reducing_bytes=whole)
    if left_bytes > 0:
        yield msgspec.structs.replace(plan, reducing_bytes=min(left_bytes, whole))


def _reduces(stage: Stage) -> bool:
    """Whether some gradient is a sum over ranks when the backward is through."""
    return any(P in parse_layout(layouts.grad) for layouts in set(stage.params.values()))
