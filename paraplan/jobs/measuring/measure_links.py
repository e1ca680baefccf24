"""`paraplan profile-links`: ranks of this machine (or of torchrun's job) measured, a cluster file's links fitted.

Gloo between CPU processes, NCCL between GPUs: the ranks run the collectives the runtime runs (`link_rank`).
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from paraplan.cost_models.machine.link_fit import LinkFit, fit_link
from paraplan.cost_models.profiles.profile_file import ProfileWriter
from paraplan.ir.errors import ConstraintError, RuntimeFailure
from paraplan.ir.machine.cluster import ClusterSpec, check_cluster
from paraplan.ir.machine.device import Link
from paraplan.jobs.measuring.detect import detect
from paraplan.jobs.measuring.link_rank import LinkTimes
from paraplan.jobs.measuring.profile_ops import this_machine
from paraplan.runtime.transport.launch import spawn_local

JOBS = 5
"""An odd number, so that the median is one of them."""


@dataclass(frozen=True)
class Links:
    """What was measured.

    Attributes:
        cluster: this machine with fitted links.
        links: per level, the fit.
        collectives: how many times were taken.
    """

    cluster: ClusterSpec
    links: dict[str, LinkFit]
    collectives: int


def measure_links(
    processes: int | None, largest_bytes: int, profile: Path | None, tell: Callable[[str], None] = lambda text: None
) -> Links:
    """Measure the links of this machine.

    Args:
        processes: ranks; one per GPU, else one per core, where not given.
        largest_bytes: largest message.
        profile: a profile file that takes every collective's times, if any.
        tell: told what is done.
    Raises:
        ConstraintError: fewer than two ranks.
        RuntimeFailure: a rank failed.
        ProfileError: the profile cannot be written.
    """
    on_gpu = torch.cuda.is_available()
    cluster = detect(None if on_gpu else processes)
    count = cluster.num_devices if processes is None else processes
    if count < 2 or (on_gpu and count > cluster.num_devices):
        raise ConstraintError(
            f"links are measured between at least 2 ranks, on as many GPUs where there are any; {count} asked for"
        )
    tell(f"measuring collectives between {count} ranks")
    (found,) = link_times(count, largest_bytes)
    times = found.times
    backend = cluster.backend
    fit = fit_link([each for each in times if each.local_size == each.size], backend)
    measured = Link(
        bytes_per_s=float(f"{fit.bytes_per_s:.3g}"),
        latency_s=float(f"{fit.latency_s:.3g}"),
        device_share=found.device_share,
        source=f"fitted to collectives of {count} ranks here; median error {fit.median_error:.0%}",
    )
    group = msgspec.structs.replace(cluster.groups[0], in_node=measured)
    if profile is not None:
        with ProfileWriter(profile, this_machine("cuda") if on_gpu else this_machine("cpu", processes=count)) as writer:
            for each in times:
                writer.add(each)
    spec = check_cluster(msgspec.structs.replace(cluster, groups=(group,)))
    return Links(spec, {"in_node": fit}, len(times))


def link_times(ranks: int, *largest_bytes: int) -> list[LinkTimes]:
    """Per largest message, times of every collective between processes of this machine: the medians of a few jobs.

    Where threads of a job land, and what else the machine does just then, is the job's luck: sizes of 64 KiB differ by
    a third between jobs whose own rounds agree.

    Raises:
        RuntimeFailure: a rank failed.
    """
    rounds = [[_one_job(ranks, largest) for largest in largest_bytes] for _ in range(JOBS)]
    return [_middle(jobs) for jobs in zip(*rounds, strict=True)]


def _one_job(ranks: int, largest_bytes: int) -> LinkTimes:
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "times.json"
        code = spawn_local(ranks, "paraplan.jobs.measuring.link_rank", (str(found), str(largest_bytes)))
        if code or not found.exists():
            raise RuntimeFailure(f"a rank that measured links failed (exit code {code}); its message is above")
        return msgspec.json.decode(found.read_bytes(), type=LinkTimes)


def _middle(jobs: Sequence[LinkTimes]) -> LinkTimes:
    times = []
    for same in zip(*(job.times for job in jobs), strict=True):
        seconds = statistics.median(each.seconds for each in same)
        between = (max(each.seconds for each in same) - min(each.seconds for each in same)) / seconds
        times.append(
            msgspec.structs.replace(
                same[0],
                seconds=seconds,
                spread=max(between, *(each.spread for each in same)),
                samples=sum(each.samples for each in same),
                called_s=statistics.median(each.called_s for each in same),
            )
        )
    return LinkTimes(times=tuple(times), device_share=statistics.median(job.device_share for job in jobs))
