"""What the commands write: results on stdout, the JSON object last; progress and errors on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.text import Text

from paraplan.ir.errors import ParaplanError
from paraplan.ir.option_words import Flags


def out() -> Console:
    """Results, on stdout; wide where nobody looks at a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


class Progress:
    """What is being done, with the seconds it took: a live line on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self._status = self.console.status("", spinner="dots")
        self._started, self._what = time.perf_counter(), ""

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._status.start()
        return self

    def __call__(self, text: str) -> None:
        """Say what begins now."""
        self._finish()
        self._what, self._started = text, time.perf_counter()
        if self.console.is_terminal:
            self._status.update(text)
        else:
            self.console.print(Text(f"{text} ..."), soft_wrap=True)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            if kind is None:
                self._finish()
            self._status.stop()

    def _finish(self) -> None:
        seconds = time.perf_counter() - self._started
        if self._what and self.console.is_terminal and seconds > 1:
            self.console.print(Text(f"{self._what} ({seconds:.1f} s)", style="dim"))


def print_fault(fault: ParaplanError, flags: Flags) -> None:
    """An error as users see it, with options as flags."""
    text = Text.assemble(("error: ", "bold red"), (fault.written(flags), "red"))
    Console(stderr=True).print(text, soft_wrap=True)


def print_json(value: Mapping[str, Any]) -> None:
    """The object of `--json`: the last line of standard output."""
    sys.stdout.flush()
    print(json.dumps(value), flush=True)  # noqa: T201
