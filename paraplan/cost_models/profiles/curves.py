"""Monotone curves through measurements: more work never takes less time, whatever noise says.

Measurements of like size are pooled until they rise (pool adjacent violators, which is least squares under that
constraint), then joined by straight lines. Outside of what was measured time is proportional to size above, and above
zero below. Source: Barlow et al. 1972 (isotonic regression).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Curve:
    """Seconds over size.

    Attributes:
        sizes: rising.
        seconds: not falling.
        powers: whether knots are joined by straight lines in logarithms (for sizes over many decades, where below the
            first knot time is proportional too), rather than in the numbers (there it is constant below).
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    powers: bool = False

    def at(self, size: float) -> float:
        """Seconds at a size."""
        xs, ys = self.sizes, self.seconds
        if size >= xs[-1]:
            return ys[-1] * size / xs[-1] if xs[-1] > 0 else ys[-1]
        if size <= xs[0]:
            return ys[0] * size / xs[0] if self.powers else ys[0]
        place = bisect_right(xs, size)
        (x0, x1), (y0, y1) = xs[place - 1 : place + 1], ys[place - 1 : place + 1]
        if self.powers:
            share = math.log(size / x0) / math.log(x1 / x0)
            return y0 * (y1 / y0) ** share
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0)

    @property
    def least_ratio(self) -> float:
        """The least seconds per size anywhere: what a part of something larger adds at least."""
        return min(y / x for x, y in zip(self.sizes, self.seconds, strict=True) if x > 0)


def fit_curve(points: Iterable[tuple[float, float]], powers: bool = False) -> Curve | None:
    """The curve through (size, seconds) points, several of one size at their median; None where there are none.

    `powers`: sizes and seconds must be positive; others are left out.
    """
    by_size: dict[float, list[float]] = {}
    for size, seconds in points:
        if not powers or (size > 0 and seconds > 0):
            by_size.setdefault(size, []).append(seconds)
    if not by_size:
        return None
    sizes = sorted(by_size)
    given = [median(by_size[size]) for size in sizes]
    rising = pooled([math.log(y) for y in given] if powers else given)
    return Curve(tuple(sizes), tuple(map(math.exp, rising)) if powers else tuple(rising), powers)


def pooled(values: list[float]) -> list[float]:
    """The nearest values (least squares) that do not fall."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            before = blocks.pop()
            total, count = total + before[0], count + before[1]
        blocks.append((total, count))
    return [total / count for total, count in blocks for _ in range(count)]
