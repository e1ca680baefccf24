"""Solvers' stray prints kept off the terminal.

HiGHS, as ortools 9.15 ships it, prints a line for debugging to C's stdout wherever it polishes an integer solution,
whatever its output options say. While a solver runs, C's variable `stdout` is a stream to /dev/null: file descriptors
stay as they are, so Python's prints, other threads' and those of processes started meanwhile are not touched.

Limits: glibc and macOS, where the variable may be set; elsewhere the line is printed.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Quiet:
    """C's stdout, and how many solvers are running."""

    def __init__(self) -> None:
        self._lock, self._running = threading.Lock(), 0
        self._stdout: ctypes.c_void_p | None = None
        self._nowhere: int | None = None
        self._kept: int | None = None
        name = {"darwin": "__stdoutp", "linux": "stdout"}.get(sys.platform)
        if name is None or (sys.platform == "linux" and platform.libc_ver()[0] != "glibc"):
            return
        library = ctypes.CDLL(None)
        library.fopen.argtypes, library.fopen.restype = (ctypes.c_char_p, ctypes.c_char_p), ctypes.c_void_p
        self._nowhere = library.fopen(os.devnull.encode(), b"we")
        self._stdout = ctypes.c_void_p.in_dll(library, name) if self._nowhere else None

    def begin(self) -> None:
        with self._lock:
            self._running += 1
            if self._running == 1 and self._stdout is not None:
                self._kept, self._stdout.value = self._stdout.value, self._nowhere

    def end(self) -> None:
        with self._lock:
            self._running -= 1
            if self._running == 0 and self._stdout is not None:
                self._stdout.value = self._kept


_QUIET = _Quiet()


@contextmanager
def quiet() -> Iterator[None]:
    """Under it, what C prints to stdout goes nowhere."""
    _QUIET.begin()
    try:
        yield
    finally:
        _QUIET.end()
