"""Processes that work beside this one on tasks that need nothing of each other.

    workers = Workers(2, setup, argument)        # every process makes setup(argument) once
    workers.map(function, tasks, own)            # function(that, *task) for each, in the tasks' order
    answer = workers.begin(function, task, own)  # answer() is function(that, *task), made while this process goes on

This process takes tasks as well, with `own`. A task that a worker cannot do, be it that it ends or that the task fails,
is done here, so the answer is that of a loop, and the errors are. Workers are started as `python -c`, so that a script
without a guard of its `__main__` is not run again; they import what tasks name, and end with this process or when they
are closed. Tasks and answers are pickled: they pass between processes of one program, never through a file.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_UNKNOWN: Any = object()
# What may be imported here may be there, but in no place of the interpreter's own modules: a folder that a model was
# loaded from may hold a json.py.
_RUN = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "  # who started it ends it
    "import sys; sys.path += sys.argv[1:]; from paraplan.ir.process.worker import main; main()"
)
SAYS_WHY_S = 5.0
"""Seconds a process whose answer is missing has for the last of what it prints."""


class Workers:
    """Some processes.

    Args:
        count: how many, beside this one.
        setup, args: what each makes once.
        waits: whether they are started only when they are told to (`start`); until then there are none.

    Attributes:
        lost: processes that ended before they were told to.
        redone: tasks that a process could not do, and this one could.
    """

    def __init__(self, count: int, setup: Callable[..., object], *args: object, waits: bool = False) -> None:
        self.lost = self.redone = 0
        self._processes: list[_Process] = []
        self._waiting, self._made_with = count, (setup, args)
        if not waits:
            self.start()

    def start(self) -> None:
        """Start those that wait."""
        if self._waiting:
            data = pickle.dumps(self._made_with)
            self._processes += [_Process(data) for _ in range(self._waiting)]
            self._waiting = 0

    def map(self, function: Callable[..., T], tasks: Sequence[tuple[Any, ...]], own: object) -> list[T]:
        """What a function makes of every task.

        Args:
            function: of a module; called with what `setup` made and a task's parts.
            tasks: the parts of each.
            own: what `setup` would have made here.
        Returns:
            In the order of tasks.
        """
        found: list[T] = [_UNKNOWN] * len(tasks)
        left = deque(range(len(tasks)))
        threads = [Thread(target=self._drive, args=(each, function, tasks, left, found)) for each in self._idle]
        try:
            for thread in threads:
                thread.daemon = True
                thread.start()
            while left:
                with suppress(IndexError):
                    index = left.popleft()
                    found[index] = function(own, *tasks[index])
            for thread in threads:
                thread.join()
        except BaseException:
            self.close()
            raise
        return [self._done(made, function, task, own) for made, task in zip(found, tasks, strict=True)]

    def begin(
        self,
        function: Callable[..., T],
        task: tuple[Any, ...],
        own: object,
        goes_on: Callable[[T], bool] = lambda _: False,
    ) -> Begun[T]:
        """Have a process that does nothing else make something of a task.

        Args:
            function, own: as for `map`.
            task: its parts.
            goes_on: of an answer, whether the same is asked for once more.
        Returns:
            What waits for the last answer; where there is no process, it makes one.
        """
        found: list[T] = [_UNKNOWN]
        if not self._idle:
            return Begun(None, found, lambda: function(own, *task))
        process = self._idle[0]
        process.is_busy = True

        def drive() -> None:
            left = deque((0,))
            while left:
                self._drive(process, function, [task], left, found)
                if process in self._processes and found[0] is not _UNKNOWN and goes_on(found[0]):
                    left.append(0)
            process.is_busy = False

        thread = Thread(target=drive, daemon=True)
        thread.start()

        return Begun(thread, found, lambda: self._done(found[0], function, task, own))

    def _done(self, found: T, function: Callable[..., T], task: tuple[Any, ...], own: object) -> T:
        """What a process found of a task, or this one does where that could not."""
        if found is _UNKNOWN:
            found = function(own, *task)
            self.redone += 1
        return found

    def _drive(
        self,
        process: _Process,
        function: Callable[..., T],
        tasks: Sequence[tuple[Any, ...]],
        left: deque[int],
        found: list[T],
    ) -> None:
        """Hand tasks to a process for as long as there are some, and it answers."""
        with suppress(IndexError):
            while True:
                index = left.popleft()
                try:
                    found[index] = process.answer(pickle.dumps((function, tasks[index])))
                except (OSError, EOFError, ValueError, pickle.PickleError):
                    process.end(has_ended=True)
                    if process in self._processes:  # else closed
                        self._processes.remove(process)
                        self.lost += 1
                    return

    @property
    def _idle(self) -> list[_Process]:
        return [process for process in self._processes if not process.is_busy]

    @property
    def has_idle(self) -> bool:
        """Whether a process has nothing to do."""
        return bool(self._idle)

    def close(self) -> None:
        """End them."""
        processes, self._processes = self._processes, []  # what is under way in one that is closed is not lost
        for process in processes:
            process.end()


class Begun(Generic[T]):
    """What a process makes of a task, when it is asked for.

    Args:
        thread: that waits for the process; None where there is none.
        found: its last answer so far.
        make: the answer, once there is no more to wait for.
    """

    def __init__(self, thread: Thread | None, found: Sequence[T], make: Callable[[], T]) -> None:
        self._thread, self._found, self._make = thread, found, make

    def __call__(self) -> T:
        """The last answer."""
        if self._thread is not None:
            self._thread.join()
        return self._make()

    def within(self, seconds: float) -> T | None:
        """The last answer that there is in so many seconds, where a process is asked; None for none."""
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return None if self._found[0] is _UNKNOWN else self._found[0]
        return self._make()


class _Process:
    """One of them, and what it is told first, while it starts."""

    def __init__(self, first: bytes) -> None:
        command = [sys.executable, "-c", _RUN, str(Path(__file__).parents[3]), *filter(None, sys.path)]
        env = {**os.environ, "PYTHONSAFEPATH": "1"}
        self.is_busy = False
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self._telling = Thread(target=self._tell, args=(first,), daemon=True)
        self._telling.start()

    def answer(self, task: bytes) -> Any:
        """What it makes of a task; unknown where it says that it cannot.

        Raises:
            EOFError, OSError: it has ended.
        """
        self._telling.join()
        self._send(task)
        assert self._process.stdout is not None
        size = self._process.stdout.read(8)
        data = self._process.stdout.read(int.from_bytes(size, "little"))
        if len(size) < 8 or len(data) < int.from_bytes(size, "little"):
            raise EOFError
        return pickle.loads(data) if data else _UNKNOWN

    def end(self, has_ended: bool = False) -> None:
        """Stop it; one that ends by itself says first why."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(SAYS_WHY_S if has_ended else 0)
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if stream is not None:
                    stream.close()

    def _tell(self, first: bytes) -> None:
        with suppress(OSError, ValueError):
            self._send(first)

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(len(data).to_bytes(8, "little") + data)
        self._process.stdin.flush()
