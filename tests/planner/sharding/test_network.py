"""Cost networks: messages, multipliers and the flow-form ILP against every choice there is."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paraplan.planner.deadline import SolveLimits
from paraplan.planner.sharding.consistent import consistent
from paraplan.planner.sharding.network import branch, message_passing
from paraplan.planner.sharding.network import groupings as groupings_module
from paraplan.planner.sharding.network import optimise as optimise_module
from paraplan.planner.sharding.network.cost_network import Factor, Network
from paraplan.planner.sharding.network.groupings import groupings
from paraplan.planner.sharding.network.ilp import build_ilp
from paraplan.planner.sharding.network.lagrangian import Point, evaluate, scalarised
from paraplan.planner.sharding.network.message_passing import MessagePassing
from paraplan.planner.sharding.network.optimise import least_activity, optimise
from paraplan.planner.sharding.proof.step_bound import step_bound
from paraplan.planner.solvers.milp import Status, solve
from tests.planner.sharding.networks import STREAMS, every_choice, random_network


def agrees(network: Network, wanted: float) -> None:
    """Both ways to the optimum give the brute-force answer."""
    exact = solve(build_ilp(network).problem(np.ones(STREAMS)))
    for small in (20_000, 0):  # integers at once, or what multipliers leave over
        found = optimise(network, small=small)
        if math.isinf(wanted):
            assert exact.status is found.status is Status.INFEASIBLE
            continue
        assert exact.status is found.status is Status.OPTIMAL
        assert exact.objective == pytest.approx(wanted, rel=1e-6)
        assert found.objective == pytest.approx(wanted, rel=1e-6)
        assert found.choices is not None and network.fits(found.choices)
        assert float(network.work(found.choices).sum()) == pytest.approx(found.objective, rel=1e-9)
        assert found.bound <= found.objective <= found.bound * (1 + 1e-5)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_without_rows(seed: int) -> None:
    network = random_network(seed)
    agrees(network, min((float(work.sum()) for _, work in every_choice(network)), default=math.inf))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 3))
def test_with_rows(seed: int, rows: int) -> None:
    network = random_network(seed, rows)
    agrees(network, min((float(work.sum()) for _, work in every_choice(network)), default=math.inf))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.floats(0.0, 1.0), st.floats(0.0, 2.0))
def test_any_weights_and_multipliers_bound(seed: int, share: float, multiplier: float) -> None:
    network = random_network(seed, 1, blocked=0.0)
    weights = np.array([share, 1 - share])
    least = min((float(work @ weights) for _, work in every_choice(network)), default=math.inf)
    point = evaluate(network, weights, np.array([multiplier]), time.perf_counter() + 60)
    assert point.bound <= least + 1e-9
    assert point.bound <= point.value + 1e-9


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_the_step_bound_is_below_the_busiest_stream(seed: int) -> None:
    network = random_network(seed, 1, blocked=0.0)
    possible = every_choice(network)
    if not possible:
        return
    found = optimise(network)
    assert found.choices is not None
    bound = step_bound(network, network.work(found.choices), found.multipliers, 60.0)
    assert 0.0 <= bound <= min(float(work.max()) for _, work in possible) * (1 + 1e-9)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_bounds_never_fall_and_options_keep_theirs(seed: int) -> None:
    network = random_network(seed, blocked=0.0)
    weights = np.ones(STREAMS)
    unary = [price @ weights for price in network.prices]
    messages = MessagePassing(network, unary, [factor.prices @ weights for factor in network.factors])
    last = -math.inf
    for _ in range(6):
        messages.sweep()
        bound = messages.bound()
        assert bound >= last - 1e-9
        last = bound
    costs = {choices: float(work.sum()) for choices, work in every_choice(network)}
    for variable, bounds in enumerate(messages.option_bounds()):
        for option, least in enumerate(bounds):
            assert least <= min(cost for choices, cost in costs.items() if choices[variable] == option) + 1e-9


def test_least_activity_is_the_least() -> None:
    for seed in range(20):
        network = random_network(seed, 2, blocked=0.0)
        free = Network(network.prices, network.factors)
        for row in range(2):
            least = min(float(network.activity(choices)[row]) for choices, _ in every_choice(free))
            found = least_activity(network, row, time.perf_counter() + 60)
            assert found.bound <= least + 1e-9
            assert found.objective >= least - 1e-9


def test_impossible_moves_are_seen_first() -> None:
    apart = np.full((2, 2, STREAMS), np.inf)
    apart[0, 0] = 1.0
    prices = (np.ones((1, STREAMS)), np.ones((2, STREAMS)))
    factor = Factor(0, (1,), np.array([0]), (np.array([0, 1]),), apart)
    kept = consistent(Network(prices, (factor,)))
    assert kept is not None and [keep.tolist() for keep in kept] == [[0], [0]]
    nowhere = Factor(0, (1,), np.array([1]), (np.array([0, 1]),), apart)
    assert consistent(Network(prices, (nowhere,))) is None
    assert optimise(Network(prices, (nowhere,))).status is Status.INFEASIBLE


def test_groupings_are_the_bell_numbers() -> None:
    assert [len(groupings(count)) for count in range(1, 6)] == [1, 2, 5, 15, 52]


def test_many_readers_are_looked_at_by_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a factor says of a layout is the same by groupings of readers and by sets of layouts."""
    for seed in range(30):
        whole = random_network(seed)
        if (kept := consistent(whole)) is None:
            continue
        network = whole.restricted(kept)
        costs = scalarised(network, np.ones(STREAMS), np.zeros(0))
        monkeypatch.setattr(message_passing, "MANY", 1)
        by_sets = MessagePassing(network, *costs)
        monkeypatch.setattr(message_passing, "MANY", 9)
        by_groups = MessagePassing(network, *costs)
        for _ in range(3):
            by_sets.sweep()
            by_groups.sweep()
            assert by_sets.bound() == pytest.approx(by_groups.bound(), abs=1e-12)
            for one, other in zip(by_sets.factors, by_groups.factors, strict=True):
                assert one.by_sets and not other.by_sets
                for place in range(len(one.variables)):
                    assert one.marginal(place) == pytest.approx(other.marginal(place), abs=1e-12)


@pytest.mark.parametrize("part", [1, 2])
def test_readers_in_parts_keep_the_optimum_and_its_bounds(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    for name, value in (("MANY", 99), ("MOST", 0), ("PART", part)):
        monkeypatch.setattr(message_passing, name, value)
    for seed in range(24):
        network = random_network(seed, seed % 2)
        agrees(network, min((float(work.sum()) for _, work in every_choice(network)), default=math.inf))
    test_bounds_never_fall_and_options_keep_theirs()


def test_many_readers_of_many_layouts_take_no_more_groupings_than_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen readers, which have ten thousand million groupings, of thirteen layouts."""
    asked: list[int] = []
    split = groupings_module._split
    monkeypatch.setattr(groupings_module, "_split", lambda count, mine: (asked.append(count), split(count, mine))[1])
    rng = np.random.default_rng(0)
    readers, layouts = 16, 13
    moved = rng.random((layouts, layouts, STREAMS))
    moved[range(layouts), range(layouts)] = 0.0
    factor = Factor(0, tuple(range(1, readers + 1)), np.arange(layouts), (np.arange(layouts),) * readers, moved)
    network = Network(tuple(rng.random((layouts, STREAMS)) for _ in range(readers + 1)), (factor,))
    point = evaluate(network, np.ones(STREAMS), np.zeros(0), time.perf_counter() + 60)
    found = optimise(network)
    assert asked and max(asked) <= message_passing.PART
    assert found.status is Status.OPTIMAL and point.bound <= found.objective * (1 + 1e-9)
    assert network.work(point.choices).sum() <= 1.2 * found.objective


def test_branching_keeps_the_optimum_and_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every node branched on, whatever its size, as with none."""
    monkeypatch.setattr(branch, "FEW", 0)
    monkeypatch.setattr(optimise_module, "FEW", 0)
    monkeypatch.setattr(optimise_module._Search, "_combine", lambda self, points: None)
    ways = set()
    for seed in range(24):
        network = random_network(seed, 1 + seed % 2)
        wanted = min((float(work.sum()) for _, work in every_choice(network)), default=math.inf)
        found = optimise(network, small=0)
        ways.add(found.via)
        if math.isinf(wanted):
            assert found.status is Status.INFEASIBLE
            continue
        assert found.objective == pytest.approx(wanted, rel=1e-6)
        assert found.bound <= wanted * (1 + 1e-9)
        assert found.status is Status.OPTIMAL
    assert "branching" in ways


@pytest.mark.parametrize("nodes", [1, 1000])
def test_layouts_are_branched_over_where_no_row_binds(monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    """What messages leave open is settled by layouts alone, or by integers once enough of them were looked into."""
    monkeypatch.setattr(branch, "NODES", nodes)
    integers, open_ = 0, 0
    by_integers = optimise_module._Search._remainder

    def counted(self: optimise_module._Search, point: Point) -> optimise_module.Optimum:
        nonlocal integers
        integers += 1
        return by_integers(self, point)

    monkeypatch.setattr(optimise_module._Search, "_remainder", counted)
    for seed in range(60):
        network = random_network(seed)
        wanted = min((float(work.sum()) for _, work in every_choice(network)), default=math.inf)
        found = optimise(network)
        open_ += found.via in ("branching", "milp")
        assert found.objective == pytest.approx(wanted, rel=1e-6)
        assert found.status is (Status.INFEASIBLE if math.isinf(wanted) else Status.OPTIMAL)
        assert math.isinf(wanted) or found.bound <= wanted * (1 + 1e-9)
    assert open_ and (nodes > 1 or integers)
    assert nodes == 1 or not integers


def test_messages_of_the_whole_are_taken_over_by_a_part() -> None:
    """The part's bound from them is no worse than the whole's, and no better than the truth."""
    for seed in range(5):
        network = random_network(seed, blocked=0.0)
        weights = np.ones(STREAMS)
        point = evaluate(network, weights, np.zeros(0), time.perf_counter() + 60)
        kept = [np.arange(len(price))[-2:] for price in network.prices]
        part = network.restricted(kept)
        messages = MessagePassing(part, *scalarised(part, weights, np.zeros(0)), point.messages)
        least = min(float(work.sum()) for _, work in every_choice(part))
        assert point.bound - 1e-9 <= messages.bound() <= least + 1e-9


def test_a_cutoff_ends_the_search_only_where_all_choices_cost_more() -> None:
    ended = 0
    for seed in range(8):
        network = random_network(seed, blocked=0.0)
        least = min(float(work.sum()) for _, work in every_choice(network))
        beaten = optimise(network, small=0, cutoff=0.9 * least)
        if beaten.choices is None:
            ended += 1
            assert 0.9 * least <= beaten.bound <= least + 1e-9
        else:
            assert beaten.objective == pytest.approx(least, rel=1e-6)
        assert optimise(network, small=0, cutoff=least * 1.01).objective == pytest.approx(least, rel=1e-6)
    assert ended


def test_a_deadline_is_looked_at_inside_of_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of time, what there is is given back: a bound that holds, and choices that are possible."""
    visited: list[int] = []
    visit = MessagePassing._visit
    monkeypatch.setattr(MessagePassing, "_visit", lambda self, at, step: (visited.append(at), visit(self, at, step))[1])
    network = random_network(3, blocked=0.0)
    late = evaluate(network, np.ones(STREAMS), np.zeros(0), -math.inf)
    assert not visited
    best = min(float(work.sum()) for _, work in every_choice(network))
    assert late.bound <= best <= float(network.work(late.choices).sum()) < math.inf
    assert evaluate(network, np.ones(STREAMS), np.zeros(0), math.inf).bound >= late.bound
    assert visited
    answer = optimise(network, time_limit_s=-1.0)
    assert answer.choices is not None and answer.bound <= best


def test_tries_on_a_mesh_share_its_time() -> None:
    limits = SolveLimits(time_s=4.0, memory_bytes=1.0)
    assert [limits.left_s(taken) for taken in (0.0, 1.5, 4.0, 9.0)] == [4.0, 2.5, 0.4, 0.4]
