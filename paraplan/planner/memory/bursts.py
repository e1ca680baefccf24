"""Bytes inside bursts of reruns, for the relaxation at critical instants.

Between instants k and k + 1, what is resident at k + 1 and was not made again in between stayed all the while, whenever
in the segment an op runs. Columns and rows, for a tensor v made by instant k and an op j that runs in segment k for the
first time, or again (then the row binds only where again[k, j]):

    stays[k, v]  >=  resident[k + 1, v] - again[k, maker v]           (1 for resident after the last instant, of kept v)
    working_j  +  sum of bytes_v stays[k, v], over v that j neither reads nor makes  <=  budget          where j runs

Every schedule satisfies this. Only ops that need a good share of the room and tensors that are not small have rows, so
that programs stay small. Source: ours; Checkmate's memory accounting (Jain et al. 2020, 4.4) at instants not looked at.
"""

from __future__ import annotations

import numpy as np

from paraplan.planner.memory.reruns import Arrays, Ints
from paraplan.planner.milp import MilpBuilder

_LARGE, _SMALL = 0.3, 0.005
"""Ops that work on less of the room than the first, and tensors below so much of the budget, are left out."""
_UNIT = 2.0**-26


def add_bursts(
    builder: MilpBuilder, arrays: Arrays, instants: tuple[int, ...], resident: Ints, again: Ints, budget_bytes: int
) -> Ints:
    """Adds the rows; [instant, tensor] the columns `stays`, -1 where there is none of its own."""
    stays = np.full(resident.shape, -1, np.int64)
    large = arrays.working - arrays.base >= _LARGE * (budget_bytes - arrays.base)
    for k, instant in enumerate(instants):
        last = k + 1 == len(instants)
        following = arrays.num_ops if last else instants[k + 1]
        there = arrays.kept if last else resident[k + 1] >= 0
        tensors = np.flatnonzero(there & (arrays.maker <= instant) & (arrays.nbytes > _SMALL * budget_bytes))
        columns: dict[int, int] = {}
        for tensor in tensors.tolist():
            maker = arrays.makers[tensor]
            rerun = int(again[k, maker]) if maker >= 0 else -1
            after = [] if last else [(int(resident[k + 1, tensor]), -1.0)]
            if rerun < 0 and after:
                columns[tensor] = after[0][0]
                continue
            stays[k, tensor] = columns[tensor] = builder.add_columns(1, upper=1.0, integer=True)
            terms = [(columns[tensor], 1.0), *after, *([(rerun, 1.0)] if rerun >= 0 else [])]
            builder.add_row([c for c, _ in terms], [x for _, x in terms], lower=1.0 if last else 0.0)
        for op in np.flatnonzero(large & (again[k] >= 0)).tolist():
            _add_row(builder, arrays, columns, op, budget_bytes, int(again[k, op]))
        for op in np.flatnonzero(large[instant + 1 : following]).tolist():
            _add_row(builder, arrays, columns, instant + 1 + op, budget_bytes, None)
    return stays


def _add_row(
    builder: MilpBuilder, arrays: Arrays, columns: dict[int, int], op: int, budget_bytes: int, where: int | None
) -> None:
    """What stays and an op's working set fit together, where a column is 1 (None: always)."""
    it = arrays.problem.ops[op]
    beside = [tensor for tensor in columns if tensor not in it.reads and tensor not in it.makes]
    shares = np.floor(arrays.nbytes[beside] / budget_bytes / _UNIT) * _UNIT
    room = float(-np.floor(-(budget_bytes - int(arrays.working[op])) / budget_bytes / _UNIT) * _UNIT)
    above = float(shares.sum()) - room
    if above <= 0.0:
        return
    chosen = [columns[tensor] for tensor in beside]
    if where is None:
        builder.add_row(chosen, shares, upper=room)
    else:
        builder.add_row([*chosen, where], [*shares.tolist(), above], upper=room + above)
