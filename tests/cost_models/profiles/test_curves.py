"""Monotone curves: against the least-squares problem they claim to solve, and at their ends."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paraplan.cost_models.profiles.curves import Curve, fit_curve, pooled


def least_squares(values: list[float]) -> float:
    """The least sum of squares of any rising sequence that is constant on runs: every way to cut into runs, tried."""
    best = float("inf")
    for cuts in itertools.product((False, True), repeat=len(values) - 1):
        runs: list[list[float]] = [[values[0]]]
        for value, cut in zip(values[1:], cuts, strict=True):
            runs.append([value]) if cut else runs[-1].append(value)
        means = [sum(run) / len(run) for run in runs]
        if means == sorted(means):
            best = min(best, sum((x - mean) ** 2 for run, mean in zip(runs, means, strict=True) for x in run))
    return best


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 9).map(float), min_size=1, max_size=8))
def test_pooling_is_the_best_rising_fit(values: list[float]) -> None:
    found = pooled(values)
    assert all(b >= a - 1e-12 for a, b in itertools.pairwise(found))
    assert sum((x - y) ** 2 for x, y in zip(values, found, strict=True)) == pytest.approx(least_squares(values))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-7, 10)), min_size=1, max_size=12),
    st.booleans(),
    st.lists(st.floats(0.5, 1e10), min_size=2, max_size=6),
)
def test_curves_never_fall_and_no_part_is_dearer_than_the_whole(
    points: list[tuple[float, float]], powers: bool, sizes: list[float]
) -> None:
    curve = fit_curve(points, powers)
    assert curve is not None
    seconds = [curve.at(size) for size in sorted(sizes)]
    assert all(b >= a * (1 - 1e-9) for a, b in itertools.pairwise(seconds))
    if not powers:  # what a share is priced at adds up to no more than what they cost together
        assert sum(sizes) * curve.least_ratio <= curve.at(sum(sizes)) * (1 + 1e-9)


def test_a_curve_passes_through_rising_points_and_is_proportional_beyond() -> None:
    line = fit_curve([(10, 2.0), (20, 3.0), (10, 4.0)])
    assert line == Curve((10, 20), (3.0, 3.0))
    exact = fit_curve([(10, 1.0), (100, 10.0), (1000, 20.0)], powers=True)
    assert exact is not None
    assert exact.at(10) == pytest.approx(1.0)
    assert exact.at(31.6227766) == pytest.approx(3.16227766)
    assert exact.at(5) == pytest.approx(0.5)
    assert exact.at(2000) == pytest.approx(40.0)
    assert fit_curve([]) is None
    assert fit_curve([(0, 1.0)], powers=True) is None
