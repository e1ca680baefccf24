"""Minimum cuts of a network of arcs, by OR-Tools' maximum flow."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from ortools.graph.python.max_flow import SimpleMaxFlow

WHOLE = 1 << 50
"""What all arcs that may be cut come to together, in the whole numbers that a flow is of."""


def sink_side(
    tails: npt.NDArray[np.int64], heads: npt.NDArray[np.int64], costs: npt.NDArray[np.float64], source: int, sink: int
) -> set[int]:
    """The nodes on the sink's side of a minimum cut, as few as there can be.

    Args:
        tails, heads: [arc] nodes.
        costs: [arc] of cutting it, at least 0; infinite where it may not be cut. Told apart to a 2^-50th of their sum.
        source, sink: to be parted; a cut of finite cost parts them.
    """
    bounded = np.isfinite(costs)
    scale = WHOLE / (float(costs[bounded].sum()) or 1.0)
    capacities = np.where(bounded, np.rint(np.where(bounded, costs, 0.0) * scale), WHOLE + len(costs))
    flow = SimpleMaxFlow()
    flow.add_arcs_with_capacity(tails, heads, capacities.astype(np.int64))
    if (status := flow.solve(source, sink)) != flow.OPTIMAL:
        raise AssertionError(f"no minimum cut of {len(costs)} arcs was found: {status}")
    return set(flow.get_sink_side_min_cut())
