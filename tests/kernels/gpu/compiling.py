"""Triton kernels compiled for a device that is not there: its interpreter is laxer than its compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch


def compiled(script: str) -> dict[str, int]:
    """What a script prints that compiles kernels: bytes of code by kernel. Run apart: this process interprets them."""
    if torch.version.cuda is None and sys.platform != "linux":
        pytest.skip("Triton compiles on Linux alone")
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    words = run.stdout.split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))
