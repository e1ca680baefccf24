"""The recipes of docs/extending.md, applied to a copy of the tree, whose tests they name are then run."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from .fences import ROOT, Fence, fences

COPIED = ("paraplan", "tests", "examples")


def apply(fence: Fence, tree: Path) -> None:
    """Append a block of Python to the file its first line names, or replace the lines that a diff says."""
    head, _, body = fence.text.partition("\n")
    file = tree / head.removeprefix("# ")
    old = file.read_text() if file.exists() else ""
    if fence.language == "python":
        file.write_text(f"{old}\n\n{body}" if old else body)
        return
    for hunk in body.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(each[1:] for each in lines if each[0] in kinds) for kinds in (" -", " +"))
        assert old.count(before) == 1, f"extending.md:{fence.line}: {head} has not these lines once:\n{before}"
        old = old.replace(before, after)
    file.write_text(old)


def test_the_recipes_work(tmp_path: Path) -> None:
    for folder in COPIED:
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    paths: list[str] = []
    wanted: list[str] = []
    for fence in fences(ROOT / "docs" / "extending.md"):
        if fence.language != "bash":
            apply(fence, tmp_path)
            continue
        files, _, chosen = fence.text.removeprefix("python -m pytest ").partition(" -k ")
        paths += shlex.split(files)
        wanted += shlex.split(chosen) or [Path(each).stem for each in shlex.split(files)]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", " or ".join(wanted)]
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, *dict.fromkeys(paths)], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
