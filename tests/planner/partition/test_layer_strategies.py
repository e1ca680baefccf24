"""Strategies of layers against all choices there are."""

import itertools

import numpy as np
import pytest

from paraplan.planner.partition.layer_strategies import choose_strategies


def brute(memory: np.ndarray, intra: np.ndarray, inter: np.ndarray, limit: float) -> float:
    layers, strategies = memory.shape
    best = np.inf
    for choice in itertools.product(range(strategies), repeat=layers):
        held = sum(memory[i, s] for i, s in enumerate(choice))
        time = sum(intra[i, s] for i, s in enumerate(choice))
        time += sum(inter[i, choice[i - 1], choice[i]] for i in range(1, layers))
        best = min(best, time if held <= limit else np.inf)
    return best


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_best_of_all_choices(seed: int) -> None:
    random = np.random.default_rng(seed)
    layers, strategies = int(random.integers(1, 6)), int(random.integers(1, 4))
    memory = random.integers(0, 12, (layers, strategies)).astype(float)
    intra, inter = random.random((layers, strategies)), random.random((layers, strategies, strategies))
    intra[random.random(intra.shape) < 0.1] = np.inf
    limits = [-1.0, *random.integers(0, 12 * layers, 5).astype(float)]
    for limit, found in zip(limits, choose_strategies(memory, intra, inter, limits), strict=True):
        expected = brute(memory, intra, inter, limit)
        assert (found is None) == np.isinf(expected)
        if found is not None:
            assert found.time == pytest.approx(expected, rel=1e-12)
            assert found.memory == sum(memory[i, s] for i, s in enumerate(found.strategies)) <= limit


def test_equal_memory_keeps_the_faster() -> None:
    memory, intra = np.array([[3.0, 3.0]]), np.array([[2.0, 1.0]])
    (found,) = choose_strategies(memory, intra, np.zeros((1, 2, 2)), [3.0])
    assert found is not None and found.strategies == (1,)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        choose_strategies(np.zeros((2, 3)), np.zeros((2, 2)), np.zeros((2, 3, 3)), [1.0])
    with pytest.raises(ValueError, match="negative"):
        choose_strategies(-np.ones((1, 1)), np.zeros((1, 1)), np.zeros((1, 1, 1)), [1.0])
