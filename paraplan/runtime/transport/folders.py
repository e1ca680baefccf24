"""The folder of a rank's tensors that wait on disk: there while it has files, gone with the last one.

A rank may be ended without a word (a signal; `os._exit` once its job is done), and then nothing of Python's cleans up.
So the folder does not outlive its files, and whoever makes one holds a lock on it, which ends with the process: a
folder nobody holds was left by a rank that died, and the next rank to make one there, or the process that started the
ranks, removes it (`sweep`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import weakref
from itertools import count
from pathlib import Path

from paraplan.ir.errors import RuntimeFailure

PREFIX = "paraplan-rank"


class TensorFolder:
    """Names for files in a folder of this process' own.

    Args:
        parent: in which it is made; the system's for temporary files where left out.
        rank: for messages and names.
    """

    def __init__(self, parent: str | Path | None, rank: int) -> None:
        self._parent, self.rank = parent, rank
        self._own: Path | None = None
        self._held = -1
        self._files = 0
        self._numbers = count()
        self._lock = threading.RLock()  # a file may go while one is named: whenever something is collected
        self._end = weakref.finalize(self, lambda: None)

    def path(self) -> Path:
        """A name for one more file, whose writer may not be there yet; `remove` it once.

        Raises:
            RuntimeFailure: no folder can be made there.
        """
        with self._lock:
            if self._own is None:
                self._make()
            assert self._own is not None
            self._files += 1
            return self._own / f"{next(self._numbers)}.bin"

    def remove(self, path: Path) -> None:
        """A file goes; with the last one the folder."""
        with self._lock:
            unlink(path)
            if path.parent == self._own:
                self._files -= 1
                if not self._files:
                    self.clear()

    def clear(self) -> None:
        """Everything goes."""
        with self._lock:
            self._end()
            self._own, self._held, self._files = None, -1, 0

    @property
    def files(self) -> list[Path]:
        """What is there, in order of names."""
        with self._lock:
            return [] if self._own is None else sorted(self._own.iterdir())

    def _make(self) -> None:
        try:
            if self._parent is not None:
                Path(self._parent).mkdir(parents=True, exist_ok=True)
            sweep(self._parent)
            while self._own is None:
                made = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{self.rank}-", dir=self._parent))
                try:
                    held = os.open(made, os.O_RDONLY)
                except FileNotFoundError:  # another rank swept it before it was held
                    continue
                fcntl.flock(held, fcntl.LOCK_EX)
                if made.exists():  # nor between the two
                    self._own, self._held = made, held
                else:
                    os.close(held)
        except OSError as fault:
            raise RuntimeFailure(
                f"rank {self.rank}: no folder for tensors on disk can be made in {self._parent}: {fault.strerror}; "
                "name another"
            ) from None
        self._end = weakref.finalize(self, _remove_folder, self._own, self._held)


def _remove_folder(folder: Path, held: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(held)


def unlink(path: Path) -> None:
    """Remove a file that may not be there."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def sweep(parent: str | Path | None = None) -> None:
    """Remove the folders in a folder that ranks which are no more have left."""
    for folder in Path(tempfile.gettempdir() if parent is None else parent).glob(f"{PREFIX}*-*"):
        with contextlib.suppress(OSError):
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)
