"""Options that factors rule out: a layout nobody can make, or nobody can use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paraplan.planner.sharding.network.cost_network import Ints, Network


def consistent(network: Network) -> list[Ints] | None:
    """Options every factor leaves possible, per variable; None where some variable has none left."""
    kept = [np.arange(len(prices)) for prices in network.prices]
    reachable = [factor.reachable for factor in network.factors]
    changed = True
    while changed:
        changed = False
        for factor, finite in zip(network.factors, reachable, strict=True):
            if finite.all():
                continue
            made = np.unique(factor.have[kept[factor.source]])
            for reader, wants in zip(factor.readers, factor.wants, strict=True):
                good = _any(finite[made], 0)[wants[kept[reader]]]
                asked = np.unique(wants[kept[reader]])
                able = _any(finite[:, asked], 1)[factor.have[kept[factor.source]]]
                if not good.all() or not able.all():
                    kept[reader], kept[factor.source] = kept[reader][good], kept[factor.source][able]
                    changed = True
            if any(not len(kept[variable]) for variable in factor.variables):
                return None
    return kept


def _any(flags: NDArray[np.bool_], axis: int) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.logical_or.reduce(flags, axis=axis)
    return found
