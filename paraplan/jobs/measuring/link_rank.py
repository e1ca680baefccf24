"""One rank of `paraplan profile-links`: collectives over groups of consecutive ranks, timed until all are through.

As in a step, all groups of an axis communicate at once, and before a collective every rank works on its own, so that
its threads sleep and ranks come when they are ready: what a collective costs a step is waiting for the last one too.
A step lasts as long as a rank works and waits on average over ranks, and over its collectives: the mean is kept, over
ranks and, but for the worst, over rounds (Gloo's small ones take half a millisecond or a few, as threads are woken).
A CPU's threads that move and add are seen as processor time beside the calling thread's.

    (on every rank)  python -m paraplan.jobs.measuring.link_rank RESULT.json LARGEST_BYTES
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from paraplan.ir.machine.collectives import COLLECTIVES
from paraplan.ir.profile import CollectiveTime
from paraplan.ir.struct import Value, to_json
from paraplan.runtime.transport.collectives import IMPLEMENTATIONS
from paraplan.runtime.transport.launch import init_distributed, leave_job
from paraplan.runtime.transport.process_groups import make_group

SMALLEST_BYTES = 1 << 10
LARGE_BYTES = 1 << 20
BUDGET_S = 0.12
LEAST_ROUNDS, MOST_ROUNDS, WARM_UP = 5, 41, 2
WORK_SIDE, WORK_PRODUCTS = 256, 4
"""Products between collectives: about a millisecond of a server's core."""

Call = Callable[[Tensor], Tensor]


def calls(size: int, group: str) -> dict[str, Call]:
    """Every even collective of the runtime over a group, by name."""
    even = [record for record in COLLECTIVES.values() if not record.uneven]
    return {
        record.name: partial(IMPLEMENTATIONS[record.name].start, reduction=record.reduction, n=size, group=group)
        for record in even
    }


def sizes(largest: int) -> tuple[int, ...]:
    """Bytes put in, the largest among them: a factor of 2 apart where caches end, below `LARGE_BYTES` of 4."""
    found = [largest]
    while (less := found[-1] // (2 if found[-1] > LARGE_BYTES else 4)) >= SMALLEST_BYTES:
        found.append(less)
    return tuple(reversed(found))


class LinkTimes(Value, frozen=True, kw_only=True):
    """What the ranks found.

    Attributes:
        times: of every collective and size.
        device_share: of a core, what other threads of a process take while a large collective is under way; 0 on GPUs.
    """

    times: tuple[CollectiveTime, ...]
    device_share: float


def measure(largest: int, device: str) -> LinkTimes:
    """Times of every collective over groups of 2, 4, ... and all ranks."""
    world, local = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    found, shares = [], []
    for size in group_sizes(world):
        mine = None
        for first in range(0, world, size):
            ranks = list(range(first, first + size))
            group = make_group(ranks)
            mine = group if dist.get_rank() in ranks else mine
        assert mine is not None
        for target, call in calls(size, str(mine.group_name)).items():
            for input_bytes in sizes(largest):
                x = torch.ones(max(size, input_bytes // 4 // size * size), device=device)
                rounds, share, called = _rounds(call, x, device)
                shares += [share] if input_bytes >= LARGE_BYTES else []
                usual = statistics.fmean(sorted(rounds)[:-1])
                low, _, high = statistics.quantiles(rounds, n=4)
                found.append(
                    CollectiveTime(
                        target=target,
                        size=size,
                        local_size=min(size, local),
                        input_bytes=4 * x.numel(),
                        seconds=usual,
                        spread=(high - low) / usual,
                        samples=len(rounds),
                        called_s=min(called, usual),
                    )
                )
    share = statistics.median(shares) if shares and device == "cpu" else 0.0
    return LinkTimes(times=tuple(found), device_share=min(1.0, max(0.0, round(share, 2))))


def group_sizes(world: int) -> tuple[int, ...]:
    """Powers of two that divide the ranks, and all of them."""
    return tuple(
        size for size in range(2, world + 1) if world % size == 0 and (size & (size - 1) == 0 or size == world)
    )


def _rounds(call: Call, x: Tensor, device: str) -> tuple[list[float], float, float]:
    """Seconds of each round; of a round less the calling thread's work, the share that other threads of this process
    were busy; that thread's work in the median (both of CPU processes alone)."""
    for _ in range(WARM_UP):
        guess, _ = _once(call, x, device)
    agreed = torch.tensor([guess], device=device, dtype=torch.float64)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    count = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(BUDGET_S / max(float(agreed), 1e-6))))
    mine, busy, calls = [], 0.0, []
    for _ in range(count):
        others = time.process_time() - time.thread_time()
        seconds, called = _once(call, x, device)
        mine.append(seconds)
        calls.append(called)
        busy += time.process_time() - time.thread_time() - others
    left = max(sum(mine) - sum(calls), 1e-9)
    took = torch.tensor([*mine, busy / left, statistics.median(calls)], device=device, dtype=torch.float64)
    dist.all_reduce(took)
    *rounds, share, call_s = (float(value) / dist.get_world_size() for value in took)
    return rounds, share, call_s


def _once(call: Call, x: Tensor, device: str) -> tuple[float, float]:
    """Seconds from when this rank has worked for a while to when it has the result, and its thread's work in them."""
    side = torch.ones(WORK_SIDE, WORK_SIDE, device=device)
    for _ in range(WORK_PRODUCTS):
        side @ side
    if device == "cuda":
        torch.cuda.synchronize()
    started, busy = time.perf_counter(), time.thread_time()
    torch.ops._c10d_functional.wait_tensor(call(x))
    if device == "cuda":
        torch.cuda.synchronize()
    called = 0.0 if device == "cuda" else time.thread_time() - busy
    return time.perf_counter() - started, called


def main() -> None:
    """Measure, and leave the times in the file named on the command line."""
    rank, _ = init_distributed()
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    found = measure(int(sys.argv[2]), device)
    if rank == 0:
        Path(sys.argv[1]).write_bytes(to_json(found))
    leave_job()


if __name__ == "__main__":
    main()
