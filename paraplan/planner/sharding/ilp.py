"""The sharding ILP in flow form.

Deciders d with options o; binaries x[d, o]. For a transfer t (source end s, readers u, price c[l, m] of moving
from layout l to m), write S(l) = sum of x[s, o] over options whose layout is l, U_u(m) likewise.

    minimise   sum_d,o price[d, o] x[d, o]  +  sum_t,l,m c_t[l, m] z_t[l, m]                      (objective)
    subject to sum_o x[d, o] = 1                                   for each decider               (_add_deciders)
               sum_m f_u[l, m] = S(l),  sum_l f_u[l, m] = U_u(m)   for each reader of a transfer  (_add_reader)
               f_u[l, m] <= z_t[l, m]                              readers share what is moved    (_add_reader)
               sum bytes x <= limit                                at the loss and at the update  (_add_memory)

With x integral, f and z are integral at the optimum, so they stay continuous. Prices are vectors over streams;
the objective sums them, which overlap makes pessimistic. The certificate is another program over the same rows:

    minimise T  subject to  T >= sum of work on stream i, for every stream                         (bound_problem)

whose LP relaxation bounds the simulated step of every plan in scope from below, for a stream is never idle less.

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
    """The program and how to read its solution.

    Attributes:
        builder: columns and rows so far.
        first: per decider, its first column.
        work: (column, price vector) of everything that takes time.
        constant: work that no decision changes.
    """

    builder: MilpBuilder
    first: list[int] = field(default_factory=list)
    work: list[tuple[int, Price]] = field(default_factory=list)
    constant: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def choices(self, values: np.ndarray, space: Space) -> tuple[int, ...]:
        """The option each decider took."""
        return tuple(
            int(np.argmax(values[first : first + len(decider.prices)]))
            for first, decider in zip(self.first, space.deciders, strict=True)
        )


def build_ilp(space: Space, memory_limit_bytes: float | None) -> ShardingIlp:
    """The ILP of an option space.

    Args:
        space: deciders, transfers and memory.
        memory_limit_bytes: what a device may hold; None for no limit.
    """
    ilp = ShardingIlp(MilpBuilder(), constant=np.zeros(len(space.prices.streams)))
    _add_deciders(ilp, space)
    for transfer in space.transfers:
        _add_transfer(ilp, space, transfer)
    if memory_limit_bytes is not None:
        _add_memory(ilp, space, memory_limit_bytes)
    return ilp


def step_problem(ilp: ShardingIlp) -> Milp:
    """Minimise the sum over streams."""
    return ilp.builder.build()


def bound_problem(space: Space, memory_limit_bytes: float | None) -> Milp:
    """Minimise the busiest stream's work; solve its relaxation."""
    ilp = build_ilp(space, memory_limit_bytes)
    builder = ilp.builder
    builder.clear_objective()
    busiest = builder.add_columns(1, 0.0, np.inf, False, 1.0)
    for stream in range(len(space.prices.streams)):
        columns = [busiest, *(column for column, price in ilp.work if price[stream] > 0.0)]
        factors = [1.0, *(-price[stream] for _, price in ilp.work if price[stream] > 0.0)]
        builder.add_row(columns, factors, float(ilp.constant[stream]), np.inf)
    return builder.build()


def _add_deciders(ilp: ShardingIlp, space: Space) -> None:
    for decider in space.deciders:
        objective = np.array([sum(price) for price in decider.prices])
        first = ilp.builder.add_columns(len(decider.prices), 0.0, 1.0, True, objective)
        ilp.first.append(first)
        ilp.work += [(first + index, price) for index, price in enumerate(decider.prices)]
        ilp.builder.add_row(range(first, first + len(decider.prices)), [1.0] * len(decider.prices), 1.0, 1.0)


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
                moved[have, want] = _column(ilp, priced[have, want])
    for reader in readers:
        _add_reader(ilp, source, reader, priced, moved)


def _column(ilp: ShardingIlp, price: Price | None) -> int:
    assert price is not None
    column = ilp.builder.add_columns(1, 0.0, 1.0, False, sum(price))
    if sum(price) > 0.0:
        ilp.work.append((column, price))
    return column


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
            flow[have, want] = _column(ilp, scale(price, 0.0) if shared is not None else price)
            if shared is not None:
                ilp.builder.add_row([flow[have, want], shared], [1.0, -1.0], -np.inf, 0.0)
    for have, columns in source.items():
        _balance(ilp, [flow[key] for key in flow if key[0] == have], columns)
    for want, columns in reader.items():
        _balance(ilp, [flow[key] for key in flow if key[1] == want], columns)


def _balance(ilp: ShardingIlp, flows: Sequence[int], columns: Sequence[int]) -> None:
    ilp.builder.add_row([*flows, *columns], [1.0] * len(flows) + [-1.0] * len(columns), 0.0, 0.0)


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
        ilp.builder.add_row(list(merged), list(merged.values()), -np.inf, 1.0)

    workspace = ilp.builder.add_columns(1, 0.0, np.inf, False, 0.0)
    for decider, options in space.update_workspace:
        columns = [workspace, *(ilp.first[decider] + index for index in range(len(options)))]
        ilp.builder.add_row(columns, [1.0, *(-nbytes / limit for nbytes in options)], 0.0, np.inf)
    row(space.at_loss, ())
    row(space.at_update, (workspace,))
