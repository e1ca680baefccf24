"""What every rank of `benchmarks.steptime` runs: `steptime_rank <plan> <scale> <rounds> <file for rank 0's row>`."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import paraplan as pp
from benchmarks.sleeping import SleepingRank
from paraplan.ir.machine.rank_groups import holdings
from paraplan.ir.plan import Plan
from paraplan.runtime.transport.distributed import DistributedTransport
from paraplan.runtime.transport.launch import init_distributed, leave_job

_SOON_S = 0.1


class GlooMeeting:
    """Streams of processes meet: over a mesh axis by its process group, two by two by a group for each direction."""

    def __init__(self, transport: DistributedTransport, lanes: Sequence[dist.ProcessGroup]) -> None:
        self._transport, self._lanes = transport, lanes

    def over(self, axis: int, begin: float) -> float:
        """Over a mesh axis."""
        assert self._transport.device_mesh is not None
        return largest(begin, self._transport.device_mesh.get_group(axis))

    def between(self, peer: int, sends: bool, begin: float, seconds: float) -> tuple[float, float]:
        """With one other rank."""
        rank = self._transport.rank
        source, target = (rank, peer) if sends else (peer, rank)
        lane = self._lanes[source < target]
        ours = torch.tensor([begin, seconds], dtype=torch.float64)
        theirs = torch.empty_like(ours)
        work = dist.isend(ours, peer, group=lane)
        dist.recv(theirs, peer, group=lane)
        assert work is not None
        work.wait()
        first, takes = torch.maximum(ours, theirs).tolist()
        return first, takes


def largest(value: float, group: dist.ProcessGroup | None = None) -> float:
    """The largest of every rank's."""
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return float(found)


def measure(plan: pp.Plan, scale: float, rounds: int, rank: int) -> dict[str, object]:
    """Steps of this rank and the others; the first, in which modules write their code, is not counted."""
    data: Plan = plan.data
    transport = DistributedTransport(*(holding.mesh for holding in holdings(data)))
    lanes = (dist.new_group(), dist.new_group())
    meeting = GlooMeeting(transport, lanes)
    mine = SleepingRank(data, plan.programs, plan.simulate(), rank, meeting, scale=scale, groups=transport.groups)
    by_clock, measured = [], []
    for _ in range(1 + rounds):
        mine.ready()
        dist.barrier()
        begin = largest(time.monotonic() + _SOON_S)
        end = mine.step(begin)
        measured.append(largest(time.monotonic()) - begin)
        by_clock.append(largest(end) - begin)
    return {
        "measured_s": statistics.median(measured[1:]),
        "clock_s": statistics.median(by_clock[1:]),
        "all_measured_s": measured[1:],
    }


def main() -> None:
    """One case on this rank."""
    path, scale, rounds, found = sys.argv[1:]
    torch.set_num_threads(1)
    rank, _ = init_distributed("gloo")
    row = measure(pp.Plan.load(path), float(scale), int(rounds), rank)
    if rank == 0:
        Path(found).write_text(json.dumps(row))
    leave_job()


if __name__ == "__main__":
    main()
