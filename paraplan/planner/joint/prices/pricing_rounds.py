"""Kinds priced in rounds, each with what was known before it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from paraplan.ir.errors import ConstraintError
from paraplan.planner.assemble import Decisions
from paraplan.planner.joint.combinations import Combination
from paraplan.planner.joint.prices.positions import USUAL
from paraplan.planner.joint.prices.pricing import NEAR, Pricing, fewest_positions, packed_prices
from paraplan.planner.joint.prices.pricing_order import Kind, Way, in_turn, steps_of, usual_samples, ways_of
from paraplan.planner.joint.prices.sharding_front import is_priced

TIGHT = 0.03
"""By how much the closed form of a kind's shardings may be above that of ones that keep nothing for room not to be
short; and how near the best of them one has to come to be taken over for the next kind."""
BATCH = 4
"""Kinds priced with what was known before the first of them."""
SMALL = 16
"""Devices up to which every mesh is priced once before any is again, and positions of one come first."""
HIRED_S = 2.0
"""Seconds of a search from which on processes beside this one are worth their start."""


class PricingRounds:
    """What combinations need, as it is priced: of all inner axes the fewest samples first, and more as long as they
    pay.

    Args:
        pricing: of their positions.
        listed: the combinations.
        rivals: whether what comes nowhere near the best of the others is left out; where positions of others follow,
            other microbatches may be better than alone.
    """

    def __init__(self, pricing: Pricing, listed: Sequence[Combination], rivals: bool = True) -> None:
        self.pricing, self.listed, self.rivals = pricing, listed, rivals
        self._needed: dict[Kind, list[Combination]] = {}
        for combination in listed:
            self._needed.setdefault(pricing.kind(combination), []).append(combination)
        ways = ways_of(self._needed, usual_samples(pricing.job.program))
        pairs = itertools.chain(*itertools.zip_longest(*map(steps_of, ways)))
        self._waiting: list[tuple[Kind, Way]] = [pair for pair in pairs if pair is not None]
        if pricing.job.cluster.num_devices <= SMALL:
            first: dict[object, tuple[Kind, Way]] = {}
            for pair in self._waiting:
                first.setdefault(pair[0][:3], pair)
            # each mesh once; of a device there are no shardings to choose among
            begins = sorted(first.values(), key=lambda pair: pair[0][1:3] != (1, 1))
            self._waiting = [*begins, *(pair for pair in self._waiting if pair not in begins)]

    def go_on(self, best_s: float = math.inf) -> None:
        """Price what is left, until it is late.

        Args:
            best_s: the shortest step known; what cannot come near it is not priced.
        """
        pricing = self.pricing
        while self._waiting and not (
            pricing.prices and pricing.is_late and (pricing.has_fitting or pricing.deadline.is_over)
        ):
            batch: list[tuple[Kind, Way]] = []
            for kind, way in in_turn(self._waiting, self._promised_s):
                if any(other in (way, way.of) for _, other in batch):
                    continue
                self._waiting.remove((kind, way))
                if self._may_pay(kind, way, best_s):
                    batch.append((kind, way))
                if len(batch) == (1 if pricing.deadline.is_over else 2 if pricing.is_late else BATCH):
                    break
            if batch:
                taken = {kind: self._in_layouts(kind, way, best_s) for kind, way in batch if self.rivals}
                self._price({kind: taken.get(kind, ()) for kind, _ in batch}, best_s)
            for kind, way in (each for each in batch if each[0] in pricing.prices):
                way.add(kind[3], pricing.prices[kind])
                kind_s = pricing.least_s(self._needed[kind], [each.totals for each in pricing.prices[kind]])
                pricing.has_fitting |= math.isfinite(kind_s)
                best_s = min(best_s, kind_s if self.rivals else math.inf)

    def has_more(self, best_s: float) -> bool:
        """Whether there was no time for what may pay.

        Args:
            best_s: the shortest step known.
        """
        return any(self._may_pay(kind, way, best_s) for kind, way in self._waiting)

    def _may_pay(self, kind: Kind, way: Way, best_s: float) -> bool:
        return way.pays and self._promised_s(kind, way) <= (1 + NEAR) * best_s

    def _price(self, kinds: Mapping[Kind, Sequence[Decisions]], best_s: float) -> None:
        """Price kinds, each apart, in the layouts given where there are any; after the deadline no other. Those of
        which all is priced are left."""
        pricing, needed = self.pricing, self._needed
        kinds = {kind: layouts for kind, layouts in kinds.items() if kind not in pricing.whole}
        if not kinds:
            return
        usual = [min(needed[kind], key=lambda each: abs(math.log2(each.microbatches / USUAL))) for kind in kinds]
        if pricing.workers is not None and pricing.deadline.passed_s > HIRED_S:
            pricing.workers.start()
        tasks = [(each, needed[kind], best_s, kinds[kind]) for kind, each in zip(kinds, usual, strict=True)]
        pricing.alike.update(kind for kind, layouts in kinds.items() if layouts)
        is_known = all(map(self._is_known, usual, map(needed.__getitem__, kinds)))
        if pricing.workers is None or not pricing.workers.has_idle or is_known:
            for kind, task in zip(kinds, tasks, strict=True):
                if pricing.prices and pricing.deadline.is_over:
                    return
                pricing.progress(f"prices of stages: {task[0].text}")
                pricing.prices[kind] = pricing.priced(*task)
            return
        pricing.progress(f"prices of stages: {'; '.join(each.text for each in usual)}")
        lost = pricing.workers.lost
        made = pricing.workers.map(packed_prices, tasks, pricing)
        for kind, task, (packed, is_whole) in zip(kinds, tasks, made, strict=True):
            # what there are no prices of says why only where it is priced
            pricing.prices[kind] = tuple(each.prices(pricing) for each in packed) or pricing.priced(*task)
            pricing.whole.update([kind] if is_whole else [])
        if pricing.workers.lost > lost:
            pricing.progress("a worker process ended; its part is priced here")

    def _in_layouts(self, kind: Kind, way: Way, best_s: float) -> tuple[Decisions, ...]:
        """Shardings of the last kind of a way that come near its best, which those of the next are hardly better than;
        none where such as keep less than any of them may be the best of all."""
        if not way.priced:
            return ()
        combinations, pricing = self._needed[kind], self.pricing
        alike = [each.totals.of_more(kind[3] / way.samples, 0.0) for each in way.priced]
        least = [pricing.least_s(combinations, [each]) for each in alike]
        weightless_s = pricing.least_s(combinations, [each.weightless() for each in alike])
        is_leanest = min(least) == least[-1]
        may_win = is_leanest and (1 + TIGHT) * weightless_s < min(least) and weightless_s <= (1 + TIGHT) * best_s
        if math.isinf(min(least)) or may_win:
            return ()
        near = [each for each, s in zip(way.priced, least, strict=True) if s <= (1 + TIGHT) * min(least)]
        if pricing.is_wide(combinations[0]) and not any(each.sharding.divides_samples for each in near):
            return ()
        return tuple(each.sharding.decisions for each in near)

    def _is_known(self, combination: Combination, combinations: Sequence[Combination]) -> bool:
        """Whether another search has priced it in this process, for as many positions."""
        pricing = self.pricing
        try:
            where, fewest = pricing.position(combination), fewest_positions(combinations)
            return is_priced(*where, combination.microbatches, fewest, pricing.is_wide(combination))
        except ConstraintError:
            return False

    def _promised_s(self, kind: Kind, way: Way) -> float:
        """What the combinations of a kind come to, were a sample even faster than in the last one of its way, or as
        fast as in that of more; 0.0 where none was priced."""
        if not way.priced:
            return 0.0
        times = kind[3] / way.samples
        faster = 1 - (1 - way.gain) ** max(math.log2(times), 0.0)
        return self.pricing.least_s(self._needed[kind], [each.totals.of_more(times, faster) for each in way.priced])
