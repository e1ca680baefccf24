"""The recipes of docs/extending.md, applied to a copy of the tree: the tests they name are run there, and what they
could break."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from .fences import ROOT, Fence, fences

COPIED = ("paraplan", "tests", "examples", "docs", "benchmarks", "README.md", "CHANGELOG.md", "pyproject.toml")
NEIGHBOURS = (
    *("tests/test_architecture.py", "tests/test_options.py", "tests/cli/test_options.py", "tests/ir/test_schema.py"),
    *("tests/ir/machine", "tests/planner/schedules/test_named.py", "tests/planner/test_placements.py"),
    *("tests/cost_models/communication", "tests/runtime/transport/test_collectives.py"),
)
"""Quick tests of what the recipes change."""


class Recipes(NamedTuple):
    """The copy: where it is, the files that recipes wrote, the tests they name and what of these is chosen."""

    tree: Path
    files: tuple[str, ...]
    tests: tuple[str, ...]
    chosen: tuple[str, ...]


def apply(fence: Fence, tree: Path) -> str:
    """Append a block of Python to the file its first line names, or replace the lines that a diff says; that file."""
    head, _, body = fence.text.partition("\n")
    name = head.removeprefix("# ")
    file = tree / name
    old = file.read_text() if file.exists() else ""
    if fence.language == "python":
        file.write_text(f"{old}\n\n{body}" if old else body)
        return name
    for hunk in body.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(each[1:] for each in lines if each[0] in kinds) for kinds in (" -", " +"))
        assert old.count(before) == 1, f"extending.md:{fence.line}: {head} has not these lines once:\n{before}"
        old = old.replace(before, after)
    file.write_text(old)
    return name


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Recipes:
    """All of them, applied one after another."""
    tree = tmp_path_factory.mktemp("recipes")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree)
    written: list[str] = []
    tests: list[str] = []
    chosen: list[str] = []
    for fence in fences(ROOT / "docs" / "extending.md"):
        if fence.language != "bash":
            written.append(apply(fence, tree))
            continue
        files, _, names = fence.text.removeprefix("python -m pytest ").partition(" -k ")
        tests += shlex.split(files)
        chosen += shlex.split(names) or [Path(each).stem for each in shlex.split(files)]
    return Recipes(tree, *(tuple(dict.fromkeys(each)) for each in (written, tests, chosen)))


def assert_runs(recipes: Recipes, *command: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(recipes.tree), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-m", *command], cwd=recipes.tree, env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


def test_the_recipes_work(recipes: Recipes) -> None:
    assert_runs(
        recipes, "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", " or ".join(recipes.chosen), *recipes.tests
    )


def test_the_recipes_are_formatted_and_keep_to_the_linter(recipes: Recipes) -> None:
    assert_runs(recipes, "ruff", "check", *recipes.files)
    assert_runs(recipes, "ruff", "format", "--check", *recipes.files)


def test_the_recipes_keep_the_rules_of_the_house_and_the_tests_beside_them(recipes: Recipes) -> None:
    assert_runs(recipes, "pytest", "-q", "-p", "no:cacheprovider", *NEIGHBOURS)
