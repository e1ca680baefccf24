"""The option space of a program as a cost network: layouts numbered, prices in arrays, memory as rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from paraplan.ir.machine.mesh import Layout
from paraplan.ir.machine.tiers import TIERS
from paraplan.planner.sharding.network.cost_network import Factor, Floats, Ints, Network, Row
from paraplan.planner.sharding.space import End, Space, WantedValue

Held = list[tuple[int, tuple[int, ...]]]
"""Bytes each decider's options hold."""


@dataclass(frozen=True)
class Formulation:
    """A network without rows, and what its numbers mean.

    Attributes:
        network: the problem.
        factors: per transfer, its factor.
        makes, asks: per transfer, the layouts its factor numbers.
    """

    network: Network
    factors: tuple[int, ...]
    makes: tuple[tuple[Layout, ...], ...]
    asks: tuple[tuple[Layout, ...], ...]


def formulate(space: Space) -> Formulation:
    """The network of an option space, memory left out."""
    prices: list[Floats] = [np.array(decider.prices, float) for decider in space.deciders]
    factors: list[Factor] = []
    numbers, makes, asks = [], [], []
    for transfer in space.transfers:
        made: dict[Layout, int] = {}
        asked: dict[Layout, int] = {}
        factors.append(_factor(space, transfer, prices, factors, made, asked))
        numbers.append(len(factors) - 1)
        makes.append(tuple(made))
        asks.append(tuple(asked))
    return Formulation(Network(tuple(prices), tuple(factors)), tuple(numbers), tuple(makes), tuple(asks))


def with_rows(network: Network, rows: tuple[Row, ...]) -> Network:
    """The network under other limits."""
    return Network(network.prices, network.factors, rows)


def network_of(space: Space, memory_bytes: float | None) -> Network:
    """The network of an option space under a memory limit, if any."""
    network = formulate(space).network
    return network if memory_bytes is None else with_rows(network, memory_rows(space, memory_bytes))


def _numbers(layouts: tuple[Layout, ...], index: dict[Layout, int]) -> Ints:
    return np.array([index.setdefault(layout, len(index)) for layout in layouts], np.int64)


def _factor(
    space: Space,
    transfer: WantedValue,
    prices: list[Floats],
    factors: list[Factor],
    makes: dict[Layout, int],
    asks: dict[Layout, int],
) -> Factor:
    have = _numbers(transfer.source.layouts, makes)
    readers: list[int] = []
    wants: list[Ints] = []
    for end in transfer.readers:
        wants.append(_numbers(end.layouts, asks))
        again = end.decider in readers or end.decider == transfer.source.decider
        readers.append(_twin(end, prices, factors) if again else end.decider)
    prices_of = transfer.prices(space.prices, tuple(makes), tuple(asks))
    what, source = transfer.what, transfer.source.decider
    return Factor(source, tuple(readers), have, tuple(wants), prices_of * transfer.count, what)


def _twin(end: End, prices: list[Floats], factors: list[Factor]) -> int:
    """A variable that takes the option its original takes: it reads one value in two layouts."""
    count = len(end.layouts)
    prices.append(np.zeros_like(prices[end.decider]))
    same = np.arange(count)
    tie = np.full((count, count, prices[end.decider].shape[1]), np.inf)
    tie[same, same] = 0.0
    factors.append(Factor(end.decider, (len(prices) - 1,), same, (same,), tie, "the same option"))
    return len(prices) - 1


def memory_rows(space: Space, limit: float, activations: bool = True, proof: bool = False) -> tuple[Row, ...]:
    """Memory at the loss, and at the update of every parameter that needs workspace; in units of the limit.

    Args:
        space: options and what each holds.
        limit: bytes.
        activations: whether what is saved for the backward counts.
        proof: whether it counts at the least it may take (`Space.saved_less`), and not in the layout it is made in.
    """
    held = space.at_loss if activations else space.kept
    if activations and proof:
        held = [(each[0], space.saved_less.get(entry, each[1])) for entry, each in enumerate(held)]
    rows = [Row("loss", 1.0, _sums(held, limit))]
    return (*rows, *_updates(space, space.at_update, space.update_workspace, limit, "update"))


def kept_row(space: Space, flying: float) -> Row:
    """Bytes kept whatever runs, and what so many microbatches save for their backward beside them.

    Args:
        space: options and what each holds.
        flying: microbatches.
    """
    kept, loss = _sums(space.kept, 1.0), _sums(space.at_loss, 1.0)
    held = {at: kept.get(at, 0.0 * nbytes) + flying * (nbytes - kept.get(at, 0.0)) for at, nbytes in loss.items()}
    return Row("loss", 1.0, held)


def tier_rows(space: Space, over: Mapping[str, int] = MappingProxyType({})) -> tuple[Row, ...]:
    """What lives on tiers where anything may, in units of a device's room there.

    `over`: per tier, bytes of its room that are taken by what the rows do not count.
    """
    rows: list[Row] = []
    for tier, kind in TIERS.items():
        if tier in space.away:
            room = max(tier_room_bytes(space, tier) - over.get(tier, 0), 1)
            what = f"update {kind.where}" if kind.is_memory else tier
            rows += _updates(space, space.away[tier], space.away_workspace[tier], room, what)
    return tuple(rows)


def _updates(space: Space, held: Held, workspace: Held, limit: float, what: str) -> tuple[Row, ...]:
    """A row per parameter whose update needs workspace; without any, one row."""
    update = _sums(held, limit)
    needy = [(decider, np.array(nbytes, float) / limit) for decider, nbytes in workspace if any(nbytes)]
    if not needy:
        return (Row(what, 1.0, update),)
    rows = []
    for decider, work in needy:
        here = {**update, decider: update.get(decider, np.zeros(len(work))) + work}
        rows.append(Row(f"{what} of {space.deciders[decider].name}", 1.0, here))
    return tuple(rows)


def tier_room_bytes(space: Space, tier: str) -> int:
    """What a device may fill of a tier."""
    costs = space.prices.costs
    return costs.cluster.room_bytes(tier, costs.mesh.devices)


def has_room_for_all(space: Space, tier: str) -> bool:
    """Whether a device's share of a tier holds whatever may leave the device for it."""
    held, work = space.away.get(tier, []), space.away_workspace.get(tier, [])
    most = sum(max(nbytes) for _, nbytes in held) + max((max(nbytes) for _, nbytes in work), default=0)
    return most <= tier_room_bytes(space, tier)


def _sums(held: Held, limit: float) -> dict[int, Floats]:
    found: dict[int, Floats] = {}
    for decider, nbytes in held:
        found[decider] = found.get(decider, np.zeros(len(nbytes))) + np.array(nbytes, float) / limit
    return found
