"""One tiny plan, made once, and the command run in this process."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from paraplan import cli

ZOO = Path(__file__).with_name("zoo.py")


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory with the zoo in it."""
    shutil.copy(ZOO, tmp_path / "zoo.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "zoo", raising=False)
    return tmp_path


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs `paraplan ARGS`."""

    def run(*args: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["paraplan", *args])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capfd.readouterr()
        code = ended.value.code
        return Outcome(code if isinstance(code, int) else 0, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def plan_bytes() -> list[bytes]:
    """The plan of `plan_file`, once a test has made it."""
    return []


@pytest.fixture
def plan_file(here: Path, command: Command, plan_bytes: list[bytes]) -> Path:
    """A plan of zoo:net over two processes."""
    if not plan_bytes:
        outcome = command("plan", "zoo:net", "local:2", "--dp", "2", "--precision", "fp64", "-o", "plan.json")
        assert outcome.code == 0, outcome.err
        plan_bytes.append((here / "plan.json").read_bytes())
    (here / "plan.json").write_bytes(plan_bytes[0])
    return here / "plan.json"
