"""Running discovery in a process of its own, so that a kernel that crashes on odd shapes takes nothing with it.

Kernels behind an op may trust their callers: wrong shapes can end the process. Discovery therefore runs in a fork of
this process (which knows the user's ops), one thread, silent, and hands its rules back as JSON. Where a
process cannot be forked (Windows, or CUDA in use) it runs here.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import torch

from paraplan.ir.model.op_rule import OpRule

MAX_SECONDS = 120.0
Job = TypeVar("Job")


def run_apart(
    jobs: Sequence[tuple[Job, object]], discover: Callable[..., OpRule], give_up: Callable[..., OpRule]
) -> list[OpRule]:
    """`discover(*job)` of every job, each rule as data.

    Args:
        jobs: arguments of `discover`.
        discover: makes a rule.
        give_up: (job, why) -> the rule where the process died or took too long.
    """
    if not jobs or not hasattr(os, "fork") or sys.platform == "darwin" or torch.cuda.is_initialized():
        return [discover(*job) for job in jobs]
    found: list[OpRule] = []
    while len(found) < len(jobs):
        made, why = _forked(jobs[len(found) :], discover)
        found += made
        if len(found) < len(jobs):
            found.append(give_up(jobs[len(found)], why))
    return found


def _forked(jobs: Sequence[tuple[Job, object]], discover: Callable[..., OpRule]) -> tuple[list[OpRule], str]:
    """Rules up to the job that ended the child, and how it ended."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads of this process hold nothing we need
        child = os.fork()
    if child == 0:
        os.close(reader)
        _work(jobs, discover, writer)
    os.close(writer)
    try:
        data, late = _read(reader)
    finally:
        os.close(reader)
    if late:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    lines = data.split(b"\n")[:-1]
    rules = [msgspec.json.decode(line, type=OpRule) for line in lines]
    why = (
        f"running it took more than {MAX_SECONDS:.0f} s" if late else f"running it ended its process ({_ended(status)})"
    )
    return rules, why


def _ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit {os.waitstatus_to_exitcode(status)}"


def _work(jobs: Sequence[tuple[Job, object]], discover: Callable[..., OpRule], writer: int) -> None:
    """The child: a line of JSON per rule, and no way back into the parent's code."""
    code = 1
    try:
        faulthandler.disable()  # the parent tells how it ended
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        torch.set_num_threads(1)
        for job in jobs:
            line = msgspec.json.encode(discover(*job)) + b"\n"
            while line:
                line = line[os.write(writer, line) :]
        code = 0
    finally:
        os._exit(code)


def _read(reader: int) -> tuple[bytes, bool]:
    """Everything the child writes, and whether a rule took too long."""
    found = bytearray()
    deadline = time.monotonic() + MAX_SECONDS
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return bytes(found), True
        piece = os.read(reader, 1 << 16)
        if not piece:
            return bytes(found), False
        found += piece
        deadline = time.monotonic() + MAX_SECONDS
