"""The most promising of a space's combinations, estimated: all by a closed form, the best with their orders.

Orders of combinations are simulated by this process and those beside it, a batch at a time. A closed form does not see
how finely a chain can be cut: of as many positions and stages a position as were estimated before, others are taken to
be longer than by their closed form by as much as those were, and where none of a batch fits by `UNFIT`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paraplan.ir.errors import ParaplanError
from paraplan.planner.joint.closed_form import ClosedForm
from paraplan.planner.joint.combinations import Combination
from paraplan.planner.joint.estimate import Estimate, EstimateNumbers, Pricer
from paraplan.planner.joint.prices.pricing import Packed, Pricing
from paraplan.planner.joint.prices.pricing_order import Kind
from paraplan.planner.joint.prices.pricing_rounds import PricingRounds
from paraplan.planner.joint.promise import UNFIT
from paraplan.planner.pipeline.prices.stage_prices import StagePrices

ESTIMATED, FEWEST = 40, 20
"""Combinations, in their shardings, whose orders are simulated: the best by a closed form; and how many in any case."""
ALIKE, WORSE = 0.03, 0.08
"""How much longer than in its best sharding a combination may take in another for that to be estimated as well; how
much longer than the best estimate what is left is thought to take for nothing else to be estimated."""
ESTIMATED_SHARE = 0.62
"""Of the time limit, after which nothing else is estimated."""
OWN, EACH, OWN_SHARE = 2, 3, 0.7
"""Kinds whose best pipelines have shardings chosen for their own microbatches; how many of each kind are estimated in
these; of the time limit, after which not."""
BATCH = 10
"""Combinations handed out at once."""

_Waiting = tuple[float, int, Combination, StagePrices]
"""A combination in a sharding: its closed form's seconds, its number, and both."""


def estimate_best(
    rounds: PricingRounds, best_s: float, faults: list[ParaplanError], share: float = 1.0
) -> list[Estimate]:
    """Of combinations, the most promising first.

    Args:
        rounds: of their prices; gone on with.
        best_s: the shortest step known.
        faults: added to: why some are not estimated.
        share: of the budget, what they are to hold at most.
    """
    pricing, listed = rounds.pricing, rounds.listed
    form = pricing.form = ClosedForm(pricing.job.cluster, int(share * pricing.budget))
    rounds.go_on(best_s)
    quick: list[_Waiting] = []
    for number, combination in enumerate(listed):
        known = [
            (form.quick_s(combination, prices.totals, pricing.mesh_shape(combination, prices.shape)), prices)
            for prices in pricing.of(combination)
        ]
        least_s = min((each_s for each_s, _ in known), default=math.inf)
        if known and math.isinf(least_s):  # where none fits, the leanest
            quick.append((least_s, number, combination, known[-1][1]))
        near = (each for each in known if math.isfinite(each[0]) and each[0] <= (1 + ALIKE) * least_s)
        quick += [(each_s, number, combination, prices) for each_s, prices in near]
    found = _in_turn(pricing, quick, faults, share)
    if all(each.combination.pp > 1 for each in found):  # what one stage comes to says whether it is solved
        alone = min((each for each in quick if each[2].pp == 1), key=lambda each: each[:2], default=None)
        found += [] if alone is None else _batch(pricing, [alone[2:]], faults, share)
    found += _own(pricing, found, best_s, faults, share)
    ranked: dict[Combination, Estimate] = {}
    for estimate in sorted(found, key=lambda each: each.rank):
        ranked.setdefault(estimate.combination, estimate)
    return list(ranked.values())


def _in_turn(
    pricing: Pricing,
    waiting: list[_Waiting],
    faults: list[ParaplanError],
    share: float,
) -> list[Estimate]:
    """Estimates of some combinations: the most promising first, by what is known after each batch."""
    found: list[Estimate] = []
    off: dict[tuple[int, int], float] = {}
    most, num_done = min(ESTIMATED, len(waiting)), 0

    def hoped_s(each: _Waiting) -> float:
        return each[0] * off.get((each[2].pp, each[2].each), 1.0)

    while num_done < most:
        waiting = sorted(waiting, key=lambda each: (hoped_s(each), each[1]))
        least_s = min((estimate.step_s for estimate in found), default=math.inf)
        late = pricing.deadline.passed_s > ESTIMATED_SHARE * pricing.deadline.limit_s
        if num_done >= FEWEST and (late or hoped_s(waiting[0]) > (1 + WORSE) * least_s):
            break
        batch, waiting = waiting[:BATCH], waiting[BATCH:]
        num_done += len(batch)
        made = _batch(pricing, [each[2:] for each in batch], faults, share)
        found += made
        quick_s = {(each[2], id(each[3])): each[0] for each in batch}
        fitting, unfit = dict[tuple[int, int], float](), set[tuple[int, int]]()
        for estimate in made:
            own_s = quick_s[estimate.combination, id(estimate.prices)]
            key = estimate.combination.pp, estimate.combination.each
            if math.isinf(estimate.step_s):
                unfit.add(key)
            elif math.isfinite(own_s):
                fitting[key] = min(fitting.get(key, off.get(key, math.inf)), estimate.step_s / own_s)
        off |= {key: UNFIT * off.get(key, 1.0) for key in unfit - fitting.keys()} | fitting
    return found


def _own(
    pricing: Pricing, found: Sequence[Estimate], best_s: float, faults: list[ParaplanError], share: float
) -> list[Estimate]:
    """The best pipelines, of two kinds, in shardings that are chosen for their own microbatches and positions."""
    best: dict[object, Combination] = {}
    for estimate in sorted(found, key=lambda each: each.rank):
        combination = estimate.combination
        kind = pricing.kind(combination)
        if (kind in pricing.alike or combination.pp > 1) and math.isfinite(estimate.step_s):
            best.setdefault(kind, combination)
    own = list(best.values())[:OWN]
    if not own or pricing.deadline.passed_s > OWN_SHARE * pricing.deadline.limit_s:
        return []
    pricing.progress(f"shardings for their own microbatches: {'; '.join(each.text for each in own)}")
    new = {id(prices) for prices in pricing.price_own(own, best_s)}
    kinds = [pricing.kind(each) for each in own]
    alike: dict[Combination, Kind] = {}  # of these kinds the best, in whatever schedule
    for estimate in sorted(found, key=lambda each: each.rank):
        kind = pricing.kind(estimate.combination)
        if kind in kinds and sum(kind == other for other in alike.values()) < EACH:
            alike[estimate.combination] = kind
    pairs = [(each, prices) for each in alike for prices in pricing.of(each) if id(prices) in new]
    return _batch(pricing, pairs, faults, share)


def _batch(
    pricing: Pricing, batch: Sequence[tuple[Combination, StagePrices]], faults: list[ParaplanError], share: float
) -> list[Estimate]:
    tasks = [(combination, Packed.of(prices), share) for combination, prices in batch]
    if pricing.workers is None:
        made = [numbers_of(pricing, *task) for task in tasks]
    else:
        made = pricing.workers.map(numbers_of, tasks, pricing)
    found: list[Estimate] = []
    for (combination, prices), numbers in zip(batch, made, strict=True):
        if isinstance(numbers, str):
            faults.append(ParaplanError(numbers))
        elif numbers is not None:
            found.append(numbers.priced(combination, prices))
    return found


def numbers_of(
    pricing: Pricing, combination: Combination, packed: Packed, share: float = 1.0
) -> EstimateNumbers | str | None:
    """What a combination comes to, of this process or another; None where its stages cannot be cut, and why where it
    is not estimated.

    Args:
        pricing: of its positions.
        combination: which.
        packed: its prices.
        share: of the budget, what it is to hold at most.
    """
    prices = packed.at_hand(pricing, combination)
    pricer = Pricer(pricing.job.cluster, int(share * pricing.budget), pricing.constraints.stages)
    try:
        found = pricer.estimate(combination, prices, pricing.mesh_shape(combination, prices.shape))
    except ParaplanError as fault:  # of one candidate: others are estimated
        return str(fault)
    return None if found is None else found.numbers
