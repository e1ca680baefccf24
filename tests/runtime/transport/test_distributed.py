"""Two processes over Gloo: the same program, the same plans, and a rank that dies."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from paraplan.ir.errors import RuntimeFailure
from paraplan.runtime.transport import launch
from paraplan.runtime.transport.launch import init_distributed, spawn_local

WORKER = str(Path(__file__).with_name("worker.py"))


def test_two_processes_equal_one(tmp_path: Path) -> None:
    assert spawn_local(2, WORKER, ["all", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("done*")} == {"done0", "done1"}


def test_a_rank_that_dies_ends_the_job_with_its_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    assert spawn_local(2, WORKER, ["die", str(tmp_path)]) != 0
    assert time.monotonic() - start < 200, "the others waited for it until their collectives timed out"
    assert "this rank gives up" in "".join(capfd.readouterr())


def test_a_signal_that_kills_any_rank_leaves_its_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert spawn_local(2, WORKER, ["crash", str(tmp_path)]) != 0
    said = capfd.readouterr().err
    assert "rank 1: Fatal Python error: Segmentation fault" in said
    assert "in read_nothing" in said


def test_torchrun_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # a test before this one may have joined a job
    with pytest.raises(RuntimeFailure, match="start this with torchrun"):
        init_distributed()


@pytest.mark.parametrize(("said", "shown"), [("RuntimeFailure: no room", "no room"), ("KeyError: 'x'", "where it was")])
def test_an_error_of_the_package_s_own_has_no_traceback(tmp_path: Path, said: str, shown: str) -> None:
    for rank in "01":
        (tmp_path / "logs" / "run" / "attempt_0" / rank).mkdir(parents=True)
        reason = {"message": said, "extraInfo": {"py_callstack": "where it was"}}
        (tmp_path / "logs" / "run" / "attempt_0" / rank / "error.json").write_text(json.dumps({"message": reason}))
    first, second = launch._reasons(tmp_path).splitlines()
    assert shown in first and ("where" in first) == ("KeyError" in said) and said in second
