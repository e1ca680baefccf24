"""The commands of the README and of docs/explaining.md run as they stand, but for smaller models and less time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paraplan import cli

from .fences import ROOT, commands, fences

DOCUMENTS = ("README.md", "docs/explaining.md")
SMALLER = {
    **{"n_layer=2": "n_layer=1", "n_embd=64": "n_embd=16", "num_hidden_layers=32": "num_hidden_layers=2"},
    **{"local:4": "local:2", "tp=2,pp=2": "tp=2"},
}
QUICK = {"plan": ("--time-limit", "1"), "explain": ("--time-limit", "1")}
"""What is added to commands that plan; of an option given twice the last counts."""
RAN = {"plan", "show", "explain", "simulate", "run"}


def smaller(words: list[str]) -> list[str]:
    given = [SMALLER.get(word, word) for word in words]
    return [*given, *(() if "--time-limit" in given else QUICK.get(given[0], ()))]


def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """In their order and in one folder, as a reader types them; those that train start processes of their own."""
    monkeypatch.chdir(tmp_path)
    ran: list[list[str]] = []
    for document in DOCUMENTS:
        for fence in fences(ROOT / document):
            if fence.language == "bash":
                ran += [smaller(rest) for program, *rest in commands(fence) if program == "paraplan" and rest[0] in RAN]
    assert {words[0] for words in ran} == RAN and len(ran) > len(RAN)
    for words in ran:
        if words[0] == "run":
            env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            done = subprocess.run([sys.executable, "-m", "paraplan", *words], env=env, capture_output=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            continue
        monkeypatch.setattr(sys, "argv", ["paraplan", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code in (None, 0), (words, capfd.readouterr().err)
    made = {path.name for path in tmp_path.iterdir()}
    assert {"plan.json", "llama.json", "timeline.json", "checkpoint"} <= made
