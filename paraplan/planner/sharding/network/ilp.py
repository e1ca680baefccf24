"""A cost network as an ILP in flow form.

Variables v with options o; binaries x[v, o]. For a factor f with source s, readers u and cost c[l, m], write
S(l) for the sum of x[s, o] over options that make layout l, U_u(m) likewise for what a reader asks for.

    minimise   sum_v,o price[v, o] x[v, o]  +  sum_f,l,m c_f[l, m] z_f[l, m]                      (objective)
    subject to sum_o x[v, o] = 1                                   for each variable              (build_ilp)
               sum_m f_u[l, m] = S(l),  sum_l f_u[l, m] = U_u(m)   for each reader of a factor    (_add_factor)
               f_u[l, m] <= z_f[l, m]                              readers share what is moved    (_add_factor)
               sum held x + sum moved z <= limit                   for each row                   (_add_row)

With x integral, f and z are integral at the optimum, so they stay continuous.

Sources: flow form of the node and edge choices after Alpa (Zheng et al. 2022, 4.2), whose ILP linearises edge
products instead; sharing of moved values among readers is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paraplan.planner.sharding.network.cost_network import Factor, Floats, Ints, Network, Row
from paraplan.planner.solvers.milp import Milp, MilpBuilder


@dataclass
class ShardingIlp:
    """The program as it grows, and how to read its solution.

    Attributes:
        first: per variable, its first column.
        sizes: per variable, its number of options.
        prices: blocks of [column, stream].
        integers: how many leading columns are binaries.
        entries: (row, column, coefficient) triples.
        rows: (lower, upper) per row.
        moved: per factor, [have, want] column of what is moved; -1 where it cannot be or is free of price and rows.
    """

    first: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    prices: list[Floats] = field(default_factory=list)
    integers: int = 0
    count: int = 0
    entries: tuple[list[int], list[int], list[float]] = field(default_factory=lambda: ([], [], []))
    rows: list[tuple[float, float]] = field(default_factory=list)
    moved: list[Ints] = field(default_factory=list)

    def columns(self, prices: Floats) -> int:
        """Columns with these prices; the first one's number."""
        self.prices.append(prices)
        self.count += len(prices)
        return self.count - len(prices)

    def row(self, columns: Sequence[int], coefficients: Sequence[float], lower: float, upper: float) -> None:
        """One row.

        Args:
            columns, coefficients: of its terms.
            lower, upper: bounds of their sum.
        """
        self.entries[0].extend([len(self.rows)] * len(columns))
        self.entries[1].extend(columns)
        self.entries[2].extend(coefficients)
        self.rows.append((lower, upper))

    def choices(self, values: Floats) -> tuple[int, ...]:
        """The option each variable took."""
        return tuple(
            int(np.argmax(values[first : first + size])) for first, size in zip(self.first, self.sizes, strict=True)
        )

    def problem(self, weights: Floats) -> Milp:
        """The rows and columns under weights of the streams."""
        builder = MilpBuilder()
        binary = np.arange(self.count) < self.integers
        objective = np.concatenate(self.prices) @ weights
        builder.add_columns(self.count, upper=np.where(binary, 1.0, np.inf), integer=binary, objective=objective)
        bounds = np.array(self.rows)
        builder.add_rows(len(self.rows), *self.entries, lower=bounds[:, 0], upper=bounds[:, 1])
        return builder.build()


def build_ilp(network: Network) -> ShardingIlp:
    """The ILP of a network."""
    ilp = ShardingIlp()
    for prices in network.prices:
        first = ilp.columns(prices)
        ilp.first.append(first)
        ilp.sizes.append(len(prices))
        ilp.row(range(first, first + len(prices)), [1.0] * len(prices), 1.0, 1.0)
    ilp.integers = ilp.count
    held = {number for row in network.rows for number in row.moved}
    for number, factor in enumerate(network.factors):
        _add_factor(ilp, factor, number in held)
    for row in network.rows:
        _add_row(ilp, row)
    return ilp


def _options(ilp: ShardingIlp, variable: int, layouts: Ints) -> dict[int, list[int]]:
    """Columns of a variable's options by the layout they mean."""
    found: dict[int, list[int]] = {}
    for option, layout in enumerate(layouts.tolist()):
        found.setdefault(layout, []).append(ilp.first[variable] + option)
    return found


def _add_factor(ilp: ShardingIlp, factor: Factor, held: bool) -> None:
    source = _options(ilp, factor.source, factor.have)
    readers = [_options(ilp, reader, wants) for reader, wants in zip(factor.readers, factor.wants, strict=True)]
    finite = factor.reachable
    single = len(readers) == 1
    moved = np.full(finite.shape, -1, np.int64)
    pairs = [(have, want) for have in source for want in dict.fromkeys(w for r in readers for w in r)]
    for have, want in pairs:
        if finite[have, want] and (single or held or factor.prices[have, want].sum() > 0.0):
            moved[have, want] = ilp.columns(factor.prices[have, want][None])
    ilp.moved.append(moved)
    nothing = np.zeros((1, factor.prices.shape[-1]))
    for reader in readers:
        leaving: dict[int, list[int]] = {have: [] for have in source}
        entering: dict[int, list[int]] = {want: [] for want in reader}
        for have in source:
            for want in reader:
                if not finite[have, want]:
                    continue
                shared = int(moved[have, want])
                flow = shared if single else ilp.columns(nothing)
                leaving[have].append(flow)
                entering[want].append(flow)
                if not single and shared >= 0:
                    ilp.row([flow, shared], [1.0, -1.0], -np.inf, 0.0)
        for have, columns in source.items():
            _balance(ilp, leaving[have], columns)
        for want, columns in reader.items():
            _balance(ilp, entering[want], columns)


def _balance(ilp: ShardingIlp, flows: Sequence[int], columns: Sequence[int]) -> None:
    ilp.row([*flows, *columns], [1.0] * len(flows) + [-1.0] * len(columns), 0.0, 0.0)


def _add_row(ilp: ShardingIlp, row: Row) -> None:
    """In units of the limit, so that rows are well scaled."""
    scale = abs(row.limit) or 1.0
    coefficients: dict[int, float] = {}
    for variable, held in row.held.items():
        for option, amount in enumerate((held / scale).tolist()):
            column = ilp.first[variable] + option
            coefficients[column] = coefficients.get(column, 0.0) + amount
    for number, amounts in row.moved.items():
        for have, want in zip(*np.nonzero(ilp.moved[number] >= 0), strict=True):
            column = int(ilp.moved[number][have, want])
            coefficients[column] = coefficients.get(column, 0.0) + float(amounts[have, want]) / scale
    ilp.row(list(coefficients), list(coefficients.values()), -np.inf, row.limit / scale)
