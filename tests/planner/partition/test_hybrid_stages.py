"""Stages with data and tensor degrees against all partitions, degrees and variants there are."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

from paraplan.planner.partition.hybrid_problem import HybridProblem, TensorDegree
from paraplan.planner.partition.hybrid_stages import partition_hybrid, slowest_s
from tests.planner.partition.graphs import random_edges


def random_problem(random: np.random.Generator) -> HybridProblem:
    nodes = int(random.integers(1, 5))
    edges = tuple(random_edges(random, nodes, 0.5))
    degrees = []
    for degree in (1, 2)[: int(random.integers(1, 3))]:
        time = random.integers(1, 20, (nodes, 2)) / degree
        time[random.random(nodes) < 0.2, 1] = np.inf
        if degree == 2:
            time[random.random(nodes) < 0.2] = np.inf
        degrees.append(
            TensorDegree(
                degree,
                time,
                random.integers(0, 9, (nodes, 2)).astype(float),
                random.integers(0, 6, (nodes, 2)).astype(float),
                random.integers(0, 9, (nodes, 2)).astype(float),
                random.integers(0, 9, (len(edges), 2)) / 2,
                random.integers(0, 9, (len(edges), 2)) / 2,
            )
        )
    memory = float(random.integers(4, 40))
    return HybridProblem(nodes, edges, tuple(degrees), int(random.integers(1, 5)), memory, 2.0, 4)


def partitions(problem: HybridProblem) -> Iterator[list[list[int]]]:
    for stages in itertools.product(range(problem.num_nodes), repeat=problem.num_nodes):
        if set(stages) == set(range(max(stages) + 1)) and all(stages[a] <= stages[b] for a, b in problem.edges):
            yield [[v for v in range(problem.num_nodes) if stages[v] == s] for s in range(max(stages) + 1)]


def stage_time(problem: HybridProblem, nodes: list[int], t: TensorDegree, d: int, later: int) -> float:
    """The least time of a stage, over all choices of variants that fit."""
    y, best = math.ceil((d + later) / d), math.inf
    for chosen in itertools.product(range(2), repeat=len(nodes)):
        variant = dict(zip(nodes, chosen, strict=True))
        held = sum(t.per_microbatch_bytes[v, l] * y + t.always_bytes[v, l] for v, l in variant.items())
        moved = 0.0
        for e, (a, b) in enumerate(problem.edges):
            if b in variant and a not in variant:
                moved += t.entering_bytes[e, variant[b]]
            if a in variant and b not in variant:
                moved += t.leaving_bytes[e, variant[a]]
        params = sum(t.param_bytes[v, l] for v, l in variant.items())
        time = sum(t.time_s[v, l] for v, l in variant.items()) / d
        time += (2 * moved / d + 4 * (d - 1) / d * params / problem.microbatches) / problem.bytes_per_s
        best = min(best, time if held <= problem.memory_bytes else math.inf)
    return best


def brute(problem: HybridProblem) -> float:
    best = math.inf
    degrees = [d for d in range(1, problem.devices + 1) if problem.microbatches % d == 0]
    for stages in partitions(problem):
        for pairs in itertools.product(itertools.product(degrees, problem.degrees), repeat=len(stages)):
            if sum(d * t.degree for d, t in pairs) > problem.devices or sum(d for d, _ in pairs) > problem.microbatches:
                continue
            later, slowest = 0, 0.0
            for nodes, (d, t) in zip(reversed(stages), reversed(pairs), strict=True):
                slowest = max(slowest, stage_time(problem, nodes, t, d, later))
                later += d
            best = min(best, slowest)
    return best


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_best_of_all(seed: int) -> None:
    problem = random_problem(np.random.default_rng(seed))
    expected, found = brute(problem), partition_hybrid(problem)
    assert found.proved
    assert (found.stages is None) == math.isinf(expected)
    if found.stages is not None:
        assert found.time_s == pytest.approx(expected, rel=1e-8) == slowest_s(problem, list(found.stages))
        assert found.bound_s <= expected * (1 + 1e-12)
    else:
        assert found.bound_s == math.inf


def test_beyond_the_ideals_allowed_the_bound_stays_a_bound() -> None:
    problem = random_problem(np.random.default_rng(3))
    exact, found = partition_hybrid(problem), partition_hybrid(problem, most_ideals=0)
    assert found.time_s >= exact.time_s * (1 - 1e-8) and found.bound_s <= exact.time_s


def test_no_time_gives_no_proof() -> None:
    problem = random_problem(np.random.default_rng(3))
    found = partition_hybrid(problem, time_limit_s=-1.0)
    assert found.stages is None and math.isfinite(found.bound_s) and not found.proved
