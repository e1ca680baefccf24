"""What a process of `workers` runs: tasks come in and answers go out as pickles, each after its length."""

from __future__ import annotations

import os
import pickle
import sys
from typing import BinaryIO

from paraplan.ir.process.garbage import seldom_collected


@seldom_collected()
def serve(tasks: BinaryIO, answers: BinaryIO) -> None:
    """Do tasks until there are no more; an empty answer says that one could not be done."""
    if not (first := _read(tasks)):
        return
    setup, args = pickle.loads(first)
    made = setup(*args)
    while data := _read(tasks):
        try:
            function, parts = pickle.loads(data)
            answer = pickle.dumps(function(made, *parts))
        except Exception:  # noqa: BLE001
            answer = b""  # done again where its error can be seen
        answers.write(len(answer).to_bytes(8, "little") + answer)
        answers.flush()


def _read(tasks: BinaryIO) -> bytes:
    return tasks.read(int.from_bytes(tasks.read(8), "little"))


def main() -> None:
    """Serve the process that started this one."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what is printed is no answer
        serve(sys.stdin.buffer, answers)
