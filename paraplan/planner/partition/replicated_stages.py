"""Stages between states of a graph, each on some machines that share its data.

States are sets of ops closed under inputs, each later one a superset of what comes before it; a stage is what one state
has more than another. With compute time c, parameter bytes w and output bytes a of states,

    stage(k, j, m) = (c_j − c_k + 4 (m − 1) / m · (w_j − w_k) / bandwidth) / m
    A[j][m] = min of stage(0, j, m) and, over k before j and m' < m, of
              max(A[k][m − m'], stage(k, j, m'), 2 a_k / (bandwidth · m'), 2 a_j / (bandwidth · m'))

where the last state sends nothing, and a first stage receives nothing. Exact, arrays over states at a time, in at most
machines² · states² steps. Far fewer are taken: a chain of states gives a first answer, and a state is dropped where the
machines left cannot do what is left below it, so that only stages about as long as their machines are worth remain.
Source: Narayanan et al. 2019 (PipeDream), section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Words = NDArray[np.uint64]


@dataclass(frozen=True)
class States:
    """States in an order in which those before come first; the last has everything.

    Attributes:
        compute_s: [state] of all ops in it.
        param_bytes: [state] likewise.
        output_bytes: [state] of what is sent after it.
        ops: [state, word] its ops as bits.
    """

    compute_s: Floats
    param_bytes: Floats
    output_bytes: Floats
    ops: Words

    def only(self, kept: Ints) -> States:
        """Some of the states."""
        return States(self.compute_s[kept], self.param_bytes[kept], self.output_bytes[kept], self.ops[kept])


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

    Args:
        states: of the graph, with their costs.
        machines: that all are used.
        bytes_per_s: of the links between them.
    Raises:
        ValueError: there is no state, or no machine.
    """
    count = len(states.compute_s)
    if machines < 1 or count < 1 or bytes_per_s <= 0:
        raise ValueError(f"{count} states, {machines} machines at {bytes_per_s} bytes/s")
    chain = _chain(states.ops)
    first = _fill(states.only(chain), machines, bytes_per_s, np.inf)
    assert first is not None
    stages = tuple(
        ReplicatedStage(None if each.after is None else int(chain[each.after]), int(chain[each.to]), each.machines)
        for each in first.stages
    )
    return _fill(states, machines, bytes_per_s, first.time_s) or ReplicatedStages(stages, first.time_s)


def _chain(ops: Words) -> Ints:
    """States that each have all of the one before, from the last backwards."""
    found = [len(ops) - 1]
    for state in range(len(ops) - 2, -1, -1):
        if not (ops[state] & ~ops[found[-1]]).any():
            found.append(state)
    return np.array(found[::-1])


def _fill(states: States, machines: int, bytes_per_s: float, below: float) -> ReplicatedStages | None:
    """The best stages below a time; None where there are none."""
    count, replicas = len(states.compute_s), np.arange(1, machines + 1)
    moved = 4 * (replicas - 1) / replicas / bytes_per_s
    best = (states.compute_s + moved[:, None] * states.param_bytes) / replicas[:, None]
    # machines a state may take so that those left can do the rest, and those the best below the limit takes
    left = (states.compute_s[-1] - states.compute_s) / below * (1 - 1e-12) if np.isfinite(below) else np.zeros(count)
    most = machines - np.ceil(left - 1e-9)
    hopeless = (replicas[:, None] > most) | (best >= below)
    best[hopeless] = np.inf
    fewest = np.where(np.isfinite(best).any(axis=0), np.isfinite(best).argmax(axis=0) + 1, machines + 1)
    origin = np.full((machines, count, 2), -1)
    sent_s = 2 * states.output_bytes / bytes_per_s
    received_s = np.append(sent_s[:-1], 0.0)
    for j in range(count):
        k = np.flatnonzero(fewest[:j] < most[j])
        k = k[~(states.ops[k] & ~states.ops[j]).any(axis=1)]
        if not len(k):
            continue
        compute, params = states.compute_s[j] - states.compute_s[k], states.param_bytes[j] - states.param_bytes[k]
        work = compute + moved[:, None] * params
        last_stage = np.maximum(work, np.maximum(sent_s[k], received_s[j])) / replicas[:, None]
        reached = best[:, k]
        for total in range(2, min(machines, int(most[j])) + 1):
            whole = np.maximum(reached[total - 2 :: -1], last_stage[: total - 1])  # row i: i + 1 in the last stage
            last, where = divmod(int(np.argmin(whole)), len(k))
            if whole[last, where] < min(best[total - 1, j], below):
                best[total - 1, j] = whole[last, where]
                origin[total - 1, j] = k[where], last + 1
                fewest[j] = min(fewest[j], total)
    if not best[-1, -1] < below:
        return None
    return ReplicatedStages(_traced(origin, count - 1, machines), float(best[-1, -1]))


def _traced(origin: NDArray[np.int_], state: int, machines: int) -> tuple[ReplicatedStage, ...]:
    found = []
    while origin[machines - 1, state, 0] >= 0:
        after, last = (int(x) for x in origin[machines - 1, state])
        found.append(ReplicatedStage(after, state, last))
        state, machines = after, machines - last
    return (*[ReplicatedStage(None, state, machines)], *reversed(found))
