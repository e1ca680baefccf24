"""What a mixed-integer linear program is, and what came out of solving one.

    minimise  offset + c·x   subject to   L ≤ A·x ≤ U,   l ≤ x ≤ u,   x_j integer for j in I

Everything is a numpy array and A is sparse by rows, so that a sharding problem of 10^5 columns is built
without one Python object per term. Solvers live in `milp_mathopt.py` and `milp_pulp.py`; callers use `milp.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from paraplan.ir.errors import ParaplanError
from paraplan.ir.struct import Value

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

FEASIBILITY_TOLERANCE = 1e-6
"""How far a row may be violated, relative to its largest coefficient or bound (at least 1)."""

_INTEGRALITY_TOLERANCE = 1e-9


class SolverError(ParaplanError):
    """A solver failed, is not installed, or cannot take this kind of problem; names the backend."""


class Status(enum.Enum):
    """How a solve ended."""

    OPTIMAL = "optimal"
    """A solution within the asked gap of a proved bound."""
    FEASIBLE = "feasible"
    """A limit was reached; the best solution found so far, with the bound proved so far."""
    INFEASIBLE = "infeasible"
    """Proved: there is no solution."""
    LIMIT = "limit"
    """A limit was reached before any solution was found; nothing is proved about feasibility."""
    UNBOUNDED = "unbounded"
    """Solutions exist and the objective has no minimum."""


class Milp(Value, frozen=True, kw_only=True, eq=False):
    """A mixed-integer linear program, always minimised.

    Attributes:
        lower, upper: [column] bounds, infinite where there is none.
        is_integer: [column].
        objective: [column] coefficients.
        objective_offset: constant added to the objective.
        row_starts: [row + 1]; row r owns entries row_starts[r] .. row_starts[r + 1].
        columns: [entry] column of each entry, ascending and unique within a row.
        coefficients: [entry], none of them zero.
        row_lower, row_upper: [row] bounds, infinite where there is none.
    """

    lower: Floats
    upper: Floats
    is_integer: Bools
    objective: Floats
    objective_offset: float
    row_starts: Ints
    columns: Ints
    coefficients: Floats
    row_lower: Floats
    row_upper: Floats

    @property
    def num_columns(self) -> int:
        return len(self.lower)

    @property
    def num_rows(self) -> int:
        return len(self.row_lower)

    @property
    def entry_rows(self) -> Ints:
        """[entry] the row of each entry."""
        return np.repeat(np.arange(self.num_rows), np.diff(self.row_starts))

    def activity(self, values: Floats) -> Floats:
        """A·x, [row]."""
        return _sums(self.entry_rows, self.coefficients * values[self.columns], self.num_rows)

    def evaluate(self, values: Floats) -> float:
        """offset + c·x."""
        return self.objective_offset + float(self.objective @ values)

    def row_magnitude(self) -> Floats:
        """[row] the largest |coefficient|; 0 for an empty row."""
        largest = np.zeros(self.num_rows)
        np.maximum.at(largest, self.entry_rows, np.abs(self.coefficients))
        return largest

    def violation(self, values: Floats) -> float:
        """The largest relative violation of any bound, row or integrality; 0.0 for a solution.

        A row's violation is divided by max(1, its largest |coefficient|, |L|, |U|), a column's by max(1, |l|, |u|).
        """
        activity = self.activity(values)
        rows = _excess(activity, self.row_lower, self.row_upper)
        rows /= np.maximum(_magnitude(self.row_lower, self.row_upper), self.row_magnitude())
        bounds = _excess(values, self.lower, self.upper) / _magnitude(self.lower, self.upper)
        fractions = np.abs(values - np.round(values))[self.is_integer]
        return float(max((part.max() for part in (rows, bounds, fractions) if part.size), default=0.0))

    def is_solution(self, values: Floats) -> bool:
        """Whether every bound, row and integrality holds within `FEASIBILITY_TOLERANCE`."""
        return bool(np.isfinite(values).all()) and self.violation(values) <= FEASIBILITY_TOLERANCE

    def relaxed(self) -> Milp:
        """The LP relaxation: the same problem with no integer column."""
        return msgspec.structs.replace(self, is_integer=np.zeros(self.num_columns, bool))

    def fixed_integers(self, values: Floats) -> Milp:
        """The LP left when every integer column is fixed at its (rounded) value."""
        fixed = np.round(values)
        return msgspec.structs.replace(
            self.relaxed(),
            lower=np.where(self.is_integer, fixed, self.lower),
            upper=np.where(self.is_integer, fixed, self.upper),
        )


class Solution(Value, frozen=True, kw_only=True, eq=False):
    """What a solve gave.

    Attributes:
        status: how it ended.
        objective: evaluated afresh from `values`; +inf without a solution.
        bound: proved lower bound on every solution's objective, never above `objective`; -inf where none is known.
        values: [column], integers exact; None without a solution.
        solve_s: wall time, building the backend's model included.
        backend: who solved it.
    """

    status: Status
    objective: float
    bound: float
    values: Floats | None
    solve_s: float
    backend: str

    @property
    def gap(self) -> float:
        """(objective − bound) / |objective|; 0.0 where they meet, inf without a solution."""
        if self.objective == self.bound:
            return 0.0
        return (self.objective - self.bound) / max(abs(self.objective), 1e-300)


class SolverOptions(Value, frozen=True, kw_only=True, eq=False):
    """What a backend is told; see `milp.solve`."""

    time_limit_s: float | None
    relative_gap: float
    threads: int
    warm_start: Floats | None


class SolverAnswer(Value, frozen=True, kw_only=True, eq=False):
    """What a backend answers, unverified. UNBOUNDED here may also mean "infeasible or unbounded"."""

    status: Status
    bound: float = -np.inf
    values: Floats | None = None


class MilpBuilder:
    """Collects columns and rows in blocks; `build` makes the frozen problem.

    Example:
        >>> b = MilpBuilder()
        >>> x = b.add_columns(3, upper=1.0, integer=True, objective=[-5.0, -4.0, -3.0])
        >>> b.add_row([x, x + 1, x + 2], [2.0, 3.0, 1.0], upper=5.0)
        0
        >>> b.build().num_columns
        3
    """

    def __init__(self, objective_offset: float = 0.0) -> None:
        self.objective_offset = objective_offset
        self.num_columns = 0
        self.num_rows = 0
        self._column_blocks: list[tuple[Floats, Floats, Bools, Floats]] = []
        self._row_blocks: list[tuple[Floats, Floats]] = []
        self._entry_blocks: list[tuple[Ints, Ints, Floats]] = []

    def add_columns(
        self,
        count: int,
        *,
        lower: ArrayLike = 0.0,
        upper: ArrayLike = np.inf,
        integer: ArrayLike = False,
        objective: ArrayLike = 0.0,
    ) -> int:
        """Add columns; each of the others is one value for all or one per column.

        Args:
            count: how many.
            lower, upper: bounds.
            integer: whether integers alone are allowed.
            objective: coefficients of what is minimised.
        Returns:
            The first new column's index.
        """
        first = self.num_columns
        floats = [_filled(x, count) for x in (lower, upper, objective)]
        self._column_blocks.append((floats[0], floats[1], np.broadcast_to(np.asarray(integer, bool), count), floats[2]))
        self.num_columns += count
        return first

    def add_rows(
        self,
        count: int,
        rows: ArrayLike,
        columns: ArrayLike,
        coefficients: ArrayLike,
        *,
        lower: ArrayLike = -np.inf,
        upper: ArrayLike = np.inf,
    ) -> int:
        """Add `count` rows lower ≤ A·x ≤ upper given by entries in any order; repeated entries add up.

        Args:
            count: number of rows.
            rows: [entry] row within this block, 0 … count − 1.
            columns: [entry] column index, of the whole problem.
            coefficients: [entry], or one value for all.
            lower, upper: one value for all rows or one per row.
        Returns:
            The first new row's index.
        """
        first = self.num_rows
        at = np.asarray(rows, np.int64)
        if at.size and not (0 <= at.min() and at.max() < count):
            raise ValueError(f"entries name rows {at.min()} … {at.max()} of a block of {count}")
        self._row_blocks.append((_filled(lower, count), _filled(upper, count)))
        self._entry_blocks.append((at + first, np.asarray(columns, np.int64), _filled(coefficients, at.size)))
        self.num_rows += count
        return first

    def add_row(
        self, columns: ArrayLike, coefficients: ArrayLike, lower: float = -np.inf, upper: float = np.inf
    ) -> int:
        """Add one row lower ≤ Σ coefficients·x ≤ upper; returns its index.

        Args:
            columns, coefficients: of its terms.
            lower, upper: bounds of their sum.
        """
        entries = np.asarray(columns, np.int64)
        return self.add_rows(1, np.zeros(entries.size, np.int64), entries, coefficients, lower=lower, upper=upper)

    def build(self) -> Milp:
        """The problem.

        Raises:
            ValueError: a NaN, an infinite coefficient, an infinite bound on the wrong side, or an entry that
                names no column. (Crossing bounds are legal: such a problem is infeasible.)
        """
        floats, ints = np.empty(0), np.empty(0, np.int64)
        lower, upper, integer, objective = (_joined(self._column_blocks, i, floats) for i in range(4))
        row_lower, row_upper = (_joined(self._row_blocks, i, floats) for i in range(2))
        rows, columns = (_joined(self._entry_blocks, i, ints) for i in range(2))
        coefficients = _joined(self._entry_blocks, 2, floats)
        rows, columns, coefficients = _sorted_entries(rows, columns, coefficients, num_columns=self.num_columns)
        for what, array in (("objective", objective), ("row", coefficients)):
            if not np.isfinite(array).all():
                raise ValueError(f"a {what} coefficient is not a finite number")
        for what, low, high in (("column", lower, upper), ("row", row_lower, row_upper)):
            if np.isnan(low).any() or np.isnan(high).any() or (low == np.inf).any() or (high == -np.inf).any():
                raise ValueError(f"a {what}'s bound is NaN or infinite on the wrong side")
        problem = Milp(
            lower=lower,
            upper=upper,
            is_integer=integer.astype(bool),
            objective=objective,
            objective_offset=self.objective_offset,
            row_starts=np.searchsorted(rows, np.arange(self.num_rows + 1)),
            columns=columns,
            coefficients=coefficients,
            row_lower=row_lower,
            row_upper=row_upper,
        )
        for field in problem.__struct_fields__:
            if isinstance(array := getattr(problem, field), np.ndarray):
                array.flags.writeable = False
        return problem


def normalised(problem: Milp) -> tuple[Milp, float]:
    """The same problem in the scale solvers' absolute tolerances (1e-6 … 1e-9) are made for.

    Seconds make objectives of 1e-6 and bytes rows of 1e11, at which those tolerances mean nothing or cannot be
    met. The objective's largest coefficient is brought into [512, 1024), rows whose largest lies outside
    [1/1024, 1024] likewise, by powers of two, so no digit is lost; integer columns get integer bounds; offset 0.

    Returns:
        The problem and the factor its objective was multiplied by.
    """
    factor = float(_power_to_1024(np.abs(problem.objective).max(initial=0.0)))
    magnitude = problem.row_magnitude()
    scale = np.where((magnitude < 2.0**-10) | (magnitude > 2.0**10), _power_to_1024(magnitude), 1.0)
    whole = problem.is_integer
    scaled = msgspec.structs.replace(
        problem,
        lower=np.where(whole, np.ceil(problem.lower - _INTEGRALITY_TOLERANCE), problem.lower),
        upper=np.where(whole, np.floor(problem.upper + _INTEGRALITY_TOLERANCE), problem.upper),
        objective=problem.objective * factor,
        objective_offset=0.0,
        coefficients=problem.coefficients * scale[problem.entry_rows],
        row_lower=problem.row_lower * scale,
        row_upper=problem.row_upper * scale,
    )
    return scaled, factor


def dual_bound(problem: Milp, duals: Floats) -> float:
    """The lower bound any row multipliers y prove (weak duality), exact whatever solver they came from.

    bound = offset + Σ_r (y_r·L_r if y_r > 0 else y_r·U_r) + Σ_j min(d_j·l_j, d_j·u_j),  d = c − Aᵀy

    Args:
        problem: an LP, or a MILP whose relaxation is meant.
        duals: [row] multipliers; those of a side that is infinite are taken as 0.
    Returns:
        The bound; -inf where a column without a finite bound has a reduced cost beyond 1e-12 of the largest cost.
    """
    finite = np.isfinite(np.where(duals > 0, problem.row_lower, problem.row_upper))
    y = np.where(finite, duals, 0.0)
    pull = _sums(problem.columns, problem.coefficients * y[problem.entry_rows], problem.num_columns)
    reduced = problem.objective - pull
    reduced[np.abs(reduced) <= 1e-12 * np.abs(problem.objective).max(initial=0.0)] = 0.0
    rows = _times(y, np.where(y > 0, problem.row_lower, problem.row_upper)).sum()
    columns = _times(reduced, np.where(reduced > 0, problem.lower, problem.upper)).sum()
    return problem.objective_offset + float(rows + columns)


def _times(factor: Floats, bound: Floats) -> Floats:
    """factor · bound with 0 · inf = 0."""
    return factor * np.where(factor == 0.0, 0.0, bound)


def _sums(at: Ints, weights: Floats, size: int) -> Floats:
    """[size] the sum of the weights at each index."""
    return np.bincount(at, weights=weights, minlength=size).astype(np.float64, copy=False)


def _filled(value: ArrayLike, count: int) -> Floats:
    return np.broadcast_to(np.asarray(value, np.float64), count)


def _joined(blocks: Sequence[tuple[NDArray[Any], ...]], field: int, empty: NDArray[Any]) -> NDArray[Any]:
    """One field of all blocks, end to end."""
    return np.concatenate([empty, *(block[field] for block in blocks)])


def _sorted_entries(rows: Ints, columns: Ints, coefficients: Floats, *, num_columns: int) -> tuple[Ints, Ints, Floats]:
    """Entries by row, then column; repeated ones added up, zeros dropped."""
    if columns.size and not (0 <= columns.min() and columns.max() < num_columns):
        raise ValueError(f"entries name columns {columns.min()} … {columns.max()} of {num_columns}")
    if columns.size:
        place, where = np.unique(rows * num_columns + columns, return_inverse=True)
        coefficients = _sums(where, coefficients, place.size)
        kept = coefficients != 0.0
        place, coefficients = place[kept], coefficients[kept]
        rows, columns = place // num_columns, place % num_columns
    return rows, columns, coefficients


def _excess(values: Floats, lower: Floats, upper: Floats) -> Floats:
    return np.maximum(np.maximum(lower - values, values - upper), 0.0)


def _magnitude(lower: Floats, upper: Floats) -> Floats:
    """max(1, |finite bounds|)."""
    finite = [np.where(np.isfinite(side), np.abs(side), 0.0) for side in (lower, upper)]
    return np.maximum(np.maximum(*finite), 1.0)


def _power_to_1024(magnitude: ArrayLike) -> Floats:
    """The power of two that brings a magnitude into [512, 1024); 1 for 0."""
    size = np.asarray(magnitude, np.float64)
    return np.where(size > 0, np.ldexp(1.0, 10 - np.frexp(size)[1]), 1.0)
