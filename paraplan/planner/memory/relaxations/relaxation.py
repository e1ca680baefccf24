"""The step seen at a few critical instants: a lower bound, and what to keep and what to recompute.

An instant is an op t of the order, at its first execution. Between instants k and k + 1 lies segment k; before the
first instant everything is there that was made. Columns, for a tensor v and an op j first made or run by instant k:

    resident[k, v]  whether v is resident at instant k          (continuous: integral where `again` is)
    again[k, j]     whether j is executed again in segment k    (binary)

    minimise  1 + sum_k,j time_j again[k, j]          in units of every op once
    subject to
      resident[k, v] + again[k, maker v] >= 1                        v read first-hand in segment k, or kept (needs)
      resident[k, u] + again[k, maker u] >= again[k, j]              u read by j                             (reruns)
      resident[k, v] + again[k, maker v] >= resident[k + 1, v]       what is there came from somewhere       (carried)
      base + workspace_t + sum_v bytes_v resident[k, v] <= budget    instant k at op t
      resident[k, v] = 1                                             v read or made by t

Where there are tiers, back[k, v], what is brought back, joins again[k, maker v] in all these (`relaxed_copies`).

With integral columns alone, and where asked, what is made by reruns of gradients from gradients before them is cut
off: there such reruns need nothing, which holds for every schedule too, and instants have columns of what is near them.

Every schedule in the given order satisfies this (count a segment's executions of an op once, and look at memory at the
instants alone), so its bound is one for all of them. All rows but the budgets' are clauses: with `resident` integral,
which loses nothing, a solver that learns from conflicts proves in a second what branching does not in a minute. Source:
Checkmate's ILP (Jain et al. 2020, section 4) with a stage per segment instead of one per op.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paraplan.planner.memory.problem import GIVEN, Tier
from paraplan.planner.memory.relaxations.bursts import add_bursts, repeats_inside
from paraplan.planner.memory.relaxations.relaxed_copies import add_copies
from paraplan.planner.memory.reruns import Arrays, Bools, Floats, Ints, Residency, gather
from paraplan.planner.solvers.milp import Milp, MilpBuilder

_TINY, _ALL_TINY = 1e-3, 1e-2
"""The smallest tensors, each up to so much of the budget and up to so much in all, are taken as there at every instant,
where columns are integral."""
_BEHIND = 6
"""Reruns of the backward that take so many more of its ops are taken to need nothing further: gradients are made from
those before them, up to the loss, and nobody makes them again so."""
_NEVER = 1 << 30
_SECONDS, _BYTES = 2.0**-36, 2.0**-26
"""Units of the coefficients, in steps and budgets: what rounding them down takes from the bound is below 1e-8."""


@dataclass(frozen=True, eq=False)
class Relaxation:
    """The program and where its columns are.

    Attributes:
        instants: [instant] ops, ascending.
        milp: in units of the step's compute seconds and the budget's bytes.
        resident: [instant, tensor] columns; -1 where it is 0 for certain.
        again: [instant, op] columns; -1 where it is 0 for certain.
        back: [instant, tensor] columns, likewise.
        stays: [instant, tensor] columns of `bursts`; -1 where there is none.
        tiny: [tensor] what is taken as there at every instant, at no bytes.
    """

    instants: tuple[int, ...]
    milp: Milp
    resident: Ints
    again: Ints
    back: Ints
    stays: Ints
    tiny: Bools

    def residents(self, values: Floats) -> Bools:
        """[instant, tensor] of a solution, minimal for its reruns."""
        return np.asarray((np.where(self.resident >= 0, values[self.resident], 0.0) > 0.5) | self.tiny)

    def reruns(self, values: Floats) -> Bools:
        """[instant, op] of a solution."""
        return np.asarray(np.where(self.again >= 0, values[self.again], 0.0) > 0.5)

    def returns(self, values: Floats) -> Bools:
        """[instant, tensor] of a solution: what is brought back from a tier."""
        return np.asarray(np.where(self.back >= 0, values[self.back], 0.0) > 0.5)

    def encode(self, profile: Residency) -> Floats:
        """The columns of a schedule, which satisfy every row where it fits."""
        values = np.zeros(self.milp.num_columns)
        values[0] = 1.0
        n = profile.arrays.num_ops
        at = np.searchsorted(profile.keys, np.array(self.instants, np.int64) * (n + 1))
        rerun = profile.rerun
        for k, position in enumerate(at.tolist()):
            there = profile.tensor[(profile.start <= position) & (profile.last >= position)]
            columns = self.resident[k, there]
            values[columns[columns >= 0]] = 1.0
            until = at[k + 1] if k + 1 < len(at) else len(profile.keys)
            runs = profile.ops[position:until][rerun[position:until]]
            columns = self.again[k, runs]
            values[columns[columns >= 0]] = 1.0
        for k, tensor in zip(*np.nonzero(self.stays >= 0), strict=True):
            rerun = self.again[k, profile.arrays.maker[tensor]]
            after = 1.0 if k + 1 == len(self.instants) else values[self.resident[k + 1, tensor]]
            values[self.stays[k, tensor]] = after if rerun < 0 else max(0.0, after - values[rerun])
        return values


def useful(arrays: Arrays, instant: int) -> Bools:
    """[tensor] what anything after an instant may need, reruns included."""
    nothing = np.zeros(arrays.num_tensors, bool), np.zeros(arrays.num_ops, bool)
    return _wanted(arrays, instant, *nothing, arrays.num_ops)[0]


def _wanted(arrays: Arrays, instant: int, free: Bools, closing: Bools, deep: int) -> tuple[Bools, Bools]:
    """What is needed, as `useful` says, and [op] whose reruns are taken to need nothing.

    `free`: [tensor] there for nothing; `closing`: [op] those, and those of the backward that take so many of its ops
    behind one another to be of use.
    """
    problem = arrays.problem
    depth = np.full(arrays.num_tensors, _NEVER)
    depth[arrays.kept] = depth[arrays.read_tensor[arrays.read_start[instant + 1] :]] = 0
    depth[free] = _NEVER
    closed = closing.copy()
    for op in range(instant, -1, -1):
        it = problem.ops[op]
        least = min((int(depth[tensor]) for tensor in it.makes), default=_NEVER)
        if least == _NEVER or not it.repeatable:
            continue
        closed[op] |= it.backward and least >= deep
        for tensor in () if closed[op] else it.reads:
            depth[tensor] = _NEVER if free[tensor] else min(int(depth[tensor]), least + it.backward)
    return (depth < _NEVER) & (arrays.maker <= instant), closed


def build_relaxation(
    arrays: Arrays,
    instants: tuple[int, ...],
    budget_bytes: int,
    tiers: tuple[Tier, ...] = (),
    rerun: bool = True,
    integral: bool = False,
    every: bool = False,
    near: bool = True,
) -> Relaxation:
    """The program for some instants.

    Args:
        arrays: of the memory problem.
        instants: ascending, each once.
        budget_bytes: on the device.
        tiers: where tensors may be copied to.
        rerun: whether anything may be made again.
        integral: with no continuous column, for solvers that want none, and with the bytes between instants (`bursts`).
        every: those at every op, not only at ops that need much.
        near: with reruns far from an instant cut off.
    """
    builder = MilpBuilder()
    builder.add_columns(1, lower=1.0, upper=1.0, integer=integral, objective=1.0)  # every op once: gaps are of the step
    shape = (len(instants), arrays.num_tensors), (len(instants), arrays.num_ops)
    tiny = _tiny(arrays, budget_bytes) if integral else np.zeros(arrays.num_tensors, bool)
    near = near and integral
    closing = _closing(arrays) if near else np.zeros(arrays.num_ops, bool)
    closed = np.zeros(shape[1], bool)
    resident, again = np.full(shape[0], -1, np.int64), np.full(shape[1], -1, np.int64)
    scale_s = float(arrays.time_s.sum()) or 1.0
    for k, instant in enumerate(instants):
        wanted, closed[k] = _wanted(arrays, instant, tiny, closing, _BEHIND if near else arrays.num_ops)
        at, forced = _here(arrays, instant, wanted, tiny)
        first = builder.add_columns(len(at), lower=forced.astype(float), upper=1.0, integer=integral)
        resident[k, at] = first + np.arange(len(at))
        runs = np.unique(arrays.maker[wanted & (arrays.maker != GIVEN)])
        runs = runs[arrays.repeatable[runs] & (arrays.working[runs] <= budget_bytes) & rerun]
        if integral and every:
            following = instants[k + 1] if k + 1 < len(instants) else arrays.num_ops
            runs = np.append(runs, repeats_inside(arrays, instant, following, budget_bytes))
        first = builder.add_columns(
            len(runs), upper=1.0, integer=True, objective=_down(arrays.time_s[runs] / scale_s, _SECONDS)
        )
        again[k, runs] = first + np.arange(len(runs))
    back = np.full(shape[0], -1, np.int64)
    if tiers:
        back = add_copies(builder, arrays, instants, again, resident, tiers, budget_bytes)
    rows = _Rows(arrays, builder, resident, again, back, tiny, closed)
    for k, instant in enumerate(instants):
        following = instants[k + 1] if k + 1 < len(instants) else arrays.num_ops - 1
        rows.needs(k, instant, following, last=k + 1 == len(instants))
        rows.reruns(k, instant)
        if k + 1 < len(instants):
            rows.carried(k, instant)
        rows.room(k, instant, budget_bytes)
    stays = np.full(shape[0], -1, np.int64)
    if integral:
        stays = add_bursts(builder, arrays, instants, resident, again, budget_bytes, every)
    return Relaxation(instants, builder.build(), resident, again, back, stays, tiny)


def _here(arrays: Arrays, instant: int, wanted: Bools, tiny: Bools) -> tuple[Ints, Bools]:
    """Tensors that may be resident at an instant, and of each whether it is whatever is chosen."""
    forced = np.zeros(arrays.num_tensors, bool)
    forced[[*arrays.problem.ops[instant].reads, *arrays.problem.ops[instant].makes]] = True
    at = np.flatnonzero((wanted | forced) & ~tiny)
    return at, forced[at]


def _tiny(arrays: Arrays, budget_bytes: int) -> Bools:
    made = np.flatnonzero((arrays.maker != GIVEN) & (arrays.nbytes <= _TINY * budget_bytes))
    order = made[np.argsort(arrays.nbytes[made], kind="stable")]
    found = np.zeros(arrays.num_tensors, bool)
    found[order[np.cumsum(arrays.nbytes[order]) <= _ALL_TINY * budget_bytes]] = True
    return found


def _closing(arrays: Arrays) -> Bools:
    """[op] those whose results are read after the backward alone, by updates: gradients of parameters.

    To make one again takes the backward up to it, so that nothing would ever be out of sight: at an instant near the
    end there would be columns for every tensor of the step. Taken to need nothing it costs its own seconds.
    """
    last = max((index for index, op in enumerate(arrays.problem.ops) if op.backward), default=arrays.num_ops - 1)
    read_on = np.zeros(arrays.num_tensors, bool)
    read_on[arrays.read_tensor[: arrays.read_start[last + 1]]] = True
    return np.array([bool(op.makes) and not read_on[list(op.makes)].any() for op in arrays.problem.ops], bool)


def _down(values: Floats, unit: float) -> Floats:
    """Rounded down to multiples of a unit, a power of two: solvers over integers scale such coefficients exactly."""
    return np.asarray(np.floor(values / unit) * unit)


class _Rows:
    """Rows of the program, added in blocks."""

    def __init__(
        self, arrays: Arrays, builder: MilpBuilder, resident: Ints, again: Ints, back: Ints, tiny: Bools, closed: Bools
    ) -> None:
        self.arrays, self.builder, self.resident, self.again, self.back = arrays, builder, resident, again, back
        self.tiny, self.closed = tiny, closed

    def needs(self, k: int, instant: int, following: int, last: bool) -> None:
        """What the segment's first executions read is resident at its instant or made again."""
        arrays = self.arrays
        _, read = gather(arrays.read_start, arrays.read_tensor, np.arange(instant + 1, following + 1))
        read = np.unique(np.concatenate([read, np.flatnonzero(arrays.kept)])) if last else np.unique(read)
        self._at_least(k, read[(arrays.maker[read] <= instant) & ~self.tiny[read]], None)

    def reruns(self, k: int, instant: int) -> None:
        """What a rerun reads is resident at the instant, or made again, or made later."""
        runs = np.flatnonzero((self.again[k] >= 0) & ~self.closed[k])
        owner, read = gather(self.arrays.read_start, self.arrays.read_tensor, runs)
        before = (self.arrays.maker[read] <= instant) & ~self.tiny[read]
        self._at_least(k, read[before], self.again[k, runs[owner[before]]])

    def carried(self, k: int, instant: int) -> None:
        """What is resident at the next instant was at this one, or is made again."""
        read = np.flatnonzero((self.resident[k + 1] >= 0) & (self.arrays.maker <= instant))
        self._at_least(k, read, self.resident[k + 1, read])

    def room(self, k: int, instant: int, budget_bytes: int) -> None:
        """What is resident at the instant fits beside what its op allocates."""
        at = np.flatnonzero(self.resident[k] >= 0)
        room = budget_bytes - self.arrays.base - int(self.arrays.workspace[instant])
        unit = float(max(budget_bytes, 1))
        self.builder.add_row(
            self.resident[k, at],
            _down(self.arrays.nbytes[at] / unit, _BYTES),
            upper=-float(_down(np.array(-room / unit), _BYTES)),
        )

    def _at_least(self, k: int, tensors: Ints, other: Ints | None) -> None:
        """resident[k, v] + again[k, maker v] + back[k, v] >= the other column, or 1."""
        if not len(tensors):
            return
        maker = self.arrays.maker[tensors]
        again = np.where(maker >= 0, self.again[k, np.maximum(maker, 0)], -1)
        blocks = [(self.resident[k, tensors], 1.0), (again, 1.0), (self.back[k, tensors], 1.0)]
        if other is not None:
            blocks.append((other, -1.0))
        rows, columns, coefficients = [], [], []
        for column, coefficient in blocks:
            there = np.flatnonzero(column >= 0)
            rows.append(there)
            columns.append(column[there])
            coefficients.append(np.full(len(there), coefficient))
        self.builder.add_rows(
            len(tensors),
            np.concatenate(rows),
            np.concatenate(columns),
            np.concatenate(coefficients),
            lower=0.0 if other is not None else 1.0,
        )
