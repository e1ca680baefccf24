"""Steps of many microbatches from steps of few: a full pipeline's rounds are alike.

Problem: a pipeline of 576 microbatches is a million entries to lower and to simulate. Method: in a simulated step every
clock is a maximum of sums of earlier clocks, a recurrence linear in the max-plus algebra, and such a recurrence is
periodic from some round on: each further round of microbatches adds the same time (Baccelli, Cohen, Olsder, Quadrat
1992, Synchronization and Linearity, section 3.7). So a plan made for few microbatches, each as large as of many, is
lowered and simulated again and again with twice as many rounds as before, a round being as many microbatches as there
are positions, until the time of a round is that of the doubling before; that is carried on. Doubling, because what is
slower than the rest shows only when the slack before it is used up. `drift` says what the last two differ by, carried
on likewise, as a share of the step: 0 where rounds are periodic, and else the error to expect. Peaks are carried on as
well: a pipeline that is full holds no more microbatches, but the inputs of more.

Limits: schedules by name, of equal microbatches; a test holds it against whole simulations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from paraplan.cost_models.predict import predict, simulate_plan
from paraplan.ir.execution.schedule import split_classes, spread
from paraplan.ir.model.program import Program
from paraplan.ir.plan import Plan, Prediction
from paraplan.lowering import lower
from paraplan.planner.schedules.complete import complete
from paraplan.planner.schedules.named import NAMED, named_orders

ROUNDS = {"1f1b": 1}
"""Rounds a plan is made of at first: until a pipeline is full and its first backward is through."""
FULL = 2
"""Likewise of schedules not named there: interleaved ones have up to two rounds in flight."""
DRIFT = 1e-3
"""More drift than this calls for more rounds."""


class Carried(NamedTuple):
    """A plan of few microbatches with the prediction of many.

    Attributes:
        plan: the one of most microbatches that was simulated.
        count: microbatches it stands for.
        drift: what rounds of the last two doublings differ by, carried on, as a share of the step.
    """

    plan: Plan
    count: int
    drift: float = 0.0

    @property
    def said(self) -> Prediction:
        """What is predicted."""
        assert self.plan.prediction is not None
        return self.plan.prediction


def few_microbatches(schedule: str, count: int, positions: int) -> int:
    """Of how many microbatches a plan is made that stands for `count`; `count` itself where that saves nothing."""
    rounds = ROUNDS.get(schedule, FULL)
    return rounds * positions + count % positions if count > 6 * rounds * positions else count


def at_microbatches(plan: Plan, program: Program, count: int) -> Plan:
    """A pipeline's plan with more or fewer microbatches of the same size.

    Args:
        plan: under a schedule of `NAMED`.
        program: of the batch that they make up.
        count: of them.
    """
    name, size, positions = plan.schedule.name, plan.stages[0].mesh.size, _positions(plan)
    orders = named_orders(name, positions, count, len(plan.stages) // positions)
    schedule = complete(name, orders, num_replicas=NAMED[name].num_replicas)
    placed = spread(schedule, tuple(rank // size for rank in range(plan.cluster.num_devices)))
    return msgspec.structs.replace(
        plan,
        program=program,
        num_microbatches=count,
        prediction=None,
        certificate=None,
        schedule=split_classes(placed, plan.cluster.device_kinds()),
    )


def carried_on(plan: Plan, count: int, program_of: Callable[[int], Program]) -> Carried:
    """The plan with more rounds, and the prediction of `count` microbatches.

    Args:
        plan: priced, of `few_microbatches`.
        count: of the whole step.
        program_of: the program of a batch of so many microbatches.
    """
    rest = plan.num_microbatches % _positions(plan)
    found, drift = [Carried(plan, plan.num_microbatches)], math.inf
    while plan.num_microbatches < count and drift > DRIFT:
        more = min(2 * (plan.num_microbatches - rest) + rest, count)
        plan = priced(at_microbatches(plan, program_of(more), more))
        found.append(Carried(plan, more))
        if len(found) > 2:
            before, last = (_each(*pair, "step_s") for pair in itertools.pairwise(found[-3:]))
            ahead = count - more
            drift = ahead * abs(last - before) / (found[-1].said.step_s + ahead * last)
    if plan.num_microbatches == count:
        return Carried(plan, count)
    last_two, ahead = (found[-2], found[-1]), count - plan.num_microbatches
    times = {
        of: float(getattr(found[-1].said, of) + ahead * _each(*last_two, of))
        for of in ("step_s", "compute_s", "exposed_comm_s", "exposed_copy_s")
    }
    peaks = tuple(
        last + ahead * (last - before) // (last_two[1].count - last_two[0].count)
        for before, last in zip(*(each.said.peak_bytes for each in last_two), strict=True)
    )
    said = msgspec.structs.replace(found[-1].said, peak_bytes=peaks, **times)
    return Carried(msgspec.structs.replace(plan, prediction=said), count, drift)


def _each(before: Carried, after: Carried, of: str) -> float:
    """What each microbatch adds to a time."""
    return float(getattr(after.said, of) - getattr(before.said, of)) / (after.count - before.count)


def _positions(plan: Plan) -> int:
    return plan.cluster.num_devices // plan.stages[0].mesh.size


def again(found: Carried, plan: Plan, program_of: Callable[[int], Program]) -> Carried:
    """The same of a plan that differs in its stages."""
    few = few_microbatches(plan.schedule.name, found.count, _positions(plan))
    if few == found.count:
        return Carried(priced(plan), few)
    return carried_on(priced(at_microbatches(plan, program_of(few), few)), found.count, program_of)


def priced(plan: Plan) -> Plan:
    """The plan with its prediction."""
    programs = lower(plan)
    return msgspec.structs.replace(plan, prediction=predict(plan, programs, simulate_plan(plan, programs)))
