"""Local search over sets of reruns that fit: undo some, squeeze again with other prices, polish.

Each round takes a share of the reruns away in a window of stages (or everywhere), squeezes what then overflows with
every op's seconds multiplied by a random factor, so that other tensors are let go of, and polishes. The best is kept.
Some rounds begin anew from no reruns at all: at deep budgets the draw of the factors decides much. Later rounds gain by
windows and small factors (on a U-Net at a fifth of its peak, all that was gained), so they begin anew seldom.
Rounds are drawn from a generator of a given seed, so equal input gives equal answers where no deadline cuts them short.

Source: large-neighbourhood search by ruin and recreate (Schrimpf et al. 2000).
"""

from __future__ import annotations

import time

import numpy as np

from paraplan.planner.memory.improvement.greedy_eviction import EvictionPrices, polish, squeeze
from paraplan.planner.memory.reruns import Floats, Residency, without_dead

_ANEW = 4
"""Every so many rounds begin anew; from `_SETTLED` rounds on a quarter as often."""
_SETTLED = 20


def improve(
    best: Residency,
    budget_bytes: int,
    rounds: int,
    deadline: float,
    enough_s: float = 0.0,
    seed: int = 0,
    seen: list[Residency] | None = None,
) -> Residency:
    """A schedule no worse, after some rounds or where the deadline passes or `enough_s` of reruns are reached.

    Args:
        best: where it begins.
        budget_bytes: that may be held.
        rounds: at most.
        deadline: `time.perf_counter()` at which to stop.
        enough_s: seconds of reruns that are good enough.
        seed: of what is drawn.
        seen: takes every schedule that was found.
    """
    draw = np.random.default_rng(seed)
    current = best = polish(best, budget_bytes)
    for index in range(rounds):
        if time.perf_counter() > deadline or best.recomputed_s <= enough_s * (1 + 1e-9):
            break
        prices = EvictionPrices.drawn(best.arrays, draw)
        anew = index % (_ANEW if index < _SETTLED else 4 * _ANEW) == 0
        start = best.again(best.arrays.diagonal()) if anew else _ruined(current, draw)
        found = squeeze(start, budget_bytes, deadline, most_s=1.2 * best.recomputed_s, prices=prices)
        if found is None:
            continue
        found = polish(polish(found, budget_bytes, prices), budget_bytes)
        if seen is not None:
            seen.append(found)
        if found.recomputed_s <= current.recomputed_s * (1 + draw.choice((0.0, 0.0, 0.003))):
            current = found
        if found.recomputed_s < best.recomputed_s:
            best = found
    return best


def _ruined(profile: Residency, draw: np.random.Generator) -> Residency:
    """With a share of the reruns taken away, in a window of the stages."""
    stages = profile.arrays.num_ops
    share = draw.choice((0.1, 0.3, 0.6, 1.0))
    inside = profile.rerun.copy()
    if draw.random() < 0.9:
        width = max(2, int(stages * draw.choice((0.05, 0.15, 0.4))))
        first = int(draw.integers(-width // 2, stages))
        inside &= (profile.stages >= first) & (profile.stages < first + width)
    gone: Floats = draw.random(len(profile.keys))
    return without_dead(profile.again(profile.keys[~(inside & (gone < share))]))
