"""The `paraplan` command, and `python -m paraplan` for launchers that start modules.

A process that has planned ends at once: looking through all that a plan was made with for what is garbage, as the
interpreter does as it ends, takes up to a tenth of the time that the plan took.

Ctrl-C while a library is being imported may come out as an error of that library: once it came, what ends the command
is the interrupt.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
"""Exit status after Ctrl-C, as of commands that click runs."""

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
    """Notes that Ctrl-C came.

    Attributes:
        came: whether it did.
    """

    came: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        signal.default_int_handler(number, frame)


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
