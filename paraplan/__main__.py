"""The `paraplan` command, and `python -m paraplan` for launchers that start modules.

A process that has planned ends at once: looking through all that a plan was made with for what is garbage, as the
interpreter does as it ends, takes up to a tenth of the time that the plan took.

Ctrl-C while a library is being imported may come out as an error of that library, or, within its C++, as an abort: it
ends a command that has nothing to lose yet, and waits for the import to end, a few seconds at most, in others. Once it
came, what ends the command is the interrupt.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from types import FrameType

INTERRUPTED = 130
"""Exit status after Ctrl-C, as of commands that click runs."""
IMPORTS, PLANNER = "<frozen importlib._bootstrap>", os.path.join(os.path.dirname(__file__), "planner", "")
"""Code that imports; the folder of what searches."""
AGAIN_S, MOST_S = 0.05, 5.0
"""Seconds after which an interrupt of an import is tried again, and for how many at most."""

try:
    from paraplan.cli import main as run_command
except KeyboardInterrupt:  # this takes a second
    sys.exit(INTERRUPTED)


class _Leaving:
    """Ends the process once all that is to be done at its exit is done: what is registered first is called last.

    Attributes:
        code: to end with; None to leave that to the interpreter.
    """

    code: int | None = None

    def __call__(self) -> None:
        distributed = sys.modules.get("torch.distributed")
        is_rank = distributed is not None and distributed.is_available() and distributed.is_initialized()
        if self.code is not None and not is_rank:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.code)


class _Interrupts:
    """Notes that Ctrl-C came, and interrupts, after the import under way if there is one; a second one at once.

    Attributes:
        came: whether it did.
    """

    came: bool = False
    _waits_s: float | None = None
    _is_again: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now, is_again, self._is_again = time.monotonic(), self._is_again, False
        waits = self._waits_s is not None and not is_again  # pressed once more
        first_s = now if self._waits_s is None else self._waits_s
        self.came = True
        if _is_in(frame, IMPORTS) and self.is_loading(frame):
            _say_interrupted()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        if _is_in(frame, IMPORTS) and not waits and now - first_s < MOST_S:
            self._waits_s = first_s
            timer = threading.Timer(AGAIN_S, self._again, [number])
            timer.daemon = True
            timer.start()
            return
        self._waits_s = None
        signal.default_int_handler(number, frame)

    @staticmethod
    def is_loading(frame: FrameType | None) -> bool:
        """Whether a plan is yet to be searched."""
        return sys.argv[1:2] == ["plan"] and not _is_in(frame, PLANNER)

    def _again(self, number: int) -> None:
        if self._waits_s is not None:
            self._is_again = True
            os.kill(os.getpid(), number)


def _is_in(frame: FrameType | None, where: str) -> bool:
    """Whether what runs was called by code at a place.

    Args:
        frame: what runs.
        where: the code's file begins so.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith(where):
            return True
        frame = frame.f_back
    return False


def main() -> None:
    """The command; see `paraplan.cli.main`."""
    leaving, interrupts = _Leaving(), _Interrupts()
    atexit.register(leaving)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupts)
    try:
        run_command()
    except SystemExit as end:
        leaving.code = end.code if isinstance(end.code, int) else None if end.code else 0
        if end.code == INTERRUPTED:
            _say_interrupted()
        raise
    except Exception:
        if not interrupts.came:
            raise
        leaving.code = INTERRUPTED
        _say_interrupted()
        sys.exit(INTERRUPTED)
    leaving.code = 0


def _say_interrupted() -> None:
    """Where a plan was found before, it is given, and this is not said."""
    plans = " before a plan was found; nothing is written" if sys.argv[1:2] == ["plan"] else ""
    sys.stderr.write(f"interrupted{plans}\n")


if __name__ == "__main__":
    main()
