"""Free and pinned searches over groups that differ: what is refused, what is looked at, what time leaves."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
import torch

from paraplan.capture import capture
from paraplan.ir.errors import ConstraintError, SolverLimitError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.planner.assemble import Job
from paraplan.planner.best_plan import BestPlan
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.mixed import idle_groups
from paraplan.planner.mixed.idle_groups import among_groups
from paraplan.planner.mixed.listing import check_on_cluster, divisions
from paraplan.planner.mixed.search_mixed import search_mixed
from paraplan.planner.mixed.span_prices import SpanPrices
from paraplan.planner.search import find, find_mixed, search
from tests.planner.joint.chains import WIDTHS, chain, chained, cluster, group, job, rows, step_s
from tests.runtime.pipelines import account


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        (Constraints(pp=2, stages=((0, 2), (2, 9))), "stage 1 is 2:9.*the model has 6"),
        (Constraints(pp=2, stages=((0, 2), (2, 5))), "stages end at segment 5, the model has 6"),
        (Constraints(pp=2, stages=((0, 1), (1, 2), (2, 6))), "3 stages cannot lie on pp=2"),
        (Constraints(microbatches=3), "microbatches=3 does not divide a batch of 256; give 2 or 4"),
        (Constraints(pp=2, microbatches=1, schedule="interleaved"), "give a multiple of 2"),
        (Constraints(pp=4, schedule="interleaved"), "more than the model's 6 segments"),
        (Constraints(pp=2, params={"layers.0.weight": "S7/S0/S0"}), "nothing is left for layers.0.weight"),
        (Constraints(ep=2), "the model has no experts"),
        (Constraints(pp=9), "pp=9 does not divide"),
    ],
)
def test_pins_that_contradict_the_model_are_refused_as_over_one_group(pins: Constraints, said: str) -> None:
    for on in (cluster(group(2.0, 4)), cluster(group(4.0, 2), group(1.0, 2))):
        with pytest.raises(ConstraintError, match=said):
            search(job(on, chained()), pins)


def test_stages_that_end_beyond_the_model_are_refused_by_the_mixed_search_itself() -> None:
    on = job(cluster(group(4.0), group(1.0)), chained())
    with pytest.raises(ConstraintError, match="stage 1 is 2:9"):
        find_mixed(on, Constraints(pp=2, stages=((0, 2), (2, 9))))


def test_positions_need_not_divide_all_devices() -> None:
    """Three of a pair of devices and two single ones; what groups cannot be divided into is refused at once."""
    on, pins = cluster(group(4.0, 2), group(1.0, 2)), Constraints(pp=3, microbatches=4, schedule="1f1b")
    check_on_cluster(pins, on)
    for pp, other in ((3, cluster(group(1.0, 4))), (5, on)):
        with pytest.raises(ConstraintError, match=f"pp={pp} does not divide"):
            check_on_cluster(Constraints(pp=pp), other)
    plan = search(job(on, chained()), pins).plan
    assert sorted(stage.mesh.size for stage in plan.stages) == [1, 1, 2]
    assert account(plan, chain(), rows(), steps=1).error <= 1e-9


@pytest.mark.parametrize("batch_rows", [256, 192])
def test_the_free_plan_is_no_slower_than_with_microbatches_pinned(batch_rows: int) -> None:
    """Few of them do best here: a call takes long to launch."""
    slow = msgspec.structs.replace(group(1.0).device, launch_s=2e-5)
    groups = (msgspec.structs.replace(group(2.5), device=slow), msgspec.structs.replace(group(1.0, 3), device=slow))
    given = {"x": torch.randn(batch_rows, WIDTHS[0])}
    of = job(cluster(*groups, between=1e10), capture(chain().float(), given, precision="fp32"))
    free_s = step_s(search_mixed(of, Constraints(), Deadline(60.0), lambda _: None))
    for count in (2, 4, 8, 16):
        pinned = search_mixed(of, Constraints(microbatches=count), Deadline(60.0), lambda _: None)
        assert free_s <= step_s(pinned) * (1 + 1e-9)


def test_what_time_leaves_loses_to_no_group_as_one_mesh() -> None:
    """Every search for more than one mesh finds nothing, as one that time cuts short."""
    on = job(cluster(group(4.0, 2), group(3.0, 2), between=1e8), chained())

    def late(part: Job, pins: Constraints, *more: Any) -> BestPlan:
        if pins.pp == 1:
            return find(part, pins, 60.0, certify=False)  # cheap, if not on a busy machine
        raise SolverLimitError("time ran out")

    found = among_groups((late, late), on, Constraints(), 30.0, lambda _: None, True)
    alone = [job(cluster(each), chained()) for each in on.cluster.groups]
    one_mesh = [find(each, Constraints(pp=1), certify=False).step_s for each in (on, *alone)]
    assert found.step_s == min(one_mesh)
    assert found.plan.certificate is not None and 0 < found.plan.certificate.bound_s <= found.step_s


def test_what_time_cut_short_is_searched_again_in_what_is_left_of_it() -> None:
    on, shares = job(cluster(group(4.0, 2), group(3.0, 2)), chained()), list[float]()

    def longer(part: Job, pins: Constraints, share_s: float, *more: Any) -> BestPlan:
        if pins.pp is None and part.cluster == on.cluster:
            shares.append(share_s)
            time.sleep(share_s if len(shares) == 1 else 0.0)
        if pins.pp == 1 or len(shares) == 1:
            raise SolverLimitError("time ran out")
        return find(part, msgspec.structs.replace(pins, pp=1), share_s, *more)

    def none(*_: Any) -> BestPlan:
        raise SolverLimitError("none")

    among_groups((longer, none), on, Constraints(), 2.0, lambda _: None, False)
    assert len(shares) == 2 and shares[1] >= 0.9


def test_sets_of_groups_of_which_little_is_hoped_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those whose products alone take longer than a plan that is known, not at all; with all of them the same."""
    on = job(cluster(group(4.0, 2), group(3.0, 1), group(2.0, 4)), chained())
    known = find(job(cluster(group(4.0, 2)), chained()), Constraints(pp=1), certify=False)
    slow, hopeless = on.cluster.groups[:1], on.cluster.groups[1:2]
    bounds_s = ((slow, 0.8 * known.step_s), (hopeless, 1.1 * known.step_s))

    def work_bound_s(_: Program, cluster: ClusterSpec) -> float:
        return next((bound_s for groups, bound_s in bounds_s if groups == cluster.groups), 0.0)

    monkeypatch.setattr(idle_groups, "work_bound_s", work_bound_s)
    begun: list[Any] = []

    def alike(part: Job, pins: Constraints, share_s: float, *more: Any) -> BestPlan:
        begun.append((part.cluster.groups, pins.pp))
        return known

    def none(*_: Any) -> BestPlan:
        raise SolverLimitError("none")

    plan = among_groups((alike, none), on, Constraints(), 60.0, lambda _: None, False).plan
    assert begun[-1] == (slow, None) and (slow, 1) not in begun
    assert (on.cluster.groups[2:], 1) in begun and (on.cluster.groups[2:], None) in begun
    assert hopeless not in [groups for groups, _ in begun]
    assert any(": not searched, as its products alone take longer" in note for note in plan.notes)


def test_what_the_time_left_unpriced_is_priced_once_there_is_more() -> None:
    on, pins = job(cluster(group(4.0, 2), group(1.0, 2)), chained()), Constraints()
    ways = list(divisions(on, pins))
    counts = sorted({count for _, counts in ways for count in counts})
    prices = SpanPrices(on, pins, lambda _: None, 60.0)
    prices.price(ways, counts[:1])
    first = prices.num_known
    prices.allow(600.0)
    prices._deadline._started -= 600.0
    prices.price(ways, counts)
    unpriced = [(span, count) for spans, each in ways for count in each for span in spans if not prices.of(span, count)]
    assert prices.num_known == first and unpriced, "no time is left"
    prices.allow(60.0)
    prices.price(ways, counts)
    assert prices.num_known > first and all(prices.of(span, count) for span, count in unpriced)
