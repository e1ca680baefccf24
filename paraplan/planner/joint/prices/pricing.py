"""Prices of a position's devices for what a space of pipelines asks of them, each worked out once.

What prices depend on is a *kind*: the inner axes of a position's mesh and the samples of a microbatch. Kinds are priced
in rounds: of all inner axes those first whose products have rows enough on a rank, then of more samples as long as a
sample is the faster for it, and of fewer (`pricing_order`). Of a kind several shardings are priced, from the one of
least work to those that keep less. By the closed form (`closed_form`) what cannot come near the best known is left out:
a kind, were its samples a little faster still than those of the last; a sharding, did it no more work than the last and
kept nothing. Batches of kinds are priced with what was known before, so that processes beside this one
(`ir.process.workers`) change nothing but the time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from paraplan.ir.errors import ConstraintError, ParaplanError
from paraplan.ir.process.workers import Workers
from paraplan.planner.assemble import Decisions, Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline, SolveLimits
from paraplan.planner.joint.closed_form import ClosedForm
from paraplan.planner.joint.combinations import Combination
from paraplan.planner.joint.prices.positions import USUAL, Positions
from paraplan.planner.joint.prices.pricing_order import Kind, Way, in_turn, steps_of, usual_samples, ways_of
from paraplan.planner.joint.prices.sharding_front import is_priced, priced_front
from paraplan.planner.pipeline.prices.same_layouts import in_same_layouts
from paraplan.planner.pipeline.prices.stage_prices import Sharding, StagePrices
from paraplan.planner.pipeline.prices.stage_totals import Totals
from paraplan.planner.recompute.kind_options import RematOption
from paraplan.planner.sharding.solve import choose

SHARES = (0.1, 0.5, 2.0)
"""Prices of what shardings keep, each as a share of the work at which all would be kept."""
TIGHT = 0.03
"""By how much the closed form of a kind's shardings may be above that of ones that keep nothing for room not to be
short; and how near the best of them one has to come to be taken over for the next kind."""
NEAR = 0.1
"""By how much a closed form may be above the least of all for its combination still to be looked into."""
BATCH = 4
"""Kinds priced with what was known before the first of them."""
GAP = 1e-2
"""Of the work of a sharding that is priced, what it may be above the least."""
LEAN_GAP = 2e-2
"""Likewise of one that is to keep no more than so much."""
SMALL = 16
"""Devices up to which positions of one are priced first."""
ENOUGH = 0.35
"""Of a device's room: where a sharding keeps no more in any pipeline, none that keeps less is looked for."""
HIRED_S = 2.0
"""Seconds of a search from which on processes beside this one are worth their start."""
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
        faults: why some have none.
        under_way: of the bound on combinations, in a process that goes on with it when it is told to.
    """

    budget: int
    progress: Callable[[str], None]
    deadline: Deadline
    workers: Workers | None = None
    prices: dict[Kind, tuple[StagePrices, ...]] = field(default_factory=dict)
    alike: set[Kind] = field(default_factory=set)
    faults: list[ParaplanError] = field(default_factory=list)
    under_way: dict[object, Any] = field(default_factory=dict)
    _has_fitting: bool = False

    def of(self, combination: Combination) -> tuple[StagePrices, ...]:
        """What was priced for a combination: on its own mesh, and what takes as long on one of any width."""
        known, is_wide = self.prices.get(self.kind(combination), ()), self.is_wide(combination)
        return tuple(each for each in known if not is_wide or self._is_there(combination, each))

    def _is_there(self, combination: Combination, prices: StagePrices) -> bool:
        """Whether prices are of a combination's own mesh, or of any width."""
        return prices.shape == self.mesh_shape(combination, prices.shape) or prices.sharding.divides_samples

    def price_all(self, listed: Sequence[Combination], best_s: float = math.inf, rivals: bool = True) -> None:
        """Price what combinations need: of all inner axes the fewest samples first, and more as long as they pay.

        Args:
            listed: the combinations.
            best_s: the shortest step known; what cannot come near it is not priced.
            rivals: whether what comes nowhere near the best of the others is left out; where positions of others
                follow, other microbatches may be better than alone.
        """
        needed: dict[Kind, list[Combination]] = {}
        for combination in listed:
            needed.setdefault(self.kind(combination), []).append(combination)
        ways = ways_of(needed, usual_samples(self.job.program))
        waiting = [pair for pair in itertools.chain(*itertools.zip_longest(*map(steps_of, ways))) if pair is not None]
        alone = [at for at, (kind, _) in enumerate(waiting) if kind[1] == kind[2] == 1]
        if alone and self.job.cluster.num_devices <= SMALL:  # positions of a device have no shardings to choose among
            waiting.insert(0, waiting.pop(alone[0]))
        while waiting and not (self.prices and self._late and (self._has_fitting or self.deadline.is_over)):
            batch: list[tuple[Kind, Way]] = []
            for kind, way in in_turn(waiting, lambda kind, way: self._promised_s(needed[kind], way, kind[3])):
                if any(other in (way, way.of) for _, other in batch):
                    continue
                waiting.remove((kind, way))
                if way.pays and self._promised_s(needed[kind], way, kind[3]) <= (1 + NEAR) * best_s:
                    batch.append((kind, way))
                if len(batch) == (1 if self.deadline.is_over else 2 if self._late else BATCH):
                    break
            if batch:
                taken = {kind: self._in_layouts(needed[kind], way, kind[3], best_s) for kind, way in batch if rivals}
                self._price({kind: taken.get(kind, ()) for kind, _ in batch}, needed, best_s)
            for kind, way in (each for each in batch if each[0] in self.prices):
                way.add(kind[3], self.prices[kind])
                kind_s = self._least_s(needed[kind], [each.totals for each in self.prices[kind]])
                self._has_fitting |= math.isfinite(kind_s)
                best_s = min(best_s, kind_s if rivals else math.inf)

    def _price(
        self, kinds: Mapping[Kind, Sequence[Decisions]], needed: dict[Kind, list[Combination]], best_s: float
    ) -> None:
        """Price kinds, each apart, in the layouts given where there are any; after the deadline no other."""
        usual = [min(needed[kind], key=lambda each: abs(math.log2(each.microbatches / USUAL))) for kind in kinds]
        if self.workers is not None and self.deadline.passed_s > HIRED_S:
            self.workers.start()
        tasks = [(each, needed[kind], best_s, kinds[kind]) for kind, each in zip(kinds, usual, strict=True)]
        self.alike.update(kind for kind, layouts in kinds.items() if layouts)
        is_known = all(map(self._is_known, usual, map(needed.__getitem__, kinds)))
        if self.workers is None or not self.workers.has_idle or is_known:
            for kind, task in zip(kinds, tasks, strict=True):
                if self.prices and self.deadline.is_over:
                    return
                self.progress(f"prices of stages: {task[0].text}")
                self.prices[kind] = self.priced(*task)
            return
        self.progress(f"prices of stages: {'; '.join(each.text for each in usual)}")
        lost = self.workers.lost
        for kind, task, packed in zip(kinds, tasks, self.workers.map(packed_prices, tasks, self), strict=True):
            # what there are no prices of says why only where it is priced
            self.prices[kind] = tuple(each.prices(self) for each in packed) or self.priced(*task)
        if self.workers.lost > lost:
            self.progress("a worker process ended; its part is priced here")

    def _in_layouts(
        self, combinations: Sequence[Combination], way: Way, samples: float, best_s: float
    ) -> tuple[Decisions, ...]:
        """Shardings of the last kind of a way that come near its best, which those of the next are hardly better than;
        none where such as keep less than any of them may be the best of all."""
        if not way.priced:
            return ()
        alike = [each.totals.of_more(samples / way.samples, 0.0) for each in way.priced]
        least = [self._least_s(combinations, [each]) for each in alike]
        weightless_s = self._least_s(combinations, [each.weightless() for each in alike])
        is_leanest = min(least) == least[-1]
        may_win = is_leanest and (1 + TIGHT) * weightless_s < min(least) and weightless_s <= (1 + TIGHT) * best_s
        if math.isinf(min(least)) or may_win:
            return ()
        near = [each for each, s in zip(way.priced, least, strict=True) if s <= (1 + TIGHT) * min(least)]
        if self.is_wide(combinations[0]) and not any(each.sharding.divides_samples for each in near):
            return ()
        return tuple(each.sharding.decisions for each in near)

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
        for combination, packed in zip(combinations, made, strict=True):
            kind = self.kind(combination)
            known = [_layouts(each.sharding.decisions) for each in self.prices[kind]]
            new = [each.prices(self) for each in packed if _layouts(each.decisions) not in known]
            self.prices[kind] = (*self.prices[kind], *new)
            found += new
        return found

    def _is_known(self, combination: Combination, combinations: Sequence[Combination]) -> bool:
        """Whether another search has priced it in this process, for as many positions."""
        try:
            where = self.position(combination)
            return is_priced(*where, combination.microbatches, _fewest(combinations), self.is_wide(combination))
        except ConstraintError:
            return False

    def _promised_s(self, combinations: Sequence[Combination], way: Way, samples: float) -> float:
        """What the combinations of a kind come to, were a sample even faster than in the last one of its way, or as
        fast as in that of more; 0.0 where none was priced."""
        if not way.priced:
            return 0.0
        times = samples / way.samples
        faster = 1 - (1 - way.gain) ** max(math.log2(times), 0.0)
        return self._least_s(combinations, [each.totals.of_more(times, faster) for each in way.priced])

    def _least_s(self, combinations: Sequence[Combination], totals: Sequence[Totals]) -> float:
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
    def _late(self) -> bool:
        return self.deadline.passed_s > PRICED_SHARE * self.deadline.limit_s

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
        leaner, least, fewest = list[StagePrices](), {False: math.inf, True: math.inf}, _fewest(combinations)
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
        if not self.is_wide(combination):
            return self._front(combination, combinations, best_s)
        wide = self._front(combination, combinations, best_s, is_wide=True)
        known = [_layouts(each.sharding.decisions) for each in wide]
        more = [] if self.divides_at_ease else self._front(combination, combinations, best_s)
        return wide + [each for each in more if _layouts(each.sharding.decisions) not in known]

    def _front(
        self, combination: Combination, combinations: Sequence[Combination], best_s: float, is_wide: bool = False
    ) -> list[StagePrices]:
        found, fewest = list[StagePrices](), _fewest(combinations)
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
                if self._late and math.isfinite(self._least_s(combinations, [each.totals for each in found])):
                    break
                if self._least_s(combinations, [found[-1].totals.weightless()]) > (1 + NEAR) * best_s:
                    break
        except ParaplanError as fault:
            self.faults.append(fault)
        return found

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


def _fewest(combinations: Sequence[Combination]) -> int:
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
) -> tuple[Packed, ...]:
    """As `Pricing.priced`, of a process; nothing where there are none.

    Args:
        pricing: this process' own.
        combination, combinations, best_s, layouts: as of `Pricing.priced`.
    """
    return tuple(Packed.of(each) for each in pricing.priced(combination, combinations, best_s, layouts))


def pricing_beside(job: Job, constraints: Constraints, budget: int, deadline: Deadline) -> Pricing:
    """What a worker prices with.

    Args:
        job, constraints, budget, deadline: as of `Pricing`; a worker reports no progress.
    """
    return Pricing(job, constraints, budget, lambda _: None, deadline)
