"""Scripts that start processes from their top level."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from paraplan.ir.errors import RuntimeFailure
from paraplan.runtime.transport import launch

CALL = "from paraplan.runtime.transport.launch import check_guard as start\n"
SCRIPTS = {
    "top": CALL + "start()\n",
    "called": CALL + "def run():\n    start()\nrun()\n",
    "guarded": CALL + "def main():\n    start()\nif __name__ == '__main__':\n    main()\n",
    "guarded otherwise": CALL + "import multiprocessing\nif multiprocessing.parent_process() is None:\n    start()\n",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_guard_is_named_before_anything_starts(name: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPTS[name])
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    if name.startswith("guarded"):
        assert (done.returncode, done.stderr) == (0, "")
    else:
        line = len(SCRIPTS[name].splitlines())
        assert done.returncode == 1
        assert f"script.py:{line}: processes are started from the top level of the script" in done.stderr
        assert 'if __name__ == "__main__":' in done.stderr


def test_what_ranks_are_forked_from_ignores_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends Ctrl-C to all of its processes; that one would end with a traceback, and take the job along."""
    asked: list[object] = []
    note = lambda: asked.append(signal.getsignal(signal.SIGINT))  # noqa: E731
    monkeypatch.setattr(launch.multiprocessing.forkserver, "ensure_running", note)
    monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(launch, "check_guard", lambda: None)
    before = signal.getsignal(signal.SIGINT)
    assert launch.prepare_ranks() == "forkserver"
    assert asked == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_child_that_runs_the_script_again_says_so(tmp_path: Path) -> None:
    """The script looks at its name, but starts processes outside of that."""
    path = tmp_path / "script.py"
    path.write_text(
        "import multiprocessing\n"
        "from paraplan.runtime.transport.launch import check_guard\n"
        "if __name__ == '__main__':\n    print('once')\n"
        "check_guard()\n"
        "process = multiprocessing.get_context('spawn').Process(target=print)\nprocess.start()\nprocess.join()\n"
    )
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert done.stderr.count("script.py:5: processes are started from the top level of the script") == 1


@pytest.mark.parametrize(
    ("end", "raised", "message"),
    [
        (
            SignalException("got signal 15", signal.SIGTERM),
            RuntimeFailure,
            "stopped by SIGTERM; its 3 ranks were ended",
        ),
        (SignalException("got signal 2", signal.SIGINT), KeyboardInterrupt, ""),
        (EOFError(), RuntimeFailure, "the process that ranks are forked from has ended"),
    ],
)
def test_what_ended_a_job_from_outside_is_said(
    monkeypatch: pytest.MonkeyPatch, end: Exception, raised: type[BaseException], message: str
) -> None:
    def launched(*_: object) -> Any:
        def entered(*_: object) -> None:
            raise end

        return entered

    monkeypatch.setattr(launch, "elastic_launch", launched)
    monkeypatch.setattr(launch, "prepare_ranks", lambda: "spawn")
    with pytest.raises(raised, match=message):
        launch.spawn_local(3, "anything")
