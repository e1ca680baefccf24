"""Ctrl-C ends a solver within a moment, and is not lost in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest

from paraplan.planner.solvers.interruptible import interruptible
from paraplan.planner.solvers.milp import Milp, MilpBuilder, solve
from paraplan.planner.solvers.milp_intervals import IntervalBuilder, solve_intervals

LIMIT_S = 30.0


def hard() -> Milp:
    """Many knapsacks at once: no solver here proves an optimum within the limit."""
    draw, size = np.random.default_rng(0), 120
    builder = MilpBuilder()
    builder.add_columns(size, upper=1, integer=True, objective=-draw.integers(10, 99, size).astype(float))
    for _ in range(60):
        builder.add_row(np.arange(size), draw.integers(1, 60, size).astype(float), upper=15.0 * size / 2)
    return builder.build()


def hard_intervals() -> IntervalBuilder:
    """Tasks that share a capacity, to end early."""
    builder, draw = IntervalBuilder(), np.random.default_rng(0)
    ends, demands = {}, {}
    for _ in range(60):
        start, size = builder.ranged(0, 2000), int(draw.integers(5, 40))
        end = builder.ranged(0, 2040)
        builder.row({start: 1, end: -1}, -size)
        demands[builder.task(start, size)] = int(draw.integers(2, 9))
        ends[end] = int(draw.integers(1, 99))
    builder.capacity(demands, 12)
    builder.minimise(ends)
    return builder


CALLS = {
    **{
        backend: partial(lambda backend: solve(hard(), backend=backend, time_limit_s=LIMIT_S), backend)
        for backend in ("mathopt-highs", "mathopt-scip", "mathopt-cpsat")
    },
    "intervals": lambda: solve_intervals(hard_intervals(), time_limit_s=LIMIT_S),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_comes_out_of_a_solver(name: str) -> None:
    with subprocess.Popen([sys.executable, "-m", __name__, name], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "solving\n"
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
        began = time.perf_counter()
        assert child.stdout.read() == "interrupted\n"
    assert time.perf_counter() - began < LIMIT_S / 2


def test_a_call_gives_what_it_gives_in_any_thread() -> None:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(interruptible(threading.current_thread, lambda: None)))
    thread.start()
    thread.join()
    assert found == [thread]
    assert interruptible(lambda: 7, lambda: None) == 7
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 // 0, lambda: None)


def main() -> None:
    """What a process of its own is interrupted in; it ends with what it has left behind."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout.write("solving\n")
    sys.stdout.flush()
    try:
        CALLS[sys.argv[1]]()
    except KeyboardInterrupt:
        sys.stdout.write("interrupted\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
