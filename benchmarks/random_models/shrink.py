"""The smallest model that still shows a fault: its pieces, extras and losses left out one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.random_models.recipe import Recipe, build, source_of
from benchmarks.random_models.trial import Outcome, is_steady, try_model


def shrunk(recipe: Recipe, seed: int, count: int, index: int, outcome: Outcome, most: int = 40) -> str:
    """A script that shows the fault.

    Args:
        recipe: of the model.
        seed, count, index: its plans' seed, how many there are, and which one it was.
        outcome: what became of it.
        most: how many models to try.
    """
    tried = 0
    while True:
        for smaller in _smaller(recipe):
            tried += 1
            if tried > most:
                return script(recipe, seed, count, index)
            if _shows(smaller, seed, count, index, outcome):
                recipe = smaller
                break
        else:
            return script(recipe, seed, count, index)


def _smaller(recipe: Recipe) -> Iterator[Recipe]:
    """With one thing less."""
    if recipe.extras:
        yield replace(recipe, extras=())
    for at in range(len(recipe.pieces)):
        yield replace(recipe, pieces=recipe.pieces[:at] + recipe.pieces[at + 1 :])
    for at in range(len(recipe.losses) if len(recipe.losses) > 1 else 0):
        yield replace(recipe, losses=recipe.losses[:at] + recipe.losses[at + 1 :])
    if recipe.output != "scalar":
        yield replace(recipe, output="scalar")
    if recipe.combine != "sum":
        yield replace(recipe, combine="sum")


def _shows(recipe: Recipe, seed: int, count: int, index: int, outcome: Outcome) -> bool:
    """Whether a model fails in the same way."""
    text, is_random = source_of(recipe)
    try:
        built = build(text, "smaller", is_random)
        found = try_model(built, seed, count, only=index)[0]
        return found.what == outcome.what and _kind(found) == _kind(outcome) and is_steady(built)
    except Exception:  # noqa: BLE001  (a model that torch refuses is no smaller one)
        return False


def _kind(outcome: Outcome) -> str:
    return outcome.why.split(" ")[0]


def script(recipe: Recipe, seed: int, count: int, index: int) -> str:
    """The model's text, and the plan tried when it is run."""
    text, is_random = source_of(recipe)
    return f"""{text}

if __name__ == "__main__":
    from pathlib import Path

    from benchmarks.random_models.recipe import build
    from benchmarks.random_models.trial import try_model

    built = build(Path(__file__).read_text(), "shown", {is_random})
    print(try_model(built, {seed}, {count}, only={index})[0])
"""
