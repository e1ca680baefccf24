"""A pinned degree is searched as any other: what else is pinned can only make the plan slower."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.megatron_gpt import GPTSettings, MegatronGPT
from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.realised_plan import Budget, Realised
from paraplan.ir.errors import SolverLimitError
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.joint import promise
from paraplan.planner.joint.at_cut import PricedPosition, recomputed
from paraplan.planner.joint.combinations import Combination, combinations
from paraplan.planner.joint.estimate import Estimate, Pricer
from paraplan.planner.joint.prices.pricing import Pricing
from paraplan.planner.joint.promise import to_be_ordered
from paraplan.planner.joint.search_joint import JointSearch
from paraplan.planner.pipeline.cuts.balanced_cuts import cut_balanced
from paraplan.planner.pipeline.draft import Draft
from paraplan.planner.pipeline.pipeline import with_activations
from paraplan.planner.pipeline.pipeline_case import case_of
from paraplan.planner.pipeline.prices.stage_prices import StagePrices
from paraplan.planner.pipeline.searched_schedule import SEARCHED
from paraplan.planner.pipeline.stage_sharding import Shardings
from paraplan.planner.recompute.class_memory import ClassMemory
from paraplan.planner.recompute.stage_memory import LOOSE, recomputing
from paraplan.planner.schedules.named import NAMED
from paraplan.planner.schedules.order_times import named_times
from paraplan.planner.schedules.schedule_problem import StageCosts
from paraplan.planner.search import find, search

MIB = 2**20


@pytest.fixture(scope="module")
def gpt() -> Job:
    with torch.device("meta"):
        model = MegatronGPT(GPTSettings(256, 6, 4, 1024, 256, tied=False, flash=True))
        batch = {name: torch.zeros(32, 256, dtype=torch.int64) for name in ("input_ids", "labels")}
    program = capture(model, batch, precision="bf16")
    return Job(program, parse_cluster("4xH100"), OPTIMIZERS["adamw"], ModelRef(display="gpt"), {})


@pytest.mark.parametrize("memory", [None, 64 * MIB])
def test_more_pins_are_never_faster(gpt: Job, memory: int | None) -> None:
    """Nor is a search with the choices of its plan pinned slower than the one that made them."""
    pins = Constraints(pp=2, memory_bytes=memory, reserve_bytes=0)
    plan = search(gpt, pins, 60.0, certify=False).plan
    free_s = plan.prediction.step_s
    for name in NAMED:
        pinned = msgspec.structs.replace(pins, schedule=name)
        step_s = search(gpt, pinned, 60.0, certify=False).plan.prediction.step_s
        assert free_s <= (1.02 if memory is None else 1.1) * step_s, name
    chosen = msgspec.structs.replace(
        pins,
        schedule=plan.schedule.name,
        mesh=plan.stages[0].mesh.shape,
        microbatches=plan.num_microbatches,
        stages=tuple((stage.first, stage.stop) for stage in plan.stages),
    )
    assert search(gpt, chosen, 60.0, certify=False).plan.prediction.step_s <= 1.01 * free_s


def test_a_pipeline_of_few_actions_is_ordered_anew(gpt: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = Constraints(pp=4, microbatches=8, reserve_bytes=0)
    plan = search(gpt, pins, 60.0).plan
    step_s, certificate = plan.prediction.step_s, plan.certificate
    assert plan.schedule.name == SEARCHED and certificate.bound_s < step_s
    pinned = search(gpt, msgspec.structs.replace(pins, schedule=SEARCHED), 60.0, certify=False).plan
    assert step_s <= 1.02 * pinned.prediction.step_s
    monkeypatch.setattr(promise, "ORDERED", 0)
    named = search(gpt, pins, 60.0, certify=False).plan
    assert named.schedule.name in NAMED and named.prediction.step_s > step_s


def test_pipelines_that_come_near_a_plan_of_one_stage_are_ordered_anew(
    gpt: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their schedules, the first of each; not what was to take much longer, nor once time is short."""
    search_of = JointSearch(
        gpt, Constraints(), Shardings(lambda *_: pytest.fail("none is needed")), lambda _: None, Deadline(600.0)
    )
    of = [
        (1.0, Combination(2, (2,), 4, "1f1b", 1)),
        (1.01, Combination(2, (2,), 4, "zb-h1", 1)),
        (1.02, Combination(4, (1,), 4, "1f1b", 1)),
        (1.03, Combination(2, (2,), 512, "1f1b", 1)),
        (1.04, Combination(2, (2,), 8, "1f1b", 1)),
        (1.2, Combination(4, (1,), 8, "1f1b", 1)),
    ]
    estimates = [Estimate(each, step_s, 0, (), None) for step_s, each in of]  # type: ignore[arg-type]
    alone = Draft.of(find(gpt, Constraints(mesh=(4,), pp=1), certify=False).plan)
    alone.step_s = 1.0
    search_of.drafts.append(alone)
    search_of._drafted[id(alone)] = "one stage", None, {}
    tried: list[str] = []
    monkeypatch.setattr(JointSearch, "_try", lambda self, what, *_: tried.append(what))
    search_of._order_anew(estimates)
    assert tried == [f"{of[at][1].text}, ordered anew" for at in (0, 2, 4)]
    search_of.deadline._started -= 590.0
    search_of._order_anew(estimates)
    assert len(tried) == 3
    assert to_be_ordered(None, estimates, 33) == [] and to_be_ordered(estimates[0], estimates, 33) == estimates[:1]


def test_a_cut_whose_stages_fit_is_found(gpt: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where those by time do not, and no cut nearby has less to make again."""
    pins = Constraints(pp=4, microbatches=8, schedule="zb-h1", memory_bytes=72 * MIB, reserve_bytes=0)
    plan = search(gpt, pins, 60.0, certify=False).plan
    assert max(plan.prediction.peak_bytes) <= 72 * MIB
    monkeypatch.setattr(Pricer, "cut_to_fit", lambda *_: None)
    with pytest.raises(SolverLimitError):
        search(gpt, pins, 60.0, certify=False)


def test_stages_that_are_pinned_are_those_of_every_combination(gpt: Job) -> None:
    stages = ((0, 3), (3, 6), (6, 9), (9, len(gpt.program.segments)))
    listed = combinations(gpt, Constraints(pp=2, stages=stages))
    assert {each.pp for each in listed} == {2} and {each.each for each in listed} == {2}
    assert {each.schedule for each in listed} == {name for name, kind in NAMED.items() if kind.takes(2)}
    plan = search(gpt, Constraints(pp=2, stages=stages), 60.0, certify=False).plan
    assert tuple((stage.first, stage.stop) for stage in plan.stages) == stages


def _least_s(prices: StagePrices, segments: range, allowed: float) -> float:
    """What segments make again at least to save so little, where each may do parts of its options: the fractional
    knapsack along the hulls."""
    hulls = [prices.options[i] for i in segments]
    steps = sorted(
        ((b.extra_s - a.extra_s) / (a.saved_bytes - b.saved_bytes), a.saved_bytes - b.saved_bytes)
        for hull in hulls
        for a, b in itertools.pairwise(hull)
        if a.saved_bytes > b.saved_bytes
    )
    over, found_s = sum(hull[0].saved_bytes for hull in hulls) - allowed, 0.0
    for per_byte, nbytes in steps:
        less = min(max(over, 0.0), nbytes)
        over, found_s = over - less, found_s + per_byte * less
    assert over <= 1e-6
    return found_s


@pytest.mark.parametrize("share", [0.95, 0.8, 0.6, 0.4])
def test_positions_are_estimated_to_recompute_one_segment_too_much_at_most(gpt: Job, share: float) -> None:
    pp, count = 2, 8
    pricing = Pricing(gpt, Constraints(), 1 << 40, lambda _: None, Deadline(60.0))
    combination = Combination(pp, (2,), count, "1f1b", 1)
    (prices, *_) = pricing.priced(combination, [combination])
    orders = named_times("1f1b", pp, count, 1)
    bounds = cut_balanced(prices.seconds, orders.held, len(prices.seconds), count)
    assert bounds is not None
    memory = prices.memory((2,))
    stages = tuple(
        StageCosts(
            forward_s=sum(prices.forward_s[slice(*bound)]),
            backward_s=sum(prices.backward_s[slice(*bound)]),
            activation_bytes=sum(memory.saved_bytes[slice(*bound)]),
            fixed_bytes=memory.kept_bytes(*bound),
        )
        for bound in bounds
    )
    for position in range(pp):
        flying = min(pp - position, count)
        whole = stages[position].activation_bytes
        room = stages[position].fixed_bytes + int(share * flying * whole)
        roomy = stages[1 - position].fixed_bytes + flying * 100 * whole
        calls = [prices.workspace_bytes(bound) for bound in bounds]
        at = [PricedPosition(prices, calls[p] + (room if p == position else roomy)) for p in range(pp)]
        found, over, taken = recomputed(at, bounds, stages, orders)
        assert over is not None and over <= 0
        assert orders.peak_bytes(tuple(found))[position] <= room
        segments = range(*bounds[position])
        extra_s = sum(prices.options[i][taken[i]].extra_s for i in segments)
        assert found[position].backward_s == pytest.approx(stages[position].backward_s + extra_s)
        assert not any(taken[i] for i in range(*bounds[1 - position]))
        steps = [b.extra_s - a.extra_s for i in segments for a, b in itertools.pairwise(prices.options[i])]
        least_s = _least_s(prices, segments, share * whole)
        assert least_s * (1 - 1e-9) <= extra_s <= least_s + max(steps) * (1 + 1e-9)


def test_what_a_model_makes_again_is_read_off_between_two_prices(gpt: Job) -> None:
    """As some of its equal segments do one thing and some the next."""
    pricing = Pricing(gpt, Constraints(), 1 << 40, lambda _: None, Deadline(60.0))
    combination = Combination(2, (2,), 8, "1f1b", 1)
    (prices, *_) = pricing.priced(combination, [combination])
    totals, every = prices.totals, range(len(prices.options))
    most, least = totals.recomputing[0][0], totals.recomputing[-1][0]
    for share in np.linspace(0.0, 1.0, 23):
        allowed = least + share * (most - least)
        assert totals.least_extra_s(allowed) == pytest.approx(_least_s(prices, every, allowed), rel=1e-6, abs=1e-12)
    assert totals.least_extra_s(least - 1) == np.inf
    assert replace(totals, recomputing=totals.recomputing[:1]).least_extra_s(most) == 0.0


def test_estimates_of_pinned_stages_are_of_them(gpt: Job) -> None:
    pricing = Pricing(gpt, Constraints(), 1 << 40, lambda _: None, Deadline(60.0))
    combination = Combination(2, (2,), 8, "1f1b", 1)
    (prices, *_) = pricing.priced(combination, [combination])
    last = len(gpt.program.segments)
    free = Pricer(gpt.cluster, 1 << 40).estimate(combination, prices, (2,))
    uneven = Pricer(gpt.cluster, 1 << 40, ((0, 2), (2, last))).estimate(combination, prices, (2,))
    assert free is not None and uneven is not None
    assert uneven.bounds == ((0, 2), (2, last)) and uneven.step_s > free.step_s


@dataclass
class Jumping(ClassMemory):
    """Of which more is reserved than is alive as soon as that is above a threshold, as allocators' fragments are."""

    threshold: int = 0
    more: int = 0

    def needed(self, plan: Plan, budget: Budget) -> tuple[int, ...]:
        return tuple(n + self.more * (n > self.threshold) for n in super().needed(plan, budget))

    def seen(self, made: Realised, budget: Budget) -> tuple[int, ...]:
        return tuple(n + self.more * (n > self.threshold) for n in made.simulation.peak_bytes)


def test_what_a_position_makes_again_too_much_is_taken_back(gpt: Job) -> None:
    """What is over by a jump does not ask for as much to be made again once the jump is past."""
    pins = Constraints(pp=2, mesh=(2,), microbatches=8, schedule="1f1b", reserve_bytes=0)
    pricing = Pricing(gpt, pins, 1 << 40, lambda _: None, Deadline(60.0))
    combination = Combination(2, (2,), 8, "1f1b", 1)
    (prices, *_) = pricing.priced(combination, [combination])
    kept = case_of(gpt, pins).begun(prices.sharding, ())
    whole, options = kept.peak_bytes, prices.sharding.options
    threshold = int(0.9 * whole)
    memory = Jumping(threshold=threshold, more=int(0.45 * whole))
    budget = int(0.95 * whole)
    made = recomputing(
        kept.plan, lambda fates: with_activations(kept.plan, fates), lambda _: options, budget, memory=memory
    )
    assert max(memory.seen(made, budget)) <= budget
    # the first stage: two in flight; an option of a segment, what is left free, and half of it between two rounds
    step = max(a.saved_bytes - b.saved_bytes for hull in options for a, b in itertools.pairwise(hull))
    assert threshold >= made.simulation.peak_bytes[0] >= threshold - 2 * step - 2 * LOOSE * budget
