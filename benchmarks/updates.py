"""What the host's update of a parameter takes: by torch's fused kernels, and by its loop over parameters.

An optimizer over float32 parameters of a layer of GPT-2-XL on one thread, in turns; the fewest nanoseconds per
parameter of some steps each.

    python -m benchmarks.updates [--only PATTERN] [--json FILE]      STEPS=5 of each, WIDTH=1600 (environment)
"""

from __future__ import annotations

import os
import time
from functools import partial

import torch

from benchmarks.table import Row, main
from paraplan.jobs.optimizers import OPTIMIZER_CLASSES

COLUMNS = ("case", "parameters", "fused_ns", "unfused_ns", "ratio")


def case(name: str) -> Row:
    """One optimizer's row."""
    steps, width = int(os.environ.get("STEPS", "5")), int(os.environ.get("WIDTH", "1600"))
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), (width,), (width,)]
    cls, options = OPTIMIZER_CLASSES[name]
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape)
    ways = {fused: cls(params, lr=1e-4, fused=fused, **options) for fused in (True, False)}  # type: ignore[call-arg]
    found: dict[bool, list[float]] = {True: [], False: []}
    for optimizer in ways.values():  # states are made
        optimizer.step()
    for _ in range(steps):
        for fused, optimizer in ways.items():
            started = time.perf_counter()
            optimizer.step()
            found[fused].append(time.perf_counter() - started)
    count = sum(param.numel() for param in params)
    fused_ns, unfused_ns = (1e9 * min(found[fused]) / count for fused in (True, False))
    return {"parameters": count, "fused_ns": fused_ns, "unfused_ns": unfused_ns, "ratio": unfused_ns / fused_ns}


CASES = {name: partial(case, name) for name in OPTIMIZER_CLASSES}


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main("updates", CASES, COLUMNS))
