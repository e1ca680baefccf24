"""Tasks over processes give what a loop gives, whatever becomes of the processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paraplan.ir.errors import ConstraintError
from paraplan.ir.process.workers import Workers
from tests.ir.process.worker_tasks import added, base, cannot_be_made, ends_elsewhere, refused, slow


@contextmanager
def _workers(count: int) -> Iterator[Workers]:
    workers = Workers(count, base, 100)
    try:
        yield workers
    finally:
        workers.close()


@pytest.mark.parametrize("count", [0, 1, 2])
def test_answers_are_those_of_a_loop(count: int) -> None:
    with _workers(count) as workers:
        for _ in range(2):
            assert workers.map(added, [(n,) for n in range(9)], base(100)) == [100 + n for n in range(9)]
        assert workers.map(added, [], base(100)) == [] and workers.lost == workers.redone == 0


def test_work_is_shared() -> None:
    with _workers(1) as workers:
        workers.map(added, [(0,)], base(100))
        found = workers.map(slow, [(n,) for n in range(60)], base(100))
    assert [number for number, _ in found] == [100 + n for n in range(60)]
    assert len({pid for _, pid in found}) == 2


@pytest.mark.parametrize("count", [0, 1, 2])
def test_an_answer_is_waited_for_when_it_is_asked_for(count: int) -> None:
    with _workers(count) as workers:
        answer = workers.begin(slow, (7,), base(100))
        assert workers.map(added, [(n,) for n in range(5)], base(100)) == [100 + n for n in range(5)]
        number, pid = answer()
        assert number == 107 and (pid == os.getpid()) is (count == 0)
        assert workers.begin(added, (1,), base(100))() == 101, "who has answered is free again"


@pytest.mark.parametrize("count", [0, 1])
def test_a_task_is_done_again_for_as_long_as_its_answer_asks_for_it(count: int) -> None:
    seen: list[int] = []

    def goes_on(found: int) -> bool:
        seen.append(found)
        return len(seen) < 3

    with _workers(count) as workers:
        assert workers.begin(added, (7,), base(100), goes_on)() == 107
        assert seen == [107] * (3 * count), "where there is no process it is done once"
        assert workers.begin(ends_elsewhere, (os.getpid(),), base(100), lambda _: True)() == os.getpid()


def test_an_answer_is_waited_for_no_longer_than_it_is_to_be() -> None:
    """What was found last is given then, if anything was; where there is no process it is made here."""
    with _workers(1) as workers:
        once = workers.begin(slow, (7,), base(100))
        assert once.within(0.0) is None
        assert once.within(60.0) == once() and once()[0] == 107
        told = threading.Event()

        def goes_on(found: object) -> bool:
            told.set()
            return True

        forever = workers.begin(slow, (1,), base(100), goes_on)
        assert told.wait(60.0)
        found = forever.within(0.0)
        assert found is not None and found[0] == 101 and found[1] != os.getpid()
    with _workers(0) as workers:
        assert workers.begin(added, (7,), base(100)).within(0.0) == 107


def test_an_answer_of_a_dead_process_is_made_here() -> None:
    with _workers(1) as workers:
        assert workers.begin(ends_elsewhere, (os.getpid(),), base(100))() == os.getpid()
        assert workers.lost == workers.redone == 1
        with pytest.raises(ConstraintError, match="not 7"):
            workers.begin(refused, (7,), base(100))()


def test_what_a_dead_process_had_is_done_here() -> None:
    with _workers(2) as workers:
        here = os.getpid()
        assert workers.map(ends_elsewhere, [(here,)] * 12, base(100)) == [here] * 12
        assert workers.lost == 2
        assert workers.map(added, [(1,)], base(100)) == [101]


def test_a_task_that_fails_fails_here() -> None:
    with _workers(1) as workers, pytest.raises(ConstraintError, match="not 7"):
        workers.map(refused, [(7,)], base(100))


def test_a_script_without_a_guard_is_not_run_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from paraplan.ir.process.workers import Workers\n"
        "from tests.ir.process.worker_tasks import added, base\n"
        "print('once', flush=True)\n"
        "workers = Workers(2, base, 1)\n"
        "print(workers.map(added, [(n,) for n in range(5)], base(1)))\n"
        "workers.close()\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=env, timeout=120)
    assert run.stdout == "once\n[1, 2, 3, 4, 5]\n" and run.stderr == ""


def test_what_lies_beside_a_model_takes_no_module_s_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("json.py", "heapq.py", "msgspec.py", "paraplan.py"):
        (tmp_path / name).write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with _workers(2) as workers:
        assert workers.map(added, [(n,) for n in range(5)], base(100)) == [100 + n for n in range(5)]
        assert workers.lost == 0
    assert capfd.readouterr().err == ""


def test_a_process_that_cannot_begin_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    workers = Workers(1, cannot_be_made, 1)
    assert workers.map(added, [(1,)], base(100)) == [101]
    workers.begin(added, (2,), base(100))()
    workers.close()
    assert workers.lost == 1 and "ValueError: of 1 nothing is made" in capfd.readouterr().err


def test_what_is_under_way_when_they_are_closed_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    with _workers(1) as workers:
        answer = workers.begin(slow, (7,), base(100))
        workers.close()
        assert answer() == (107, os.getpid())
    assert not said and workers.lost == 0
