"""What every rank of `benchmarks.pinned` runs: `pinned_rank <model> <plan> <rounds> <file for rank 0's step times>`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import paraplan as pp
from benchmarks.profiles import made
from paraplan.jobs.data import RandomBatches
from paraplan.runtime.transport.launch import init_distributed, leave_job

WARMUP = 2


def main() -> None:
    """Steps on this rank's core."""
    name, path, rounds, found = sys.argv[1:]
    rank, _ = init_distributed("gloo")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    model, plan = made(name), pp.Plan.load(path)
    trainer = plan.executable(model.model)
    optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-4)
    batch = trainer.cut(RandomBatches(plan.data, model, 0)(0))
    times = []
    for _ in range(WARMUP + int(rounds)):
        dist.barrier()
        started = time.perf_counter()
        trainer.step(batch)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        times.append(time.perf_counter() - started)
    if rank == 0:
        Path(found).write_text(json.dumps(times[WARMUP:]))
    leave_job()


if __name__ == "__main__":
    main()
