"""Values that wait on the host and on disk, over Gloo: equal, as predicted, and a full disk fails cleanly."""

from __future__ import annotations

from pathlib import Path

from paraplan.runtime.transport.launch import spawn_local

WORKER = str(Path(__file__).with_name("offload_worker.py"))


def test_two_processes_with_threads_and_files(tmp_path: Path) -> None:
    assert spawn_local(2, WORKER, [str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("done*")} == {"done0", "done1"}
