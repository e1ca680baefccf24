"""Uneven shards over Gloo: ZeRO-3 and tensor parallelism on odd dims, DTensors, a checkpoint another plan loads."""

from __future__ import annotations

from pathlib import Path

from paraplan.runtime.transport.launch import spawn_local

WORKER = str(Path(__file__).with_name("uneven_worker.py"))


def test_two_processes_hold_uneven_shards(tmp_path: Path) -> None:
    assert spawn_local(2, WORKER, [str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("done*")} == {"done0", "done1"}
