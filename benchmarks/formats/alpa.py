"""Alpa's auto-sharding instances (github.com/alpa-projects/alpa, dumped as JSON) as cost networks.

    num_strategies[i]; follow[i]: -1, or the node whose choice i takes too; compute_cost, comm_cost and memory
    [i][strategy]; edges [(i, j)] with edge_cost row-major; alias_pairs with alias_conflict (1: forbidden);
    live[t]: nodes alive at t; memory_budget_bytes; optimal_objective, optimal_choice

Minimise node costs plus edge costs subject to alias pairs and, at each t, the memory of what is alive.
Source: Zheng et al. 2022, section 4.2.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paraplan.planner.sharding.network.cost_network import Factor, Network, Row

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Instance:
    """A problem, and what is known of its answer."""

    name: str
    network: Network
    budget_bytes: float
    optimum: float


def read_folder(folder: Path) -> list[Instance]:
    """Every instance of a folder, by name.

    Raises:
        FileNotFoundError: there is none.
    """
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not paths:
        raise FileNotFoundError(f"{folder} holds no *.json instances of Alpa's auto-sharding problems")
    return [read(path) for path in paths]


def read(path: Path) -> Instance:
    """One instance.

    Raises:
        ValueError: the file is no such instance.
    """
    try:
        data = json.loads(path.read_text())
        network = _network(data)
        return Instance(data["name"], network, float(data["memory_budget_bytes"]), float(data["optimal_objective"]))
    except (KeyError, TypeError, IndexError, json.JSONDecodeError) as fault:
        raise ValueError(f"{path} is no auto-sharding instance: {type(fault).__name__}: {fault}") from fault


def limited(instance: Instance, budget_bytes: float) -> Network:
    """The instance with another memory budget."""
    scale = instance.budget_bytes / budget_bytes
    rows = tuple(
        Row(row.name, row.limit, {v: held * scale for v, held in row.held.items()}) for row in instance.network.rows
    )
    return Network(instance.network.prices, instance.network.factors, rows)


def _network(data: dict[str, Any]) -> Network:
    own = [node for node, follows in enumerate(data["follow"]) if follows < 0]
    number = {node: index for index, node in enumerate(own)}
    variable = [number[node if follows < 0 else follows] for node, follows in enumerate(data["follow"])]
    prices = [np.zeros((data["num_strategies"][node], 1)) for node in own]
    for node, index in enumerate(variable):
        prices[index][:, 0] += np.array(data["compute_cost"][node]) + np.array(data["comm_cost"][node])
    tables: dict[tuple[int, int], Floats] = {}

    def couple(pair: tuple[int, int], flat: list[float], forbid: bool) -> None:
        i, j = pair
        table = np.array(flat, float).reshape(data["num_strategies"][i], data["num_strategies"][j])
        table = np.where(table > 0, np.inf, 0.0) if forbid else table
        a, b = variable[i], variable[j]
        if a == b:
            prices[a][:, 0] += np.diag(table)
        else:
            key = (min(a, b), max(a, b))
            tables[key] = tables.get(key, np.zeros(1)) + (table if a < b else table.T)

    for pair, cost in zip(data["edges"], data["edge_cost"], strict=True):
        couple(pair, cost, forbid=False)
    for pair, conflict in zip(data.get("alias_pairs", []), data.get("alias_conflict", []), strict=True):
        couple(pair, conflict, forbid=True)
    factors = tuple(
        Factor(a, (b,), np.arange(len(prices[a])), (np.arange(len(prices[b])),), table[..., None])
        for (a, b), table in tables.items()
    )
    return Network(tuple(prices), factors, tuple(_rows(data, variable)))


def _rows(data: dict[str, Any], variable: list[int]) -> list[Row]:
    rows = []
    for number, alive in enumerate(dict.fromkeys(tuple(sorted(set(nodes))) for nodes in data["live"])):
        held: dict[int, Floats] = {}
        for node in alive:
            amount = np.array(data["memory"][node], float) / data["memory_budget_bytes"]
            held[variable[node]] = held.get(variable[node], np.zeros(len(amount))) + amount
        rows.append(Row(f"live {number}", 1.0, held))
    return rows
