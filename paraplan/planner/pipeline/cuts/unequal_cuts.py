"""Where a chain is cut whose stages lie on unequal devices: each takes its own time for a segment, and holds its own.

The dynamic program of `stage_cuts.cut_chain` with prices of each stage's own,

    best[s, j] = min over i < j of max(best[s - 1, i], cost_s[i, j])

exact, in S · n² steps, of which a row of n² is one of numpy's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paraplan.planner.pipeline.cuts.stage_cuts import Bounds

Costs = npt.NDArray[np.float64]
"""[n + 1, n + 1]: what the segments [i, j) take as one stage; infinite where they may not be one."""


def cut_unequal(costs: Sequence[Costs], tail: int) -> Bounds | None:
    """The cut whose slowest stage takes least.

    Args:
        costs: per stage.
        tail: from this segment on all are in the last stage.
    Returns:
        [first, stop) of every stage; None where no cut may be.
    """
    n, last = len(costs[0]) - 1, len(costs) - 1
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    firsts: list[npt.NDArray[np.intp]] = []
    for stage, cost in enumerate(costs):
        if stage == last and last:
            best[tail + 1 :] = np.inf
        slowest = np.maximum(best[:, None], cost)
        firsts.append(slowest.argmin(0))
        best = slowest[firsts[-1], np.arange(n + 1)]
    if not np.isfinite(best[n]):
        return None
    found, stop = [], n
    for each in reversed(firsts):
        first = int(each[stop])
        found.append((first, stop))
        stop = first
    return tuple(reversed(found))


def stage_costs(seconds: Sequence[float]) -> Costs:
    """What runs of segments take, of what each takes; none may be empty."""
    totals = np.array([0.0, *itertools.accumulate(seconds)])
    found: Costs = totals[None, :] - totals[:, None]
    found[np.tril_indices(len(totals))] = np.inf
    return found
