"""The sharding ILP in flow form.

Deciders d with options o; binaries x[d, o]. For a transfer t (source end s, readers u, price c[l, m] of moving
from layout l to m), write S(l) = sum of x[s, o] over options whose layout is l, U_u(m) likewise.

    minimise   sum_d,o price[d, o] x[d, o]  +  sum_t,l,m c_t[l, m] z_t[l, m]                      (objective)
    subject to sum_o x[d, o] = 1                                   for each decider               (build_ilp)
               sum_m f_u[l, m] = S(l),  sum_l f_u[l, m] = U_u(m)   for each reader of a transfer  (_add_reader)
               f_u[l, m] <= z_t[l, m]                              readers share what is moved    (_add_reader)
               sum bytes x <= limit                                at the loss and at the update  (_add_memory)

With x integral, f and z are integral at the optimum, so they stay continuous. Prices are vectors over streams;
the objective sums them, which overlap makes pessimistic. `bound.py` weighs them instead (weighted_problem).

Sources: flow form of the node and edge choices after Alpa (Zheng et al. 2022, 4.2), whose ILP linearises edge
products instead; sharing of moved values among readers is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paraplan.ir.mesh import Layout
from paraplan.planner.milp import Milp, MilpBuilder
from paraplan.planner.sharding.prices import Price, scale
from paraplan.planner.sharding.space import End, Space, Transfer


@dataclass
class ShardingIlp:
    """The program as it grows, and how to read its solution.

    Attributes:
        first: per decider, its first column.
        prices: per column, its price vector (seconds per stream); the objective is their sum.
        integers: how many leading columns are binaries.
        entries: (row, column, coefficient) triples.
        rows: (lower, upper) per row.
    """

    first: list[int] = field(default_factory=list)
    prices: list[Price] = field(default_factory=list)
    integers: int = 0
    entries: tuple[list[int], list[int], list[float]] = field(default_factory=lambda: ([], [], []))
    rows: list[tuple[float, float]] = field(default_factory=list)

    def column(self, price: Price) -> int:
        self.prices.append(price)
        return len(self.prices) - 1

    def row(self, columns: Sequence[int], coefficients: Sequence[float], lower: float, upper: float) -> None:
        self.entries[0].extend([len(self.rows)] * len(columns))
        self.entries[1].extend(columns)
        self.entries[2].extend(coefficients)
        self.rows.append((lower, upper))

    def choices(self, values: np.ndarray, space: Space) -> tuple[int, ...]:
        """The option each decider took."""
        return tuple(
            int(np.argmax(values[first : first + len(decider.prices)]))
            for first, decider in zip(self.first, space.deciders, strict=True)
        )

    def problem(self, objective: np.ndarray) -> Milp:
        """The rows and columns under an objective (one number per column)."""
        builder = MilpBuilder()
        count = len(self.prices)
        binary = np.arange(count) < self.integers
        builder.add_columns(count, upper=np.where(binary, 1.0, np.inf), integer=binary, objective=objective)
        bounds = np.array(self.rows)
        builder.add_rows(len(self.rows), *self.entries, lower=bounds[:, 0], upper=bounds[:, 1])
        return builder.build()


def build_ilp(space: Space, memory_limit_bytes: float | None) -> ShardingIlp:
    """The ILP of an option space.

    Args:
        space: deciders, transfers and memory.
        memory_limit_bytes: what a device may hold; None for no limit.
    """
    ilp = ShardingIlp()
    for decider in space.deciders:
        first = len(ilp.prices)
        ilp.first.append(first)
        ilp.prices.extend(decider.prices)
        ilp.row(range(first, len(ilp.prices)), [1.0] * len(decider.prices), 1.0, 1.0)
    ilp.integers = len(ilp.prices)
    for transfer in space.transfers:
        _add_transfer(ilp, space, transfer)
    if memory_limit_bytes is not None:
        _add_memory(ilp, space, memory_limit_bytes)
    return ilp


def step_problem(ilp: ShardingIlp) -> Milp:
    """Minimise the work summed over streams."""
    return ilp.problem(np.array(ilp.prices).sum(axis=1))


def weighted_problem(ilp: ShardingIlp, weights: Sequence[float]) -> Milp:
    """Minimise a weighted sum of the streams' work."""
    return ilp.problem(np.array(ilp.prices) @ np.array(weights))


def _groups(ilp: ShardingIlp, end: End) -> dict[Layout, list[int]]:
    """Columns of an end's options by the layout they mean."""
    found: dict[Layout, list[int]] = {}
    for index, layout in enumerate(end.layouts):
        found.setdefault(layout, []).append(ilp.first[end.decider] + index)
    return found


def _add_transfer(ilp: ShardingIlp, space: Space, transfer: Transfer) -> None:
    source = _groups(ilp, transfer.source)
    readers = [_groups(ilp, end) for end in transfer.readers]
    wanted: dict[Layout, int] = {}
    for reader in readers:
        for layout in reader:
            wanted[layout] = wanted.get(layout, 0) + 1
    moved: dict[tuple[Layout, Layout], int] = {}
    priced: dict[tuple[Layout, Layout], Price | None] = {}
    for have in source:
        for want, count in wanted.items():
            price = space.prices.reshard(transfer.spec, have, want)
            priced[have, want] = None if price is None else scale(price, transfer.count)
            if price is not None and count > 1 and sum(price) > 0.0:
                moved[have, want] = ilp.column(scale(price, transfer.count))
    for reader in readers:
        _add_reader(ilp, source, reader, priced, moved)


def _add_reader(
    ilp: ShardingIlp, source: dict[Layout, list[int]], reader: dict[Layout, list[int]],
    priced: dict[tuple[Layout, Layout], Price | None], moved: dict[tuple[Layout, Layout], int],
) -> None:  # fmt: skip
    flow: dict[tuple[Layout, Layout], int] = {}
    for have in source:
        for want in reader:
            price = priced[have, want]
            if price is None:
                continue
            shared = moved.get((have, want))
            flow[have, want] = ilp.column(price if shared is None else scale(price, 0.0))
            if shared is not None:
                ilp.row([flow[have, want], shared], [1.0, -1.0], -np.inf, 0.0)
    for have, columns in source.items():
        _balance(ilp, [flow[key] for key in flow if key[0] == have], columns)
    for want, columns in reader.items():
        _balance(ilp, [flow[key] for key in flow if key[1] == want], columns)


def _balance(ilp: ShardingIlp, flows: Sequence[int], columns: Sequence[int]) -> None:
    ilp.row([*flows, *columns], [1.0] * len(flows) + [-1.0] * len(columns), 0.0, 0.0)


def _add_memory(ilp: ShardingIlp, space: Space, limit: float) -> None:
    """Bytes in units of the limit, so that rows are well scaled."""

    def row(held: Sequence[tuple[int, tuple[int, ...]]], extra: Sequence[int]) -> None:
        columns, factors = list(extra), [1.0] * len(extra)
        for decider, options in held:
            for index, nbytes in enumerate(options):
                columns.append(ilp.first[decider] + index)
                factors.append(nbytes / limit)
        merged: dict[int, float] = {}
        for column, factor in zip(columns, factors, strict=True):
            merged[column] = merged.get(column, 0.0) + factor
        ilp.row(list(merged), list(merged.values()), -np.inf, 1.0)

    workspace = ilp.column(space.prices.zero)
    for decider, options in space.update_workspace:
        columns = [workspace, *(ilp.first[decider] + index for index in range(len(options)))]
        ilp.row(columns, [1.0, *(-nbytes / limit for nbytes in options)], 0.0, np.inf)
    row(space.at_loss, ())
    row(space.at_update, (workspace,))
