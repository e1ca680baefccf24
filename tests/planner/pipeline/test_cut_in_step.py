"""Cuts whose stages side by side are as long, against every cut."""

from __future__ import annotations

import itertools
import random

import pytest

from paraplan.planner.pipeline.cuts.cut_in_step import cut_in_step
from paraplan.planner.schedules.named import named_orders
from paraplan.planner.schedules.order_times import OrderTimes

Bounds = tuple[tuple[int, int], ...]


def _in_step(seconds: list[float], bounds: Bounds, positions: int) -> float:
    stages = [sum(seconds[slice(*bound)]) for bound in bounds]
    return sum(max(stages[first : first + positions]) for first in range(0, len(stages), positions))


def _held(schedule: str, positions: int, each: int) -> tuple[tuple[int, ...], ...]:
    orders = named_orders(schedule, positions, 2 * positions, each)
    return tuple(tuple(mine) for mine in OrderTimes(orders, positions * each).held)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "hanayo"])
@pytest.mark.parametrize("seed", range(4))
def test_no_cut_is_more_in_step(schedule: str, seed: int) -> None:
    draw = random.Random(seed)
    seconds = [draw.choice((1.0, 2.0, 3.5)) for _ in range(draw.choice((4, 7, 10)))]
    tail = draw.choice((len(seconds), len(seconds) - 1))
    found = cut_in_step(seconds, _held(schedule, 2, 2), tail)
    assert found is not None and [i for bound in found for i in range(*bound)] == list(range(len(seconds)))
    assert all(first < stop for first, stop in found) and found[-1][0] <= tail
    every = (
        tuple(itertools.pairwise((0, *inner, len(seconds))))
        for inner in itertools.combinations(range(1, len(seconds)), 3)
        if inner[-1] <= tail
    )
    least = min(_in_step(seconds, bounds, 2) for bounds in every)
    assert least <= _in_step(seconds, found, 2) * (1 + 1e-9) <= least * 1.02


def test_layers_of_two_unequal_halves_are_in_step() -> None:
    """Evenly filled stages would have a half more here and there, for which all others wait."""
    seconds = [1.0, 2.0] * 10
    found = cut_in_step(seconds, _held("interleaved", 2, 4), len(seconds))
    assert found is not None and _in_step(seconds, found, 2) == 15.0
    even = tuple((round(i * 2.5), round((i + 1) * 2.5)) for i in range(8))
    assert _in_step(seconds, even, 2) > 15.0


def test_loads_are_evened_out_within_the_same_lengths() -> None:
    seconds = [3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0]
    held = _held("interleaved", 2, 2)
    found = cut_in_step(seconds, held, len(seconds))
    assert found is not None and _in_step(seconds, found, 2) == 6.0
    stages = [sum(seconds[slice(*bound)]) for bound in found]
    assert [sum(stages[stage] for stage in mine) for mine in held] == [6.0, 6.0]


@pytest.mark.parametrize(
    "held",
    [((0,), (1,)), _held("chimera", 2, 1), ((0, 1), (2, 3))],
    ids=["a stage a position", "stages at two positions", "stages that are no part side by side"],
)
def test_others_are_left(held: tuple[tuple[int, ...], ...]) -> None:
    assert cut_in_step([1.0] * 12, held, 12) is None


def test_nor_are_chains_of_too_few_segments_cut() -> None:
    assert cut_in_step([1.0] * 7, _held("interleaved", 4, 2), 7) is None
    assert cut_in_step([1.0] * 9, _held("interleaved", 4, 2), 5) is None
