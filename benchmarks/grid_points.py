"""The points of the full Megatron grid, ranked by estimates, and the best of them planned.

A point is tp x pp x stages a position x samples of a microbatch x schedule x ZeRO level (x ep), data parallel over what
is left, under sequence parallelism where tp > 1. Positions are priced once for each (tp, ep, samples, ZeRO), as the
joint search prices its own (`planner.pipeline.prices.stage_prices`), every point is put in order by the closed form,
and the orders of the best are simulated over stages (`planner.joint.estimate`). Stages of several a position are cut
evenly. What is recomputed is the fourth of a point's choices that fits first: nothing, attention (`selective`), all
(`full`).

Limits: ranks are estimates; only points that are planned and simulated have a step. A point that has to recompute is
ranked between what recomputation op by op would take and recomputing half of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from paraplan.baselines.planners.choosing import plan_answer
from paraplan.baselines.planners.task import Task
from paraplan.ir.errors import ConstraintError, NoPlanError
from paraplan.ir.plan import Plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline, SolveLimits
from paraplan.planner.joint.combinations import Combination
from paraplan.planner.joint.estimate import Pricer
from paraplan.planner.joint.prices.pricing import USUAL
from paraplan.planner.pipeline.first_devices import first_devices
from paraplan.planner.pipeline.meshes import candidate_meshes
from paraplan.planner.pipeline.prices.stage_prices import Sharding, StagePrices
from paraplan.planner.schedules.named import NAMED
from paraplan.planner.sharding.solve import choose
from paraplan.rules.time_axis import program_micro, splittable

SAMPLES = (1, 2, 4, 8)
"""Of a microbatch on a rank."""
CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Stages a position."""
MEGATRON = ("1f1b", "interleaved")
"""The schedules that Megatron-LM has; of one stage the first."""
SIMULATED = 60
"""Points whose orders are simulated, of each share of the schedules."""
NEAR = 1.3
"""How much more than the best a point may take, by the closed form under ZeRO-1, for other levels to be priced."""
SOLVE_S = 10.0
"""For the choice of one sharding."""


@dataclass(frozen=True)
class Degrees:
    """What a price depends on.

    Attributes:
        tp, ep: of tensor and expert parallelism.
        samples: of a microbatch on a rank.
        zero: level.
        parallel: whether there is data parallelism at all.
    """

    tp: int
    ep: int
    samples: int
    zero: int
    parallel: bool


@dataclass(frozen=True)
class Point:
    """One point of the grid.

    Attributes:
        degrees: see there.
        combination: positions, microbatches, schedule, stages a position.
        step_s: estimated.
        remade: whether something is estimated to be recomputed.
    """

    degrees: Degrees
    combination: Combination
    step_s: float
    remade: bool

    @property
    def text(self) -> str:
        """For tables."""
        c, d = self.combination, self.degrees
        ep = f" ep={d.ep}" if d.ep > 1 else ""
        pipe = f" {c.schedule} v={c.each}" if c.pp > 1 else ""
        return f"tp={d.tp}{ep} pp={c.pp} mb={c.microbatches}{pipe} zero={d.zero}"


@dataclass(frozen=True)
class Planned:
    """A point with its simulated plan."""

    point: Point
    recompute: str
    plan: Plan


class Grid:
    """The grid of a job.

    Args:
        job: what is planned.
        has_experts: whether expert-parallel degrees are in it.
    """

    def __init__(self, job: Job, has_experts: bool) -> None:
        self.job, self.has_experts = job, has_experts
        self.task = Task(job)
        self.pricer = Pricer(job.cluster, self.task.budget)
        self.prices: dict[Degrees, StagePrices | None] = {}
        self.num_points = 0

    def ranked(self) -> tuple[list[Point], list[Point]]:
        """The points whose orders were simulated, of Megatron-LM's schedules and of the others, best first."""
        listed = list(self._points(1))
        quick = [(self._quick_s(degrees, each), degrees, each) for degrees, each in listed]
        best_s = min((each[0] for each in quick), default=float("inf"))
        near = {replace(degrees, zero=0) for s, degrees, _ in quick if s <= NEAR * best_s and degrees.parallel}
        near = near or {replace(degrees, zero=0) for _, degrees, _ in quick if degrees.parallel}
        for zero in (0, 2, 3):
            more = [pair for pair in self._points(zero) if replace(pair[0], zero=0) in near]
            quick += [(self._quick_s(degrees, each), degrees, each) for degrees, each in more]
        self.num_points = 4 * len(listed)
        quick.sort(key=lambda each: (each[0], each[2].num_actions))
        own = [each for each in quick if each[2].pp == 1 or each[2].schedule in MEGATRON]
        others = [each for each in quick if each[2].pp > 1 and each[2].schedule not in MEGATRON]
        return self._estimated(own), self._estimated(others)

    def _estimated(self, quick: Sequence[tuple[float, Degrees, Combination]]) -> list[Point]:
        found = []
        for _, degrees, combination in quick[:SIMULATED]:
            prices = self._price(degrees)
            if prices is None:
                continue
            try:
                estimate = self.pricer.estimate(combination, prices, self._shape(combination, prices))
            except ConstraintError:
                continue
            if estimate is None or estimate.over_bytes:
                continue
            forward = sum(prices.forward_s) / sum(prices.seconds)
            more = 1 + forward / 2 if estimate.taken else 1.0
            found.append(Point(degrees, combination, more * estimate.step_s, bool(estimate.taken)))
        return sorted(found, key=lambda each: each.step_s)

    def planned(self, point: Point, limit_s: float) -> Planned | None:
        """The point's plan with the least that has to be recomputed; None where nothing fits."""
        for recompute in ("selective", "full") if point.remade else ("none", "selective", "full"):
            pins = msgspec.structs.replace(self._pins(point), recompute=recompute)
            try:
                plan = plan_answer(replace(self.task, deadline=Deadline(limit_s)), pins).plan
            except (NoPlanError, ConstraintError):
                continue
            return Planned(point, recompute, plan)
        return None

    def _pins(self, point: Point) -> Constraints:
        c = point.combination
        pins = self._degrees(point.degrees, c.pp)
        made = msgspec.structs.replace(pins, pp=c.pp, microbatches=c.microbatches)
        if c.pp == 1:
            return made
        segments = len(self.job.program.segments)
        stages = _even(segments, c.num_stages) if c.each > NAMED[c.schedule].stages else None
        return msgspec.structs.replace(made, schedule=c.schedule, stages=stages)

    def _degrees(self, degrees: Degrees, pp: int) -> Constraints:
        dp = self.job.cluster.num_devices // (degrees.tp * pp)
        ep = degrees.ep if degrees.ep > 1 else None
        return Constraints(dp=dp, tp=degrees.tp, sp=degrees.tp > 1, ep=ep, zero=degrees.zero)

    def _points(self, zero: int) -> Iterator[tuple[Degrees, Combination]]:
        """Every point of a ZeRO level; without data parallelism there is one level, and it counts as the first."""
        job = self.job
        n, per_node = job.cluster.num_devices, min(group.devices_per_node for group in job.cluster.groups)
        tensor = [tp for tp in (1, 2, 4, 8, 16) if tp <= min(n, per_node) and n % tp == 0]
        for tp, pp in itertools.product(tensor, range(1, n + 1)):
            if n % (tp * pp) or pp > len(job.program.segments):
                continue
            try:
                first_devices(job.cluster, pp)
            except ConstraintError:
                continue
            dp = n // (tp * pp)
            rows, left = divmod(job.program.batch_size, dp)
            for ep, samples in itertools.product(self._experts(dp), SAMPLES):
                count, rest = divmod(rows, samples)
                if left or rest or not count or not splittable(job.program, count) or (dp == 1 and zero != 1):
                    continue
                degrees = Degrees(tp, ep, samples, zero if dp > 1 else 0, dp > 1)
                for combination in self._pipelines(pp, count):
                    yield degrees, combination

    def _experts(self, dp: int) -> tuple[int, ...]:
        return tuple(ep for ep in (1, 8) if dp % ep == 0) if self.has_experts else (1,)

    def _pipelines(self, pp: int, count: int) -> Iterator[Combination]:
        if pp == 1:
            yield Combination(1, (), count, "1f1b", 1)
            return
        tail = program_micro(self.job.program, count).has_tail
        for name, kind in NAMED.items():
            for each in CHUNKS:
                takes = kind.takes(each) and kind.counts(pp, count) and pp * each <= len(self.job.program.segments)
                if takes and not (tail and name != "gpipe"):
                    yield Combination(pp, (), count, name, each)

    def _quick_s(self, degrees: Degrees, combination: Combination) -> float:
        prices = self._price(degrees)
        if prices is None:
            return float("inf")
        return self.pricer.quick_s(combination, prices.totals, self._shape(combination, prices))

    def _shape(self, combination: Combination, prices: StagePrices) -> tuple[int, ...]:
        size = self.job.cluster.num_devices // combination.pp
        inner = prices.shape[1:]
        outer = size
        for axis in inner:
            outer //= axis
        return outer, *inner

    def _price(self, degrees: Degrees) -> StagePrices | None:
        """What a position of these degrees takes, chosen at a usual number of microbatches."""
        if degrees not in self.prices:
            self.prices[degrees] = self._priced(degrees)
        return self.prices[degrees]

    def _priced(self, degrees: Degrees) -> StagePrices | None:
        job, batch = self.job, self.job.program.batch_size
        n = job.cluster.num_devices
        widths = [pp for pp in range(1, n + 1) if n % (degrees.tp * pp) == 0]
        widths = [pp for pp in widths if (n // (degrees.tp * pp) > 1) == degrees.parallel]
        usual: list[tuple[float, int, int]] = []
        for pp in widths:
            count, left = divmod(batch, n // (degrees.tp * pp) * degrees.samples)
            if count and not left and (n // (degrees.tp * pp)) % degrees.ep == 0 and splittable(job.program, count):
                usual.append((abs(count - USUAL), pp, count))
        for _, pp, count in sorted(usual)[:3]:
            pins = msgspec.structs.replace(
                self._degrees(degrees, pp), dp=n // (degrees.tp * pp), microbatches=count, recompute="none"
            )
            try:
                part = replace(job, cluster=first_devices(job.cluster, pp))
                limits = SolveLimits(time_s=SOLVE_S, memory_bytes=self.task.budget, certify=False)
                decisions = choose(part, candidate_meshes(part, pins)[0], count, pins, limits, None)
                sharding = Sharding(part, decisions)
                assert sharding.prices.totals.seconds
            except (ConstraintError, NoPlanError):
                continue
            return sharding.prices
        return None


def _even(segments: int, count: int) -> tuple[tuple[int, int], ...]:
    ends = [segments * at // count for at in range(count + 1)]
    return tuple(itertools.pairwise(ends))
