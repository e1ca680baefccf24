"""Stages between states of a graph, each on some machines that share its data.

States are sets of ops closed under inputs, each later one a superset of what comes before it; a stage is what one state
has more than another. With compute time c, parameter bytes w and output bytes a of states,

    stage(k, j, m) = (c_j − c_k + 4 (m − 1) / m · (w_j − w_k) / bandwidth) / m
    A[j][m] = min of stage(0, j, m) and, over k before j and m' < m, of
              max(A[k][m − m'], stage(k, j, m'), 2 a_k / (bandwidth · m'), 2 a_j / (bandwidth · m'))

where the last state sends nothing, and a first stage that is alone in its state neither. Exact: all of it, arrays over
states at a time, in O(machines² · states²).
Source: Narayanan et al. 2019 (PipeDream), section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

@dataclass(frozen=True)
class States:
    """States in an order in which those before come first; the last has everything.

    Attributes:
        compute_s: [state] of all ops in it.
        param_bytes: [state] likewise.
        output_bytes: [state] of what is sent after it.
        before: [state, state] whether the second's ops are some, not all, of the first's.
    """

    compute_s: Floats
    param_bytes: Floats
    output_bytes: Floats
    before: Bools


@dataclass(frozen=True)
class ReplicatedStage:
    """A stage from after a state (None: the beginning) to another, and how many machines it has."""

    after: int | None
    to: int
    machines: int


@dataclass(frozen=True)
class ReplicatedStages:
    """Stages in order, and the time of the slowest."""

    stages: tuple[ReplicatedStage, ...]
    time_s: float


def partition_states(states: States, machines: int, bytes_per_s: float) -> ReplicatedStages:
    """The stages whose slowest takes least, on exactly as many machines.

    Raises:
        ValueError: there is no state, or no machine.
    """
    count = len(states.compute_s)
    if machines < 1 or count < 1 or bytes_per_s <= 0:
        raise ValueError(f"{count} states, {machines} machines at {bytes_per_s} bytes/s")
    replicas = np.arange(1, machines + 1)
    moved = 4 * (replicas - 1) / replicas / bytes_per_s
    best = (states.compute_s + moved[:, None] * states.param_bytes) / replicas[:, None]
    origin = np.full((machines, count, 2), -1)
    sent_s = 2 * states.output_bytes / bytes_per_s
    received_s = np.append(sent_s[:-1], 0.0)
    for j in range(count):
        k = np.flatnonzero(states.before[j, :j])
        if not len(k):
            continue
        compute, params = states.compute_s[j] - states.compute_s[k], states.param_bytes[j] - states.param_bytes[k]
        work = compute + moved[:, None] * params
        last_stage = np.maximum(work, np.maximum(sent_s[k], received_s[j])) / replicas[:, None]
        reached = best[:, k]
        for total in range(2, machines + 1):
            whole = np.maximum(reached[total - 2 :: -1], last_stage[: total - 1])  # row i: i + 1 in the last stage
            last, where = divmod(int(np.argmin(whole)), len(k))
            if whole[last, where] < best[total - 1, j]:
                best[total - 1, j] = whole[last, where]
                origin[total - 1, j] = k[where], last + 1
    return ReplicatedStages(_traced(origin, count - 1, machines), float(best[-1, -1]))


def _traced(origin: NDArray[np.int_], state: int, machines: int) -> tuple[ReplicatedStage, ...]:
    found = []
    while origin[machines - 1, state, 0] >= 0:
        after, last = (int(x) for x in origin[machines - 1, state])
        found.append(ReplicatedStage(after, state, last))
        state, machines = after, machines - last
    return (*[ReplicatedStage(None, state, machines)], *reversed(found))
