"""Optimizer states on the host, over Gloo: equal, as predicted, and checkpoints are those of any other plan."""

from __future__ import annotations

from pathlib import Path

from paraplan.runtime.transport.launch import spawn_local

WORKER = str(Path(__file__).with_name("states_worker.py"))


def test_two_processes_update_on_the_host(tmp_path: Path) -> None:
    assert spawn_local(2, WORKER, [str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("done*")} == {"done0", "done1"}
