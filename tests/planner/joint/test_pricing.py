"""What is priced of a space, and what is left unpriced since it comes nowhere near."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import nn

from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.errors import ConstraintError, InvalidPlanError
from paraplan.ir.machine.mesh import make_mesh
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.ir.process.memo import release_caches
from paraplan.ir.process.workers import Workers
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints, device_budget
from paraplan.planner.deadline import Deadline, SolveLimits
from paraplan.planner.joint import estimating
from paraplan.planner.joint.combinations import Combination, combinations
from paraplan.planner.joint.estimating import estimate_best
from paraplan.planner.joint.prices import pricing as pricing_module
from paraplan.planner.joint.prices import sharding_front
from paraplan.planner.joint.prices.pricing import GAP, NEAR, Pricing, pricing_beside
from paraplan.planner.joint.prices.pricing_order import Way, in_turn, steps_of, usual_samples, ways_of
from paraplan.planner.joint.prices.pricing_rounds import PricingRounds
from paraplan.planner.pipeline.cuts.stage_cuts import cut_chain
from paraplan.planner.pipeline.prices.same_layouts import in_same_layouts
from paraplan.planner.pipeline.prices.stage_prices import Sharding
from paraplan.planner.schedules.named import NAMED, named_orders
from tests.captures import zoo_job

FREE = Constraints(recompute="none", reserve_bytes=0)


def _pricing(job: Job, pins: Constraints = FREE) -> Pricing:
    return Pricing(job, pins, device_budget(job.cluster, pins), lambda _: None, Deadline(600.0))


@pytest.mark.parametrize("name", NAMED)
def test_a_schedule_says_which_counts_it_takes(name: str) -> None:
    for p in range(1, 7):
        for m in range(1, 9):
            try:
                named_orders(name, p, m)
                taken = True
            except ConstraintError:
                taken = False
            assert NAMED[name].counts(p, m) == taken, (p, m)


def test_what_is_left_unpriced_comes_nowhere_near_the_best() -> None:
    job = zoo_job("gpt2", 4)
    listed = combinations(job, FREE)
    some, every = _pricing(job), _pricing(job)
    PricingRounds(some, listed).go_on()
    for combination in listed:
        if every.kind(combination) not in every.prices:
            alike = [each for each in listed if every.kind(each) == every.kind(combination)]
            every.prices[every.kind(combination)] = every.priced(combination, alike)
    least = [_least_s(each, listed) for each in (some, every)]
    assert math.isfinite(least[0]) and least[0] <= (1 + NEAR) * least[1]
    assert len(some.prices) <= len(every.prices)


def _least_s(pricing: Pricing, listed: list[Combination]) -> float:
    return min(
        pricing.form.quick_s(each, prices.totals, pricing.mesh_shape(each, prices.shape))
        for each in listed
        for prices in pricing.of(each)
    )


def test_nothing_more_is_priced_beside_a_plan_that_is_far_faster() -> None:
    job = zoo_job("gpt2", 4)
    listed = combinations(job, FREE)
    pricing = _pricing(job)
    PricingRounds(pricing, listed).go_on(1e-12)
    ways = ways_of({pricing.kind(each) for each in listed}, usual_samples(job.program))
    heads = {way.kinds[0] for way in ways if way.of is None}
    bare = {kind for way in ways if way.of is not None and not pricing.prices[way.of.kinds[0]] for kind in way.kinds}
    assert heads <= set(pricing.prices) <= heads | bare
    assert all(len(found) <= 1 for found in pricing.prices.values()) and any(pricing.prices.values())


def test_late_one_sharding_of_one_kind_is_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing else known, one has to be: to price a whole batch would take as long again."""
    monkeypatch.setattr(pricing_module, "ENOUGH", 0.0)  # leaner ones are always looked for
    job = zoo_job("gpt2", 4)
    listed = combinations(job, FREE)
    release_caches()
    pricing = _pricing(job)
    PricingRounds(pricing, listed).go_on()
    assert len(pricing.prices) > 1 and any(len(found) > 1 for found in pricing.prices.values())
    release_caches()
    late = replace(_pricing(job), deadline=Deadline(0.0))
    PricingRounds(late, listed).go_on()
    assert [len(found) for found in late.prices.values()] == [1]


@pytest.mark.parametrize(
    ("usual", "first"), [(0.1, (1.0, 2.0)), (1.0, (1.0, 2.0)), (2.0, (2.0, 4.0)), (64.0, (2.0, 8.0))]
)
def test_what_is_priced_first_has_rows_enough(usual: float, first: tuple[int, int]) -> None:
    """Of an inner axis that splits tensors, and of one that shares the batch out as well: what few samples lose by the
    one says nothing of the other. Those of more and of fewer samples follow."""
    kinds = [((2,), 2, False, samples) for samples in (1.0, 2.0, 4.0, 8.0)]
    kinds = [*(((4,), 2, False, samples) for samples in (1.0, 2.0)), *kinds]
    ways = ways_of(kinds, usual)
    heads = {(way.kinds[0][0][0], way.kinds[0][3]) for way in ways if way.of is None}
    assert heads == {(4, min(first[0], 2.0)), (2, 1.0), (2, first[1] if usual > 1 else 2.0)}
    assert sorted(kind for way in ways for kind in way.kinds) == sorted(kinds)
    for way in ways:
        samples = [kind[3] for kind in way.kinds]
        assert samples == sorted(samples, reverse=way.of is not None)
        if way.of is not None:
            assert samples[0] < way.of.kinds[0][3] and steps_of(way)[0] is None
    short = [way.kinds[0][3] < usual / math.sqrt(2) for way in ways if way.of is None]
    assert short == sorted(short), "what no rank has rows enough of comes last"


def test_on_few_devices_every_mesh_is_begun_before_any_goes_on() -> None:
    """What takes long to price, as where memory binds, is not priced twice before another is at all."""
    job = zoo_job("gpt2", 4)
    pricing = _pricing(job)
    rounds = PricingRounds(pricing, combinations(job, FREE))
    meshes = [kind[:3] for kind, _ in rounds._waiting]
    first = list(dict.fromkeys(meshes))
    assert meshes[: len(first)] == first and first[0][1:] == (1, 1) and len(meshes) > len(first) > 2
    assert len(set(rounds._waiting)) == len(rounds._waiting)


def test_samples_of_a_rank_hang_on_the_rows_of_products() -> None:
    """A language model of 64 tokens a sample needs as many times fewer samples as one of 8 more."""
    found = {name: usual_samples(zoo_job(name, 2).program) for name in ("gpt2", "mlp")}
    assert found["mlp"] > found["gpt2"] > 1


def test_totals_of_more_samples_and_of_no_weight() -> None:
    job = zoo_job("gpt2", 4)
    pins = msgspec.structs.replace(FREE, mesh=(2,), pp=None)
    listed = combinations(job, pins)
    pricing = _pricing(job, pins)
    for combination in {pricing.kind(each): each for each in listed}.values():
        (prices, *_) = pricing.priced(combination, [combination])
        totals, shape = prices.totals, pricing.mesh_shape(combination, prices.shape)
        quick_s = pricing.form.quick_s(combination, totals, shape)
        assert pricing.form.quick_s(combination, totals.weightless(), shape) <= quick_s
        assert pricing.form.quick_s(combination, totals.of_more(1.0, 0.0), shape) == quick_s
        assert pricing.form.quick_s(combination, totals.of_more(2.0, 0.0), shape) > quick_s


def test_positions_of_one_stage_share_work_out_as_evenly_as_a_chain_can_be_cut() -> None:
    job = zoo_job("gpt2", 4)
    pricing, count = _pricing(job), len(job.program.segments)
    combination = next(each for each in combinations(job, FREE) if (each.pp, each.each) == (4, 1))
    (prices, *_) = pricing.priced(combination, [combination])
    for stages in range(1, count + 1):
        cut = cut_chain(prices.seconds, stages)  # exact
        assert cut is not None
        longest_s = max(sum(prices.seconds[first:stop]) for first, stop in cut)
        assert prices.longest_share(stages) * sum(prices.seconds) == pytest.approx(longest_s, rel=1e-9)
    assert math.isinf(prices.longest_share(count + 1)) and prices.longest_share(count) > 1.2 / count
    shape = pricing.mesh_shape(combination, prices.shape)
    even = replace(prices.totals, longest=lambda stages: 1 / stages)
    uneven = [pricing.form.quick_s(combination, each, shape) for each in (even, prices.totals)]
    assert uneven[0] < uneven[1] <= uneven[0] * 4 * prices.longest_share(4)


def test_prices_of_other_processes_are_those_of_this_one() -> None:
    job = zoo_job("gpt2", 4)
    listed, deadline = combinations(job, FREE), Deadline(600.0)
    alone = _pricing(job)
    PricingRounds(alone, listed).go_on()
    workers = Workers(1, pricing_beside, job, FREE, alone.budget, deadline)
    try:
        beside = Pricing(job, FREE, alone.budget, lambda _: None, deadline, workers)
        PricingRounds(beside, listed).go_on()
    finally:
        workers.close()
    assert _numbers(beside) == _numbers(alone) and not beside.faults


def _numbers(pricing: Pricing) -> dict[object, list[object]]:
    return {
        kind: [(each.sharding.decisions, each.sharding.options, each.numbers) for each in found]
        for kind, found in pricing.prices.items()
    }


def test_shardings_do_not_hang_on_how_many_positions_were_priced_for_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What activations keep counts by them, so the front for other positions is another one."""
    seen: list[object] = []

    def seeing(*args: object) -> object:
        seen.append(args[-2])
        return real(*args)  # type: ignore[arg-type]

    real = sharding_front.front
    monkeypatch.setattr(sharding_front, "front", seeing)
    release_caches()
    job = zoo_job("gpt2", 4)
    combination = Combination(2, (2,), 4, "1f1b", 1)
    for positions in (4, 2, 2):
        _pricing(job).priced(combination, [replace(combination, pp=positions)])
    assert seen == [4, 2]


def _large() -> Job:
    """Of which products take so long that a sharding hardly hangs on the samples of a microbatch."""
    with torch.device("meta"):
        layers = [part for _ in range(4) for part in (nn.Linear(4096, 4096), nn.Tanh())]
        batch = {"input": torch.zeros(1 << 15, 4096)}
    program = capture(nn.Sequential(*layers), batch, loss_fn=lambda out, _: out.pow(2).mean(), precision="fp32")
    return Job(program, parse_cluster("8xA100-80:1"), OPTIMIZERS["adamw"], ModelRef(display="chain"), {})


@pytest.mark.parametrize("is_wide", [True, False])
def test_what_divides_samples_takes_as_long_however_wide_their_axis_is(is_wide: bool) -> None:
    """Tensors divided along it are the less work on two ranks, and half as much again on 32."""
    rows, job = 1024, replace(_large(), cluster=parse_cluster("8xA100-80:4"))
    pricing, pins = _pricing(job), Constraints(recompute="none", reserve_bytes=0, mesh=(2,))
    limits = SolveLimits(10.0, 1e12, certify=False)
    two = make_mesh((2,), ("axis0",)), job.program.batch_size // (2 * rows), pins, limits, (0.1, 0.5), 1.0
    times = list[float]()
    for decisions in sharding_front.front(pricing.part(16), *two, is_wide):
        assert Sharding(pricing.part(16), decisions).divides_samples == is_wide
        there_s = sum(Sharding(pricing.part(16), decisions).prices.seconds)
        for ranks in (8, 32):
            mesh, count = make_mesh((ranks,), ("axis0",)), job.program.batch_size // (ranks * rows)
            wider = in_same_layouts(pricing.part(32 // ranks), decisions, mesh, count)
            assert wider is not None
            times.append(sum(wider.prices.seconds) / there_s)
    assert times and (max(times) < 1.05 if is_wide else max(times) > 1.5)


@pytest.mark.parametrize(
    ("pp", "devices", "samples", "is_wide"),
    [(None, 32, 1, True), (None, 32, 0, False), (2, 32, 1, False), (None, 8, 1, False)],
)
def test_prices_are_of_any_width_where_widths_may_differ_much(
    pp: int | None, devices: int, samples: int, is_wide: bool
) -> None:
    job = replace(
        zoo_job("gpt2", 4),
        cluster=parse_cluster(f"{devices}xA100-80:1" if devices <= 8 else f"8xA100-80:{devices // 8}"),
    )
    pricing, width = _pricing(job, msgspec.structs.replace(FREE, pp=pp)), 2 if samples else 4 * job.program.batch_size
    assert pricing.is_wide(Combination(2, (width,), 1, "1f1b", 1)) == is_wide


def test_the_best_estimate_is_hardly_longer_for_layouts_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    job = _large()
    listed = [each for each in combinations(job, FREE) if each.pp == 1 and each.microbatches <= 8]
    release_caches()
    some, every = _pricing(job), _pricing(job)
    taken, *_ = estimate_best(PricingRounds(some, listed), math.inf, [])
    assert some.alike and some.alike <= set(some.prices)
    monkeypatch.setattr(PricingRounds, "_in_layouts", lambda *_: ())
    chosen, *_ = estimate_best(PricingRounds(every, listed), math.inf, [])
    assert not every.alike and taken.step_s <= (1 + GAP) * chosen.step_s


def test_layouts_that_do_not_divide_are_chosen_anew() -> None:
    """As three samples on an axis that shares out four."""
    job = zoo_job("mlp", 4)
    pricing = _pricing(job)
    four = Combination(1, (1, 4), 1, "gpipe", 1)
    (prices, *_) = pricing.priced(four, [four])
    layouts = (prices.sharding.decisions,)
    again = pricing.priced(four, [four], layouts=layouts)
    assert [each.numbers for each in again] == [prices.numbers]
    broken = replace(layouts[0], batch=dict.fromkeys(layouts[0].batch, "S7,S7"))
    anew = pricing.priced(four, [four], layouts=(broken,))
    assert anew and anew[0].numbers == prices.numbers and not pricing.faults


def test_layouts_whose_prices_fail_are_chosen_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> object:
        raise InvalidPlanError("it cannot be lowered")

    monkeypatch.setattr(pricing_module, "in_same_layouts", failing)
    job = zoo_job("mlp", 4)
    pricing, four = _pricing(job), Combination(1, (1, 4), 1, "gpipe", 1)
    (prices, *_) = pricing.priced(four, [four])
    assert pricing.priced(four, [four], layouts=(prices.sharding.decisions,))[0] is prices and not pricing.faults


def test_begun_ways_go_by_promise_and_by_turns_with_others() -> None:
    begun, better, new = Way(), Way(), Way()
    for way in (begun, better):
        way.priced = (cast(Any, None),)
    kinds = {name: ((), 1, False, float(number)) for number, name in enumerate("abcdef", 1)}
    waiting = [(kinds["a"], begun), (kinds["b"], new), (kinds["c"], better), (kinds["d"], begun), (kinds["e"], new)]
    promised = {kinds["a"]: 2.0, kinds["c"]: 1.0, kinds["d"]: 0.5}
    found = in_turn(waiting, lambda kind, _: promised[kind])
    assert [kind for kind, _ in found] == [kinds[name] for name in "cbaed"]


def test_one_stage_is_estimated_whatever_pipelines_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its estimate says whether it is solved, which finds what estimates know nothing of."""
    monkeypatch.setattr(estimating, "ESTIMATED", 0)
    job = zoo_job("gpt2", 2)
    found = estimate_best(PricingRounds(_pricing(job), combinations(job, FREE)), math.inf, [])
    assert [each.combination.pp for each in found] == [1]


class _Tables(nn.Module):
    """A table of embeddings that is most of a model, whose gradient nobody would add up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(1 << 20, 256), nn.Linear(256, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.head(self.table(ids))).pow(2).mean()


def test_what_does_not_divide_samples_is_for_its_own_mesh_alone() -> None:
    with torch.device("meta"):
        program = capture(_Tables(), {"ids": torch.zeros(1 << 12, dtype=torch.int64)}, precision="fp32")
    job = Job(program, parse_cluster("8xA100-80:4"), OPTIMIZERS["adamw"], ModelRef(display="tables"), {})
    pricing = _pricing(job)
    assert not pricing.divides_at_ease and _pricing(replace(_large(), cluster=job.cluster)).divides_at_ease
    listed = [each for each in combinations(job, FREE) if pricing.is_wide(each)]
    PricingRounds(pricing, listed).go_on()
    priced = [each for each in listed if pricing.kind(each) in pricing.prices]
    every = {id(prices) for each in priced for prices in pricing.prices[pricing.kind(each)]}
    assert every and all(pricing.of(each) for each in priced), "in samples"
    narrow = set[int]()
    for combination in priced:
        for prices in pricing.of(combination):
            if not prices.sharding.divides_samples:
                assert prices.shape == combination.mesh
                narrow.add(id(prices))
    assert narrow, "of less work"


def test_what_another_search_priced_for_any_width_is_known() -> None:
    release_caches()
    pricing = _pricing(replace(_large(), cluster=parse_cluster("8xA100-80:4")))
    wide = Combination(4, (8,), 4, "1f1b", 1)
    rounds = PricingRounds(pricing, [wide])
    assert pricing.is_wide(wide) and not rounds._is_known(wide, [wide])
    assert pricing.priced(wide, [wide]) and rounds._is_known(wide, [wide])
