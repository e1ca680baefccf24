"""An answer made a plan: its shardings, stages, schedule and recomputation as they stand, priced as plans of ours."""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec

from paraplan.baselines.planners.task import Answer, Task
from paraplan.cost_models.bound import rank_bound
from paraplan.cost_models.predict import predict, with_reserved, with_used_profile
from paraplan.cost_models.realised_plan import Realised, realised
from paraplan.ir.errors import ConstraintError, SolverLimitError
from paraplan.ir.plan import Certificate, Plan
from paraplan.ir.sizes import say_size
from paraplan.planner.assemble import assemble
from paraplan.planner.best_plan import BestPlan
from paraplan.planner.one_stage.roomier import needed_bytes
from paraplan.planner.passes.grad_reductions import ROOM
from paraplan.planner.passes.overlap_products import best_pieces
from paraplan.planner.passes.pass_context import PassContext
from paraplan.planner.passes.quickened import quickened
from paraplan.planner.pipeline.pipeline import pipelined
from paraplan.planner.recompute.presets import preset_fates
from paraplan.planner.schedules.complete import complete
from paraplan.planner.schedules.named import NAMED, named_orders
from paraplan.planner.schedules.schedule_problem import holders_of
from paraplan.rules.time_axis import program_micro

SCOPE = "these decisions: the work of the busiest stream of any rank"


def answered(task: Task, answer: Answer) -> BestPlan:
    """The plan of an answer.

    Raises:
        ConstraintError, NoPlanError: it cannot be made.
        SolverLimitError: it does not fit; says what it holds.
    """
    began = time.perf_counter()
    made = realised(planned(task, answer))
    _check_room(task, made)
    made = quickened(made, PassContext(task.budget, answer.pins))
    plan = with_reserved(_told(made), made.programs, task.budget)
    looks = answer.pins.reserve_bytes != 0 and task.job.cluster.backend == "cuda"
    if looks and needed_bytes(plan) > task.budget:
        raise SolverLimitError(f"{say_size(needed_bytes(plan))} would be reserved of {say_size(task.budget)}")
    seconds = time.perf_counter() - began
    return BestPlan(plan, seconds, seconds)


def planned(task: Task, answer: Answer) -> Plan:
    """An answer as a plan that is not priced yet.

    Raises:
        ConstraintError, NoPlanError: it cannot be made.
    """
    pins = answer.pins
    part, decisions = task.profiles.decisions(pins)
    decisions = answer.decisions or decisions
    program, count = part.program, decisions.num_microbatches
    fates = {name: preset_fates(program, name) for name in answer.remade}
    last = answer.remade[-1]  # layers that count as one
    remade = (*answer.remade, *[last] * (len(program.segments) - len(answer.remade)))
    chosen = tuple(fates[name][each.kind] for name, each in zip(remade, program.segments, strict=True))
    whole = assemble(part, replace(decisions, activations=chosen if any(chosen) else ()))
    if pins.pp in (None, 1):
        return msgspec.structs.replace(whole, cluster=task.job.cluster)
    name = pins.schedule or "1f1b"
    if program_micro(program, count).has_tail and count > 1 and name != "gpipe":
        raise ConstraintError(f"schedule {name}: the last stage runs all forwards before its first backward")
    if pins.stages is None:
        raise ConstraintError(f"an answer with pp={pins.pp} says no stages")
    orders = named_orders(name, pins.pp or 1, count, len(pins.stages) // (pins.pp or 1))
    schedule = complete(name, orders, num_replicas=NAMED[name].num_replicas)
    whole = msgspec.structs.replace(best_pieces(whole, pins.most_pieces), reducing_bytes=task.budget // ROOM)
    stages = (*pins.stages[:-1], (pins.stages[-1][0], len(program.segments)))
    return pipelined(whole, task.job.cluster, stages, schedule, holders_of(orders))


def _check_room(task: Task, made: Realised) -> None:
    over = {"device": made.peak_bytes - task.budget, **made.over_bytes}
    over = {where: nbytes for where, nbytes in over.items() if nbytes > 0}
    if over:
        said = ", ".join(f"{say_size(nbytes)} on the {where}" for where, nbytes in over.items())
        raise SolverLimitError(f"more is held than may be: {said}; the fullest rank holds {say_size(made.peak_bytes)}")


def _told(made: Realised) -> Plan:
    """The plan with its prediction and certificate."""
    plan, step_s = made.plan, made.simulation.step_s
    bound_s = min(rank_bound(trace.work for trace in made.simulation.traces), step_s)
    certificate = Certificate(
        status="pinned", objective_s=step_s, bound_s=bound_s, bound_scope=SCOPE, gap=(step_s - bound_s) / step_s
    )
    prediction = predict(plan, made.programs, made.simulation)
    plan = msgspec.structs.replace(plan, prediction=prediction, certificate=certificate)
    return plan if plan.profile is None else with_used_profile(plan, made.programs)
