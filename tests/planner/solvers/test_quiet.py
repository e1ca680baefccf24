"""What solvers print for themselves does not reach the terminal, and what others print does."""

from __future__ import annotations

import ctypes
import platform
import sys
import threading

import numpy as np
import pytest

from paraplan.planner.solvers import milp_mathopt
from paraplan.planner.solvers.milp import MilpBuilder, Status, solve
from paraplan.planner.solvers.quiet import quiet

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="C's stdout is set under glibc alone")


def c_prints(text: str) -> None:
    library = ctypes.CDLL(None)
    library.puts(text.encode())
    library.fflush(None)


def test_a_solver_that_prints_is_not_heard(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    builder = MilpBuilder()
    builder.add_columns(3, upper=1.0, integer=True, objective=-np.array([3.0, 2.0, 1.0]))
    builder.add_row(np.arange(3), [1.0, 1.0, 1.0], upper=2.0)
    plain = milp_mathopt.mathopt.solve

    class Printing:
        @staticmethod
        def solve(*args: object) -> object:
            c_prints("HighsMipSolverData::stray")
            sys.stdout.write("from Python\n")
            sys.stdout.flush()
            return plain(*args)

    monkeypatch.setattr(milp_mathopt, "mathopt", Printing)
    assert solve(builder.build()).status is Status.OPTIMAL
    c_prints("from C after it")
    assert capfd.readouterr().out == "from Python\nfrom C after it\n"


def test_it_ends_with_the_last_of_several_and_where_one_fails(capfd: pytest.CaptureFixture[str]) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def other() -> None:
        with quiet():
            begun.set()
            go_on.wait(10)
            c_prints("unheard")

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait(10)
    with pytest.raises(ZeroDivisionError), quiet():
        raise ZeroDivisionError
    go_on.set()
    thread.join()
    c_prints("heard")
    assert capfd.readouterr().out == "heard\n"
