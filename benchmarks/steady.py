"""Steps of many microbatches from steps of few: a full pipeline's rounds are alike.

Problem: a pipeline of 576 microbatches is a million entries to lower and to simulate. Method: in a simulated step every
clock is a maximum of sums of earlier clocks, a recurrence linear in the max-plus algebra, and such a recurrence is
periodic from some round on: each further round of microbatches adds the same time (Baccelli, Cohen, Olsder, Quadrat
1992, Synchronization and Linearity, section 3.7). So a plan made for few microbatches, each as large as of many, is
lowered and simulated with one and with two rounds more, and the last round's time is carried on. A round is as many
microbatches as there are positions. `drift` says what the last two rounds differ by, carried on likewise, as a share of
the step: 0 where they are periodic, and else the error to expect. Memory is that of the most microbatches simulated,
since a pipeline that is full holds no more of them.

Limits: schedules by name, of equal microbatches; a test holds it against whole simulations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from paraplan.cost_models.predict import predict, simulate_plan
from paraplan.ir.lower import lower
from paraplan.ir.plan import Plan, Prediction
from paraplan.ir.program import Program
from paraplan.ir.schedule import split_classes, spread
from paraplan.planner.schedules.named import NAMED, named_orders
from paraplan.planner.schedules.transfers import complete

ROUNDS = {"1f1b": 1}
"""Rounds before those compared: until a pipeline is full and its first backward is through."""
FULL = 2
"""Likewise of schedules not named there: interleaved ones have up to two rounds in flight."""


class Carried(NamedTuple):
    """A plan of few microbatches with the prediction of many.

    Attributes:
        plan: the one of most microbatches that was simulated.
        count: microbatches it stands for.
        drift: what the last two rounds differ by, carried on, as a share of the step.
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
    first = ROUNDS.get(schedule, FULL) * positions + count % positions
    return first if count > first + 2 * positions else count


def at_microbatches(plan: Plan, program: Program, count: int) -> Plan:
    """A pipeline's plan with more or fewer microbatches of the same size.

    Args:
        plan: under a schedule of `NAMED`.
        program: of the batch that they make up.
        count: of them.
    """
    name, size = plan.schedule.name, plan.stages[0].mesh.size
    positions = plan.cluster.num_devices // size
    orders = named_orders(name, positions, count, len(plan.stages) // positions)
    schedule = complete(name, orders, num_replicas=NAMED[name].num_replicas)
    placed = spread(schedule, tuple(rank // size for rank in range(plan.cluster.num_devices)))
    return msgspec.structs.replace(
        plan, program=program, num_microbatches=count, prediction=None, certificate=None,
        schedule=split_classes(placed, plan.cluster.device_kinds()),
    )  # fmt: skip


def carried_on(plan: Plan, count: int, program_of: Callable[[int], Program]) -> Carried:
    """The plan with two rounds more, and the prediction of `count` microbatches.

    Args:
        plan: priced, of `few_microbatches`.
        count: of the whole step.
        program_of: the program of a batch of so many microbatches.
    """
    few, first = plan.num_microbatches, plan.prediction
    assert first is not None
    if few == count:
        return Carried(plan, count)
    positions = plan.cluster.num_devices // plan.stages[0].mesh.size
    said = [first]
    for more in (1, 2):
        plan = priced(at_microbatches(plan, program_of(few + more * positions), few + more * positions))
        assert plan.prediction is not None
        said.append(plan.prediction)
    rounds = (count - plan.num_microbatches) // positions
    before, last = (b.step_s - a.step_s for a, b in itertools.pairwise(said))

    def whole(of: str) -> float:
        return float(getattr(said[2], of) + rounds * (getattr(said[2], of) - getattr(said[1], of)))

    times = {of: whole(of) for of in ("step_s", "compute_s", "exposed_comm_s", "exposed_copy_s")}
    plan = msgspec.structs.replace(plan, prediction=msgspec.structs.replace(said[2], **times))
    return Carried(plan, count, rounds * abs(last - before) / times["step_s"])


def again(found: Carried, plan: Plan, program_of: Callable[[int], Program]) -> Carried:
    """The same of a plan that differs in its stages."""
    positions = plan.cluster.num_devices // plan.stages[0].mesh.size
    few = few_microbatches(plan.schedule.name, found.count, positions)
    if few == found.count:
        return Carried(priced(plan), few)
    return carried_on(priced(at_microbatches(plan, program_of(few), few)), found.count, program_of)


def priced(plan: Plan) -> Plan:
    """The plan with its prediction."""
    programs = lower(plan)
    return msgspec.structs.replace(plan, prediction=predict(plan, programs, simulate_plan(plan, programs)))
