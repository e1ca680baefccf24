"""Reader of Galvatron's layer problems (github.com/PKU-DAIR/Hetu-Galvatron, dumped as JSON), one file a problem.

    mem_per_layer_strategy and intra_cost [layer][strategy]; inter_cost_prev_to_cur [layer][before][strategy];
    other_mem and other_time {vocabulary degree}; max_mem_units; optimal_total_cost {vocabulary degree}, null: none

    cost = Σ_i intra[i][s_i] + Σ_(i≥1) inter[i][s_(i−1)][s_i] + other_time[v]
    memory Σ_i mem[i][s_i] + other_mem[v] ≤ max_mem_units − 1

for each vocabulary degree v by itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Vocabulary:
    """What a vocabulary degree adds, and the least cost where known: infinite says infeasible, None unknown."""

    degree: str
    memory: float
    time_s: float
    known: float | None


@dataclass(frozen=True)
class LayerProblem:
    """One file."""

    name: str
    memory: Floats
    intra: Floats
    inter: Floats
    max_units: float
    vocabularies: tuple[Vocabulary, ...]

    def limit(self, vocabulary: Vocabulary) -> float:
        """What the layers may hold."""
        return self.max_units - 1 - vocabulary.memory


def read_folder(folder: Path) -> list[LayerProblem]:
    """Every problem of a folder, by name.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a file is no such problem.
    """
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not paths:
        raise FileNotFoundError(f"{folder} holds no *.json problems of Galvatron's layers")
    return [read(path) for path in paths]


def read(path: Path) -> LayerProblem:
    """One problem.

    Raises:
        ValueError: the file is no such problem.
    """
    try:
        data = json.loads(path.read_text())
        memory = np.array(data["mem_per_layer_strategy"], float)
        intra = _finite_or_inf(data["intra_cost"])
        inter = _finite_or_inf(data["inter_cost_prev_to_cur"])
        known = data.get("optimal_total_cost", {})
        vocabularies = tuple(
            Vocabulary(degree, float(held), float(data["other_time"][degree]), _known(known, degree))
            for degree, held in data["other_mem"].items()
        )
        found = LayerProblem(
            str(data.get("name", path.stem)), memory, intra, inter, float(data["max_mem_units"]), vocabularies
        )
    except (KeyError, TypeError, ValueError, AttributeError) as fault:
        raise ValueError(f"{path} is no layer problem of Galvatron's: {type(fault).__name__}: {fault}") from fault
    layers, strategies = memory.shape if memory.ndim == 2 else (0, 0)
    if not memory.size or intra.shape != memory.shape or inter.shape != (layers, strategies, strategies):
        raise ValueError(
            f"{path} is no layer problem of Galvatron's: mem_per_layer_strategy {memory.shape}, intra_cost"
            f" {intra.shape} and inter_cost_prev_to_cur {inter.shape} do not fit each other"
        )
    return found


def rescored(problem: LayerProblem, vocabulary: Vocabulary, strategies: Sequence[int]) -> float:
    """What an answer costs, by the formula of the format alone.

    Raises:
        ValueError: the answer is illegal.
    """
    if len(strategies) != len(problem.memory):
        raise ValueError(f"{len(strategies)} strategies for {len(problem.memory)} layers")
    held, cost = vocabulary.memory, vocabulary.time_s
    for layer, strategy in enumerate(strategies):
        if not 0 <= strategy < problem.memory.shape[1]:
            raise ValueError(f"layer {layer} has no strategy {strategy}")
        held += problem.memory[layer][strategy]
        cost += problem.intra[layer][strategy]
        if layer:
            cost += problem.inter[layer][strategies[layer - 1]][strategy]
    if held > problem.max_units - 1:
        raise ValueError(f"{held} units of memory are more than {problem.max_units - 1}")
    return float(cost)


def _known(known: dict[str, float | None], degree: str) -> float | None:
    if degree not in known:
        return None
    cost = known[degree]
    return float("inf") if cost is None else float(cost)


def _finite_or_inf(table: object) -> Floats:
    """An array in which null is infinite."""
    array = np.array(table, dtype=object)
    return np.where(array == None, np.inf, array).astype(float)  # noqa: E711  (elementwise)
