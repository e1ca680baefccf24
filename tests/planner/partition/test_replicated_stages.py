"""Stages between states against all chains of states and all numbers of machines."""

import numpy as np
import pytest

from paraplan.planner.partition.ideals import all_ideals
from paraplan.planner.partition.replicated_stages import States, partition_states
from tests.planner.partition.graphs import random_edges


def random_states(random: np.random.Generator) -> States:
    nodes = int(random.integers(1, 6))
    ideals = all_ideals(nodes, random_edges(random, nodes, 0.5), 1000)
    assert ideals is not None
    member = ideals.member[1:].astype(float)
    compute, params = member @ random.random(nodes), member @ (random.random(nodes) * 2e9)
    return States(compute, params, random.random(len(member)) * 4e8, ideals.words[1:])


def brute(states: States, machines: int, to: int, speed: float) -> float:
    """A[to][machines] by its definition."""

    def stage(after: int, count: int) -> float:
        compute = states.compute_s[to] - (states.compute_s[after] if after >= 0 else 0.0)
        params = states.param_bytes[to] - (states.param_bytes[after] if after >= 0 else 0.0)
        return float((compute + 4 * (count - 1) / count * params / speed) / count)

    best = stage(-1, machines)
    for after in range(to):
        inside = not (states.ops[after] & ~states.ops[to]).any()
        for count in range(1, machines) if inside else ():
            sent = states.output_bytes[to] if to < len(states.compute_s) - 1 else 0.0
            wire = 2 * max(states.output_bytes[after], sent) / speed / count
            best = min(best, max(brute(states, machines - count, after, speed), stage(after, count), wire))
    return best


@pytest.mark.parametrize("seed", range(30))
def test_equals_the_recurrence(seed: int) -> None:
    random = np.random.default_rng(seed)
    states, machines = random_states(random), int(random.integers(1, 5))
    found = partition_states(states, machines, 1e9)
    assert found.time_s == pytest.approx(brute(states, machines, len(states.compute_s) - 1, 1e9), rel=1e-12)
    assert sum(stage.machines for stage in found.stages) == machines
    assert found.stages[0].after is None and found.stages[-1].to == len(states.compute_s) - 1
    assert all(a.to == b.after for a, b in zip(found.stages, found.stages[1:], strict=False))


def test_no_machine_is_refused() -> None:
    states = random_states(np.random.default_rng(0))
    with pytest.raises(ValueError, match="0 machines"):
        partition_states(states, 0, 1e9)
