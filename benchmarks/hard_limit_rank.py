"""What every rank of `benchmarks.hard_limit` runs: `hard_limit_rank <seed> <plan> <limit> <file for the most used>`."""

from __future__ import annotations

import json
import resource
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

import paraplan as pp
from benchmarks.hard_limit import OPTIMIZERS, network
from paraplan.runtime.transport.launch import init_distributed, leave_job

STEPS = 4
EVERY_S = 0.002


def data_bytes() -> int:
    """Private memory of this process, as RLIMIT_DATA counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))


class Watch(threading.Thread):
    """The most private memory, looked at again and again."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.done = 0, threading.Event()

    def run(self) -> None:
        """Until it is told to end."""
        while not self.done.wait(EVERY_S):
            self.most = max(self.most, data_bytes())


def main() -> None:
    """Steps on this rank."""
    seed, path, limit, found = sys.argv[1:]
    init_distributed("gloo")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))
    watch = Watch()
    watch.start()
    net, batch = network(int(seed))
    plan = pp.Plan.load(path)
    trainer = plan.executable(net)
    kind, settings = OPTIMIZERS[plan.data.optimizer.name]
    optimizer = trainer.optimizer(kind, **settings)
    own = trainer.cut(batch)
    del batch
    for _ in range(STEPS):
        trainer.step(own)
        optimizer.step()
        optimizer.zero_grad()
    watch.done.set()
    watch.join()
    most = torch.tensor(float(watch.most))
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX)
    if not dist.is_initialized() or dist.get_rank() == 0:
        Path(found).write_text(json.dumps(int(most)))
    leave_job()


if __name__ == "__main__":
    main()
