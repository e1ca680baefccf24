"""The most promising of a space's combinations, estimated: all by a closed form, the best with their orders.

Orders of combinations are simulated by this process and those beside it, a batch at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paraplan.ir.errors import ParaplanError
from paraplan.planner.joint.closed_form import ClosedForm
from paraplan.planner.joint.combinations import Combination
from paraplan.planner.joint.estimate import Estimate, EstimateNumbers, Pricer
from paraplan.planner.joint.pricing import USUAL, Packed, Pricing
from paraplan.planner.pipeline.stage_prices import StagePrices

ESTIMATED, FEWEST = 40, 20
"""Combinations, in their shardings, whose orders are simulated: the best by a closed form; and how many in any case."""
ALIKE = 0.03
"""How much longer than in its best sharding a combination may take in another for that to be estimated as well."""
ESTIMATED_SHARE = 0.62
"""Of the time limit, after which nothing else is estimated."""
OWN, OWN_SHARE = 2, 0.7
"""Kinds whose best pipelines have shardings chosen for their own microbatches; of the time limit, after which not."""
BATCH = 10
"""Combinations handed out at once."""


def estimate_best(
    pricing: Pricing, listed: Sequence[Combination], best_s: float, faults: list[ParaplanError], share: float = 1.0
) -> list[Estimate]:
    """Of combinations, the most promising first.

    Args:
        pricing: of their positions.
        listed: the combinations.
        best_s: the shortest step known.
        faults: added to: why some are not estimated.
        share: of the budget, what they are to hold at most.
    """
    form = pricing.form = ClosedForm(pricing.job.cluster, int(share * pricing.budget))
    pricing.price_all(listed, best_s)
    quick: list[tuple[float, int, Combination, StagePrices]] = []
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
    best = [each[2:] for each in sorted(quick, key=lambda each: each[:2])[:ESTIMATED]]
    found: list[Estimate] = []
    for first in range(0, len(best), BATCH):
        if first >= FEWEST and pricing.deadline.passed_s > ESTIMATED_SHARE * pricing.deadline.limit_s:
            break
        found += _batch(pricing, best[first : first + BATCH], faults, share)
    found += _own(pricing, found, best_s, faults, share)
    ranked: dict[Combination, Estimate] = {}
    for estimate in sorted(found, key=lambda each: each.rank):
        ranked.setdefault(estimate.combination, estimate)
    return list(ranked.values())


def _own(
    pricing: Pricing, found: Sequence[Estimate], best_s: float, faults: list[ParaplanError], share: float
) -> list[Estimate]:
    """The best pipelines, of two kinds, in shardings that are chosen for their own microbatches."""
    best: dict[object, Combination] = {}
    for estimate in sorted(found, key=lambda each: each.rank):
        combination = estimate.combination
        if combination.pp > 1 and math.isfinite(estimate.step_s) and combination.microbatches != USUAL:
            best.setdefault(pricing.kind(combination), combination)
    own = list(best.values())[:OWN]
    if not own or pricing.deadline.passed_s > OWN_SHARE * pricing.deadline.limit_s:
        return []
    pricing.progress(f"shardings for their own microbatches: {'; '.join(each.text for each in own)}")
    new = {id(prices) for prices in pricing.price_own(own, best_s)}
    pairs = [(each, prices) for each in own for prices in pricing.of(each) if id(prices) in new]
    return _batch(pricing, pairs, faults, share)


def _batch(
    pricing: Pricing, batch: Sequence[tuple[Combination, StagePrices]], faults: list[ParaplanError], share: float
) -> list[Estimate]:
    tasks = []
    for combination, prices in batch:
        known = pricing.of(combination)
        at = next(number for number, each in enumerate(known) if each is prices)
        tasks.append((combination, at, tuple(map(Packed.of, known)), share))
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
    pricing: Pricing, combination: Combination, at: int, known: tuple[Packed, ...], share: float = 1.0
) -> EstimateNumbers | str | None:
    """What a combination comes to, of this process or another; None where its stages cannot be cut, and why where it
    is not estimated.

    Args:
        pricing: of its positions.
        combination: which.
        at: the number of its prices.
        known: all that were priced for it.
        share: of the budget, what it is to hold at most.
    """
    if len(pricing.of(combination)) < len(known):
        part = pricing.position(combination)[0]
        pricing.prices[pricing.kind(combination)] = tuple(each.prices(part) for each in known)
    prices = pricing.of(combination)[at]
    pricer = Pricer(pricing.job.cluster, int(share * pricing.budget), pricing.constraints.stages)
    try:
        found = pricer.estimate(combination, prices, pricing.mesh_shape(combination, prices.shape))
    except ParaplanError as fault:  # of one candidate: others are estimated
        return str(fault)
    return None if found is None else found.numbers
