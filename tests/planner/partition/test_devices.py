"""Placements on devices, ordered and free, and their bounds, against all placements there are."""

import itertools
import math
from collections.abc import Sequence

import networkx as nx
import numpy as np
import pytest

from paraplan.planner.partition.annealing import Annealer, CoolingSchedule
from paraplan.planner.partition.device_loads import LoadProblem, Net, contracted, device_loads
from paraplan.planner.partition.free_devices import place_freely
from paraplan.planner.partition.load_bounds import average_bound, load_bound
from paraplan.planner.partition.ordered_devices import place_in_order
from paraplan.planner.partition.reassign import reassign
from tests.planner.partition.graphs import random_edges


def random_problem(random: np.random.Generator, cyclic: bool = True) -> LoadProblem:
    groups = int(random.integers(1, 6))
    edges = random_edges(random, groups, 0.4)
    if cyclic and edges and random.random() < 0.2:
        edges.append(edges[0][::-1])
    nets = []
    for cost in random.integers(0, 5, int(random.integers(0, 6))) if groups > 1 else ():
        pins = random.choice(groups, int(random.integers(2, groups + 1)), replace=False)
        nets.append(Net(tuple(sorted(pins.tolist())), float(cost)))
    times = random.integers(0, 9, groups).astype(float)
    cpu = np.where(times == 0, 0.0, random.integers(1, 30, groups))
    times[random.random(groups) < 0.1] = np.inf
    size = random.integers(0, 5, groups).astype(float)
    max_size = float(random.integers(3, 14))
    return LoadProblem(
        times, cpu, size, tuple(nets), tuple(edges), int(random.integers(0, 4)), int(random.integers(0, 3)), max_size
    )


def loads(problem: LoadProblem, devices: Sequence[int]) -> list[float]:
    """By definition, a set of groups at a time."""
    found = []
    for device in range(problem.accelerators + problem.cpus):
        mine = {group for group, at in enumerate(devices) if at == device}
        if device >= problem.accelerators:
            found.append(sum(problem.cpu_time[g] for g in mine))
            continue
        cut = sum(net.cost for net in problem.nets if mine & set(net.groups) and not set(net.groups) <= mine)
        fits = sum(problem.size[g] for g in mine) <= problem.max_size
        found.append(sum(problem.accelerator_time[g] for g in mine) + cut if fits else math.inf)
    return found


def in_order(problem: LoadProblem, devices: Sequence[int]) -> bool:
    return nx.is_directed_acyclic_graph(
        nx.DiGraph((devices[a], devices[b]) for a, b in problem.edges if devices[a] != devices[b])
    )


def brute(problem: LoadProblem, ordered: bool) -> float:
    count = problem.accelerators + problem.cpus
    return min(
        (
            max(loads(problem, devices))
            for devices in itertools.product(range(count), repeat=problem.num_groups)
            if not ordered or in_order(problem, devices)
        ),
        default=math.inf,
    )


@pytest.mark.parametrize("seed", range(60))
def test_ordered_placements_are_the_best_of_all(seed: int) -> None:
    problem = random_problem(np.random.default_rng(seed))
    expected, found = brute(problem, ordered=True), place_in_order(problem)
    assert found.load == found.bound == pytest.approx(expected, rel=1e-12)
    if found.devices is not None:
        assert in_order(problem, found.devices)
        assert max(loads(problem, found.devices)) == pytest.approx(expected, rel=1e-12)
    else:
        assert math.isinf(expected)


@pytest.mark.parametrize("seed", range(60))
def test_free_placements_are_the_best_of_all(seed: int) -> None:
    problem = random_problem(np.random.default_rng(seed))
    expected, found = brute(problem, ordered=False), place_freely(problem, place_in_order(problem))
    assert found.load == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert found.bound <= expected * (1 + 1e-9) + 1e-9
    if found.devices is not None:
        assert max(loads(problem, found.devices)) == pytest.approx(found.load, rel=1e-12)
    else:
        assert math.isinf(expected) and math.isinf(found.bound)


@pytest.mark.parametrize("seed", range(60))
def test_bounds_are_below_every_placement(seed: int) -> None:
    problem = random_problem(np.random.default_rng(seed))
    expected = brute(problem, ordered=False)
    if problem.accelerators + problem.cpus:
        assert average_bound(problem) <= expected * (1 + 1e-12)
    assert load_bound(problem) <= expected * (1 + 1e-9) + 1e-9


def test_a_cut_bounds_what_an_average_does_not() -> None:
    heavy = LoadProblem(
        np.array([9.0, 1.0, 1.0]), np.full(3, 99.0), np.zeros(3), (Net((0, 1), 5.0), Net((1, 2), 0.5)), (), 3, 0, 1.0
    )
    assert load_bound(heavy) == pytest.approx(10.5) == brute(heavy, ordered=False)


@pytest.mark.parametrize("seed", range(40))
def test_merging_groups_loses_nothing(seed: int) -> None:
    problem = random_problem(np.random.default_rng(seed))
    for ordered in (False, True):
        smaller, merged = contracted(problem, ordered)
        assert sorted(set(merged)) == list(range(smaller.num_groups))
        assert brute(smaller, ordered) == pytest.approx(brute(problem, ordered), rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_annealing_counts_what_it_moves(seed: int) -> None:
    random = np.random.default_rng(seed)
    groups = 12
    nets = tuple(Net(tuple(sorted(random.choice(groups, 3, replace=False).tolist())), 1.0) for _ in range(14))
    problem = LoadProblem(
        random.random(groups) * 5,
        random.random(groups) * 50,
        np.ones(groups),
        nets,
        (),
        3,
        1,
        5.0 if seed % 2 else 99.0,
    )
    start = [3] * groups
    annealer = Annealer(problem, [start], chains=16, seed=seed)
    for step in range(60):
        annealer.power = 20.0
        annealer.energy = annealer._energies(annealer.loads, annealer.sizes)
        annealer._step(0.5)
        chain = step % 16
        placed = annealer.placed[chain].tolist()
        if annealer.sizes[:3, chain].max() <= problem.max_size:
            assert annealer.loads[:, chain] == pytest.approx(loads(problem, placed))
    found = annealer.run(300, CoolingSchedule(), 0.0, math.inf)
    assert found == pytest.approx(max(loads(problem, annealer.best))) and found < max(loads(problem, start))


@pytest.mark.parametrize("seed", range(20))
def test_a_few_devices_anew_is_the_best_of_theirs(seed: int) -> None:
    random = np.random.default_rng(seed)
    problem = random_problem(random)
    count = problem.accelerators + problem.cpus
    known = place_freely(problem)
    if known.devices is None or count < 2:
        return
    to = sorted(random.choice(count, 2, replace=False).tolist())
    devices = list(known.devices)
    for group in range(problem.num_groups):  # worse, where that is legal
        worse = [*devices[:group], to[0], *devices[group + 1 :]]
        devices = worse if devices[group] in to and math.isfinite(max(loads(problem, worse))) else devices
    free = [group for group in range(problem.num_groups) if devices[group] in to]
    best = math.inf
    for chosen in itertools.product(to, repeat=len(free)):
        other = list(devices)
        for group, device in zip(free, chosen, strict=True):
            other[group] = device
        best = min(best, max(loads(problem, other)[device] for device in to))
    placed, _ = reassign(problem, devices, free, to, 10.0)
    assert placed is not None
    assert max(device_loads(problem, placed)[to]) == pytest.approx(best, rel=1e-5, abs=1e-6)


def test_a_group_that_fits_nowhere_is_proved() -> None:
    problem = LoadProblem(np.array([1.0, np.inf]), np.ones(2), np.zeros(2), (), (), 2, 0, 1.0)
    for found in (place_in_order(problem), place_freely(problem)):
        assert found.devices is None and math.isinf(found.bound)


def test_sizes_that_do_not_fit_together_are_proved() -> None:
    problem = LoadProblem(np.ones(3), np.ones(3), np.full(3, 0.6), (), (), 2, 0, 1.0)
    for found in (place_in_order(problem), place_freely(problem)):
        assert found.devices is None and math.isinf(found.bound)
