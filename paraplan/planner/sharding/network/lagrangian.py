"""Rows and streams by multipliers: the best bound a network has, and choices found on the way.

For stream weights w >= 0 and row multipliers m >= 0 the network without rows,

    q(w, m)  =  min_x  w . work(x)  +  m . (activity(x) - limit)

bounds  min_x { w . work(x) : activity(x) <= limit }  from below. q is concave; it is maximised over m (w fixed: the
objective's bound), or over m and w with sum 1 (no plan is faster than the work of any one stream, hence than any convex
combination: a bound on the step) by Kelley's cutting planes, each evaluation of q giving a cut and, often, choices that
fit. Evaluations start from the messages of the last one, so later ones take a few sweeps.

Sources: Kelley 1960; Geoffrion 1974.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from paraplan.planner.sharding.network.cost_network import Floats, Network
from paraplan.planner.sharding.network.message_passing import MessagePassing
from paraplan.planner.solvers.milp import MilpBuilder, solve

TIGHT = 1e-7
"""Relative difference at which a bound and a cost are one."""

BOX = 0.1
"""Where multipliers start to be looked for, in units of the work of all streams per limit: far out, messages start from
nothing; the box grows while it holds them back."""

DECODED = 1e-3
"""Choices are read off new messages once the bound rises by less between two looks, relatively: it costs a sweep."""

BEYOND, FAR = 0.3, 32.0
"""Where a bound may become enough, what is missing and so much more is aimed at, for bounds lie below their cuts; up to
so many times the best multipliers."""

SWEEPS = 200
"""At most so many an evaluation; a dozen is usual."""


@dataclass
class Point:
    """One evaluation of q.

    Attributes:
        weights, multipliers: where.
        bound: a lower bound of q there.
        choices: what the messages say is best there.
        work, slack: of those choices; slack is activity - limit, positive where a row is broken.
        messages: the messages that prove the bound.
    """

    weights: Floats
    multipliers: Floats
    bound: float
    choices: tuple[int, ...]
    work: Floats
    slack: Floats
    messages: MessagePassing

    @property
    def value(self) -> float:
        """q at the choices: not below q."""
        return float(self.weights @ self.work + self.multipliers @ self.slack)


def scalarised(network: Network, weights: Floats, multipliers: Floats) -> tuple[list[Floats], list[Floats]]:
    """Scalar costs per variable and factor.

    Args:
        network: with costs per stream.
        weights: [stream], with sum 1.
        multipliers: [row], at least 0.
    """
    unary = [prices @ weights for prices in network.prices]
    pairs = []
    for factor in network.factors:
        reachable = factor.reachable
        cost = np.where(reachable[..., None], factor.prices, 0.0) @ weights
        cost[~reachable] = np.inf
        pairs.append(cost)
    for row, multiplier in zip(network.rows, multipliers, strict=True):
        if multiplier > 0.0:
            for variable, held in row.held.items():
                unary[variable] = unary[variable] + multiplier * held
            for number, moved in row.moved.items():
                pairs[number] = pairs[number] + multiplier * moved
    return unary, pairs


def evaluate(
    network: Network,
    weights: Floats,
    multipliers: Floats,
    stop: float,
    warm: MessagePassing | None = None,
    gap: float = TIGHT,
    enough: float = np.inf,
) -> Point:
    """q and the choices that attain it, as near as the messages get.

    Args:
        network: the problem.
        weights: [stream].
        multipliers: [row].
        stop: `time.perf_counter()` at which to come back with what there is.
        warm: messages to start from.
        gap: relative difference of bound and choices at which to stop.
        enough: a bound at which to stop; sweeps that come a hundredth nearer to it are worth going on.
    """
    messages = MessagePassing(network, *scalarised(network, weights, multipliers), warm)
    offset = float(multipliers @ network.limits())
    best: tuple[float, list[int]] | None = None
    bound = last = -np.inf
    for count in range(SWEEPS):
        late = not messages.sweep(stop)
        if not late and count % 4 != 3 and not (warm is not None and count == 1):
            continue
        bound = messages.bound()
        scale = max(abs(bound if best is None else min(best[0], abs(bound))), 1e-300)
        to_do = max(enough + offset - bound, 0.0)
        stalled = bound - last <= max(0.1 * gap * scale, 1e-5 * scale, 0.01 * to_do if np.isfinite(to_do) else 0.0)
        ends = late or stalled or to_do <= 0.0 or time.perf_counter() > stop or count + 1 == SWEEPS
        if late and best is not None:
            break
        if ends or bound - last <= DECODED * scale or count == 1:
            choices = messages.decode(stop)
            cost = messages.cost(choices)
            if best is None or cost < best[0]:
                best = cost, choices
            ends |= best[0] - bound <= gap * scale
        if ends:
            break
        last = bound
    assert best is not None
    chosen = tuple(best[1])
    slack = network.activity(chosen) - network.limits()
    return Point(weights, multipliers, bound - offset, chosen, network.work(chosen), slack, messages)


class Ascent:
    """Maximises q by cutting planes.

    Args:
        network: the problem.
        weights: [stream] fixed weights; None lets them vary with sum 1.
        stop: `time.perf_counter()` at which to come back.
        gap: of every evaluation.
    """

    def __init__(self, network: Network, weights: Floats | None, stop: float, gap: float = TIGHT) -> None:
        self.network, self.weights, self.stop, self.gap = network, weights, stop, gap
        self.points: list[Point] = []
        self.box = BOX

    @property
    def best(self) -> Point:
        """The point with the best bound."""
        return max(self.points, key=lambda point: point.bound)

    def start(
        self, weights: Floats, multipliers: Floats, warm: MessagePassing | None = None, enough: float = np.inf
    ) -> Point:
        """Evaluate at a point, up to a bound that is enough.

        Args:
            weights: [stream] of the streams.
            multipliers: [row] of the rows.
            warm: messages to begin with.
            enough: bound at which an evaluation stops.
        """
        point = evaluate(self.network, weights, multipliers, self.stop, warm, self.gap, enough)
        self.points.append(point)
        return point

    def step(self, enough: float = np.inf) -> tuple[Point, float]:
        """Evaluate where the cuts allow most; the new point, and what no bound can exceed (+inf while not known)."""
        weights, multipliers, ceiling = self._master()
        best = self.best
        if self.weights is not None and best.bound < enough < ceiling:
            aim = min(enough + BEYOND * (enough - best.bound), 0.5 * (enough + ceiling))
            if (nearest := self._reaching(aim)) is not None:
                return self.start(weights, nearest, self.points[-1].messages, enough), ceiling
        mixed = 0.8 * multipliers + 0.2 * best.multipliers
        if self.weights is None:
            weights = 0.8 * weights + 0.2 * best.weights
        return self.start(weights, mixed, self.points[-1].messages, enough), ceiling

    def _master(self) -> tuple[Floats, Floats, float]:
        """The weights and multipliers that maximise the least of the cuts, and that value."""
        streams, rows = self.network.num_streams, len(self.network.rows)
        builder = MilpBuilder()
        low, high = (np.zeros(streams), np.ones(streams)) if self.weights is None else (self.weights, self.weights)
        first = builder.add_columns(streams, lower=low, upper=high)
        extra = builder.add_columns(rows, upper=self.box)
        level = builder.add_columns(1, lower=-np.inf, objective=-1.0)
        if self.weights is None:
            builder.add_row(range(first, first + streams), np.ones(streams), 1.0, 1.0)
        scale = self._cuts(builder, first, extra, level)
        found = solve(builder.build(), relax=True)
        assert found.values is not None
        multipliers = found.values[extra : extra + rows]
        ceiling = -found.objective * scale
        if (multipliers >= self.box * (1 - 1e-9)).any():
            self.box, ceiling = self.box * 4.0, np.inf
        return found.values[:streams], multipliers * scale, ceiling

    def _cuts(self, builder: MilpBuilder, first: int, extra: int, level: int) -> float:
        """Rows: no cut lies below the level. In units of the scale, so that the LP is well scaled; the scale."""
        streams, rows = self.network.num_streams, len(self.network.rows)
        scale = max(float(abs(point.work.sum())) for point in self.points)
        for point in self.points:
            columns = [*range(first, first + streams), *range(extra, extra + rows), level]
            builder.add_row(columns, [*(point.work / scale).tolist(), *point.slack.tolist(), -1.0], 0.0, np.inf)
        return scale

    def _reaching(self, aim: float) -> Floats | None:
        """The multipliers nearest to the best at which no cut lies below a value; None where there are none."""
        assert self.weights is not None
        streams, rows = self.network.num_streams, len(self.network.rows)
        scale = max(float(abs(point.work.sum())) for point in self.points)
        known = self.best.multipliers / scale
        builder = MilpBuilder()
        first = builder.add_columns(streams, lower=self.weights, upper=self.weights)
        extra = builder.add_columns(rows, upper=np.maximum(FAR * known, BOX))
        level = builder.add_columns(1, lower=aim / scale, upper=aim / scale)
        away = builder.add_columns(rows, objective=1.0)
        self._cuts(builder, first, extra, level)
        for row in range(rows):
            for sign in (1.0, -1.0):
                builder.add_row([away + row, extra + row], [1.0, sign], sign * float(known[row]), np.inf)
        found = solve(builder.build(), relax=True)
        return None if found.values is None else found.values[extra : extra + rows] * scale
