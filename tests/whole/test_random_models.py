"""Whole random models under random plans: right, or refused by name.

A few of each; `python -m benchmarks.model_fuzz` runs many.
"""

from __future__ import annotations

import pytest

from benchmarks.model_fuzz import steady
from benchmarks.random_models.recipe import build, draw, library, source_of
from benchmarks.random_models.shrink import script
from benchmarks.random_models.trial import REFUSED, RIGHT, try_model

SEEDS = (1, 17, 43, 57, 72)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_models_train_as_by_torch_alone(seed: int) -> None:
    text, is_random = source_of(steady(seed))
    found = try_model(build(text, f"random_model_{seed}", is_random), seed, 3)
    assert all(outcome.what in (RIGHT, REFUSED) for outcome in found), found
    assert any(outcome.what == RIGHT for outcome in found), found


def test_every_piece_is_a_model_by_itself() -> None:
    """Every text is Python, whatever is drawn in it, and so is the script of a model that is shown."""
    for seed in range(200):
        compile(source_of(draw(seed))[0], f"model {seed}", "exec")
    compile(script(draw(0), 0, 6, 1), "script", "exec")
    assert sum(len(pieces) for pieces in library().values()) > 300
