"""Real training over Gloo: fp16, schedules, evaluations, small batches, buckets, and going on under another plan."""

from __future__ import annotations

from pathlib import Path

from paraplan.runtime.transport.launch import spawn_local

WORKER = str(Path(__file__).with_name("training_worker.py"))


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    assert spawn_local(2, WORKER, [str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("done*")} == {"done0", "done1"}
