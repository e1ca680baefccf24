"""Tasks that workers are tested with, in a module that they can import."""

from __future__ import annotations

import os
import time

from paraplan.ir.errors import ConstraintError


def base(number: int) -> tuple[int, int]:
    """What every process makes once: a number, and which process made it."""
    return number, os.getpid()


def cannot_be_made(number: int) -> tuple[int, int]:
    """What no other process makes.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"of {number} nothing is made")


def added(made: tuple[int, int], number: int) -> int:
    """A task."""
    return made[0] + number


def slow(made: tuple[int, int], number: int) -> tuple[int, int]:
    """A task that takes a while, and says who did it."""
    time.sleep(0.2)
    return made[0] + number, os.getpid()


def ends_elsewhere(made: tuple[int, int], home: int) -> int:
    """A task that ends every process but one."""
    if os.getpid() != home:
        os._exit(3)
    time.sleep(0.5)
    return home


def refused(made: tuple[int, int], number: int) -> int:
    """A task that fails."""
    raise ConstraintError(f"not {number}")
