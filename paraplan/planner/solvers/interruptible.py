"""Calls into solvers that Ctrl-C ends.

MathOpt's binding, as ortools 9.15 ships it, loses an interrupt that comes while the main thread is inside: the solver
runs on, and afterwards nobody knows of it. So the main thread waits for another one, which is left behind where an
interrupt comes: it ends as its solver takes notice (HiGHS does not) or is out of time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def interruptible(call: Callable[[], T], stop: Callable[[], object]) -> T:
    """What a call gives, or what it raises.

    Args:
        call: that may take long and releases the interpreter's lock.
        stop: asks it to end, from another thread.
    Raises:
        KeyboardInterrupt: it came meanwhile, in the main thread; the call may go on for a while.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    made, failed, done = list[T](), list[BaseException](), threading.Event()

    def run() -> None:
        try:
            made.append(call())
        except BaseException as fault:  # noqa: BLE001 - raised where it is waited for
            failed.append(fault)
        finally:
            done.set()

    threading.Thread(target=run, name="solver", daemon=True).start()
    try:
        done.wait()
    except KeyboardInterrupt:
        stop()
        raise
    if failed:
        raise failed[0]
    return made[0]
