"""Prices of a position's devices for what a space of pipelines asks of them, each worked out once.

What prices depend on is a *kind*: the inner axes of a position's mesh and the samples of a microbatch. Kinds are priced
in rounds (`pricing_rounds`): of all inner axes those first whose products have rows enough on a rank, then of more
samples as long as a sample is the faster for it, and of fewer (`pricing_order`). Of a kind several shardings are
priced, from the one of least work to those that keep less. By the closed form (`closed_form`) what cannot come near the
best known is left out: a kind, were its samples a little faster still than those of the last; a sharding, did it no
more work than the last and kept nothing. Batches of kinds are priced with what was known before, so that processes
beside this one (`ir.process.workers`) change nothing but the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from paraplan.ir.errors import ParaplanError
from paraplan.ir.process.workers import Workers
from paraplan.planner.assemble import Decisions, Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline, SolveLimits
from paraplan.planner.joint.closed_form import ClosedForm
from paraplan.planner.joint.combinations import Combination
from paraplan.planner.joint.prices.positions import Positions
from paraplan.planner.joint.prices.pricing_order import Kind
from paraplan.planner.joint.prices.sharding_front import priced_front
from paraplan.planner.pipeline.prices.same_layouts import in_same_layouts
from paraplan.planner.pipeline.prices.stage_prices import Sharding, StagePrices
from paraplan.planner.pipeline.prices.stage_totals import Totals
from paraplan.planner.recompute.kind_options import RematOption
from paraplan.planner.sharding.solve import choose

SHARES = (0.1, 0.5, 2.0)
"""Prices of what shardings keep, each as a share of the work at which all would be kept."""
NEAR = 0.1
"""By how much a closed form may be above the least of all for its combination still to be looked into."""
GAP = 1e-2
"""Of the work of a sharding that is priced, what it may be above the least."""
LEAN_GAP = 2e-2
"""Likewise of one that is to keep no more than so much."""
ENOUGH = 0.35
"""Of a device's room: where a sharding keeps no more in any pipeline, none that keeps less is looked for."""
PRICED_SHARE, SOLVED_SHARE = 0.56, 0.04
"""Of the time limit, after which nothing else is priced once something fits; of the time left, for the choice of one
sharding."""


@dataclass
class Pricing(Positions):
    """Prices as they become known.

    Attributes:
        job, constraints: as of `Positions`.
        budget: bytes a device may hold.
        progress: told what is being priced.
        deadline: of the whole search.
        workers: that price beside this process; None for none.
        prices: per kind, its shardings, fastest first.
        alike: kinds whose shardings were chosen for others of their way.
        whole: kinds of which there are no other shardings to price, whatever a step may take.
        faults: why some have none.
        share: of the time limit, after which nothing else is priced once something fits.
        has_fitting: whether something does.
        under_way: of the bound on combinations, in a process that goes on with it when it is told to.
    """

    budget: int
    progress: Callable[[str], None]
    deadline: Deadline
    workers: Workers | None = None
    prices: dict[Kind, tuple[StagePrices, ...]] = field(default_factory=dict)
    alike: set[Kind] = field(default_factory=set)
    whole: set[Kind] = field(default_factory=set)
    faults: list[ParaplanError] = field(default_factory=list)
    under_way: dict[object, Any] = field(default_factory=dict)
    share: float = PRICED_SHARE
    has_fitting: bool = False

    def of(self, combination: Combination) -> tuple[StagePrices, ...]:
        """What was priced for a combination: on its own mesh, and what takes as long on one of any width."""
        known, is_wide = self.prices.get(self.kind(combination), ()), self.is_wide(combination)
        return tuple(each for each in known if not is_wide or self._is_there(combination, each))

    def _is_there(self, combination: Combination, prices: StagePrices) -> bool:
        """Whether prices are of a combination's own mesh, or of any width."""
        return prices.shape == self.mesh_shape(combination, prices.shape) or prices.sharding.divides_samples

    def price_own(self, combinations: Sequence[Combination], best_s: float = math.inf) -> list[StagePrices]:
        """Shardings chosen for combinations' own microbatches, where those of their kinds were chosen for others; all
        that are new, which are among the prices of the kinds from now on.

        Args:
            combinations: of kinds that were priced.
            best_s: the shortest step known.
        """
        tasks = [(each, [each], best_s) for each in combinations]
        if self.workers is not None and self.workers.has_idle:
            made = self.workers.map(packed_prices, tasks, self)
        else:
            made = [packed_prices(self, *task) for task in tasks]
        found: list[StagePrices] = []
        for combination, (packed, _) in zip(combinations, made, strict=True):
            kind = self.kind(combination)
            known = [_layouts(each.sharding.decisions) for each in self.prices[kind]]
            new = [each.prices(self) for each in packed if _layouts(each.decisions) not in known]
            self.prices[kind] = (*self.prices[kind], *new)
            found += new
        return found

    def least_s(self, combinations: Sequence[Combination], totals: Sequence[Totals]) -> float:
        """What the best combination comes to under some shardings of its kind."""
        return min(
            (
                self.form.quick_s(combination, each, self.mesh_shape(combination, each.shape))
                for each in totals
                for combination in combinations
            ),
            default=math.inf,
        )

    @cached_property
    def form(self) -> ClosedForm:
        """What combinations come to at first sight."""
        return ClosedForm(self.job.cluster, self.budget)

    @property
    def is_late(self) -> bool:
        return self.deadline.passed_s > self.share * self.deadline.limit_s

    def priced(
        self,
        combination: Combination,
        combinations: Sequence[Combination],
        best_s: float = math.inf,
        layouts: Sequence[Decisions] = (),
    ) -> tuple[StagePrices, ...]:
        """Shardings on a position's devices with their prices, fastest first; none that keeps more and takes longer.

        Args:
            combination: whose mesh and microbatches they are chosen for.
            combinations: that they are used for.
            best_s: the shortest step known: where one that does no more work and keeps nothing comes nowhere near it,
                none that keeps less is looked for.
            layouts: shardings chosen for others, to be taken where they are possible; () for those of least work here.
        """
        try:
            found = self._taken_over(combination, layouts) or self._chosen(combination, combinations, best_s)
        except ParaplanError as fault:  # of one candidate: others are priced
            self.faults.append(fault)
            return ()
        found.sort(key=lambda each: sum(each.seconds))
        leaner, least, fewest = list[StagePrices](), {False: math.inf, True: math.inf}, fewest_positions(combinations)
        for each in found:
            kept = each.kept_bytes(each.shape) + fewest * each.saved_bytes
            ways = [False, True] if self.is_wide(combination) and each.sharding.divides_samples else [False]
            if any(kept < least[way] for way in ways):
                least |= {way: min(least[way], kept) for way in ways}
                leaner.append(each)
        return tuple(leaner)

    def _taken_over(self, combination: Combination, layouts: Sequence[Decisions]) -> list[StagePrices]:
        """Prices of layouts chosen for others, where all are possible; else nothing."""
        with suppress(ParaplanError):
            part, _, mesh = self.position(combination)
            found = [in_same_layouts(part, each, mesh, combination.microbatches) for each in layouts]
            return [each.prices for each in found if each is not None] if all(found) else []
        return []

    def _chosen(
        self, combination: Combination, combinations: Sequence[Combination], best_s: float
    ) -> list[StagePrices]:
        """Prices of shardings of least work, and of such as keep less and less as long as that may pay; what there is
        where the next cannot be found. Where positions of other widths share them, of such as divide all that carries
        samples along the first axis, and of others where these are the less work."""
        ways = [False] if not self.is_wide(combination) else [True] if self.divides_at_ease else [True, False]
        found, are_whole = list[StagePrices](), True
        for is_wide in ways:
            known = [_layouts(each.sharding.decisions) for each in found]
            priced, is_whole = self._front(combination, combinations, best_s, is_wide)
            found += [each for each in priced if _layouts(each.sharding.decisions) not in known]
            are_whole &= is_whole
        if are_whole:
            self.whole.add(self.kind(combination))
        return found

    def _front(
        self, combination: Combination, combinations: Sequence[Combination], best_s: float, is_wide: bool
    ) -> tuple[list[StagePrices], bool]:
        """Prices of shardings of one way, and whether they are all that there are to price."""
        found, is_whole, fewest = list[StagePrices](), True, fewest_positions(combinations)
        part, inner, mesh = self.position(combination)
        limits = SolveLimits(
            time_s=self.deadline.share_s(SOLVED_SHARE), memory_bytes=self.budget, relative_gap=GAP, certify=False
        )
        widest = (self.job.cluster.num_devices // (fewest * math.prod(mesh.shape[1:])), *mesh.shape[1:])
        try:
            for prices in priced_front(part, inner, mesh, combination.microbatches, limits, SHARES, fewest, is_wide):
                found.append(prices)
                kept = found[-1].kept_bytes(widest) + fewest * _saved(prices)
                if kept <= ENOUGH * self.budget * fewest:
                    break
                is_late = self.is_late and math.isfinite(self.least_s(combinations, [each.totals for each in found]))
                if is_late or self.least_s(combinations, [found[-1].totals.weightless()]) > (1 + NEAR) * best_s:
                    is_whole = False
                    break
        except ParaplanError as fault:
            self.faults.append(fault)
            is_whole = False
        return found, is_whole

    def leaner(self, combination: Combination, kept_bytes: float) -> StagePrices:
        """The prices of a sharding of least work that keeps no more than so much of the whole model on a position.

        Raises:
            NoPlanError: there is none, or none was found in time.
        """
        part, inner, mesh = self.position(combination)
        limits = SolveLimits(
            time_s=self.deadline.share_s(SOLVED_SHARE), memory_bytes=self.budget, relative_gap=LEAN_GAP, certify=False
        )
        return Sharding(part, choose(part, mesh, combination.microbatches, inner, limits, kept_bytes)).prices


def _layouts(decisions: Decisions) -> tuple[object, ...]:
    """What decisions say of layouts alone."""
    return decisions.ops, decisions.input_grads, decisions.params, decisions.batch


def fewest_positions(combinations: Sequence[Combination]) -> int:
    """Positions of the shortest pipeline among combinations; 1 where there is none."""
    return min((each.pp for each in combinations if each.pp > 1), default=1)


def _saved(prices: StagePrices) -> float:
    """What a microbatch saves of the whole model: halfway between all that it may and the least that it has to."""
    return (prices.saved_bytes + prices.recomputing[-1][0]) / 2


@dataclass(frozen=True)
class Packed:
    """Prices without the job they are of, to be passed between processes."""

    decisions: Decisions
    options: tuple[tuple[RematOption, ...], ...]
    numbers: tuple[Any, ...]

    @staticmethod
    def of(prices: StagePrices) -> Packed:
        """Some prices."""
        return Packed(prices.sharding.decisions, prices.sharding.options, prices.numbers)

    def at_hand(self, pricing: Pricing, combination: Combination) -> StagePrices:
        """The prices as a process knows them, from now on at least.

        Args:
            pricing: the process' own.
            combination: that they are of.
        """
        kind = pricing.kind(combination)
        known = pricing.prices.get(kind, ())
        own = self.decisions.mesh.shape, self.numbers
        found = next((each for each in known if (each.shape, each.numbers) == own), None)
        if found is None:
            found = self.prices(pricing)
            pricing.prices[kind] = (*known, found)
        return found

    def prices(self, pricing: Pricing) -> StagePrices:
        """The prices, of the job that another process prices: on the devices that they were found for, which may be
        more or fewer than those of a combination that shares them."""
        part = pricing.part(pricing.job.cluster.num_devices // self.decisions.mesh.size)
        return StagePrices(Sharding(part, self.decisions, self.options), *self.numbers)


def packed_prices(
    pricing: Pricing,
    combination: Combination,
    combinations: Sequence[Combination],
    best_s: float,
    layouts: Sequence[Decisions] = (),
) -> tuple[tuple[Packed, ...], bool]:
    """As `Pricing.priced`, of a process, nothing where there are none; and whether there are no others.

    Args:
        pricing: this process' own.
        combination, combinations, best_s, layouts: as of `Pricing.priced`.
    """
    found = tuple(Packed.of(each) for each in pricing.priced(combination, combinations, best_s, layouts))
    return found, pricing.kind(combination) in pricing.whole


def pricing_beside(job: Job, constraints: Constraints, budget: int, deadline: Deadline) -> Pricing:
    """What a worker prices with.

    Args:
        job, constraints, budget, deadline: as of `Pricing`; a worker reports no progress.
    """
    return Pricing(job, constraints, budget, lambda _: None, deadline)
