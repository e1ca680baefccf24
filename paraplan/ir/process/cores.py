"""Cores of this machine, as far as this process may use them."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
