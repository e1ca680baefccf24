"""Process groups of some ranks of the job, all with the job's time limit.

torch gives every group that is not told otherwise a limit of its own (10 minutes for NCCL, 30 for Gloo), whatever the
job was started with.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from paraplan.ir.errors import ConstraintError
from paraplan.runtime.executing.torch_private import group_timeout, set_group_timeout

TIMEOUT_S = 300.0
"""How long a collective waits for its peers, unless said otherwise."""

MOST_TIMEOUT_S = 1e8
"""Three years, which backends can still count in nanoseconds."""


def check_timeout(timeout_s: float, option: str = "timeout_s=") -> None:
    """Refuse what is no time to wait.

    Raises:
        ConstraintError: names the option.
    """
    if not (isinstance(timeout_s, (int, float)) and 1 <= timeout_s <= MOST_TIMEOUT_S):
        raise ConstraintError(
            f"{option}{timeout_s!r}: give the seconds that a collective waits for its peers, from 1 to "
            f"{MOST_TIMEOUT_S:.0f}"
        )


def make_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A group of some ranks with the job's time limit; every rank of the job calls this, in the same order.

    Returns:
        The group; on other ranks something that stands for none.
    """
    return dist.new_group(list(ranks), timeout=group_timeout())


def limit_group(group: dist.ProcessGroup) -> None:
    """Give a group that torch made the job's time limit."""
    set_group_timeout(group_timeout(), group)


def limit_job(timeout_s: float) -> None:
    """Set the job's time limit, which groups made from now on have."""
    set_group_timeout(timedelta(seconds=timeout_s))
