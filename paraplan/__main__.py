"""The `paraplan` command, and `python -m paraplan` for launchers that start modules.

A process that has planned ends at once: looking through all that a plan was made with for what is garbage, as the
interpreter does as it ends, takes up to a tenth of the time that the plan took.
"""

from __future__ import annotations

import atexit
import os
import sys

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


def main() -> None:
    """The command; see `paraplan.cli.main`."""
    leaving = _Leaving()
    atexit.register(leaving)
    try:
        run_command()
    except SystemExit as end:
        leaving.code = end.code if isinstance(end.code, int) else None if end.code else 0
        raise
    leaving.code = 0


if __name__ == "__main__":
    main()
