"""Where the parts run: the CUDA device, or a CPU on which all of them run small, as a test of themselves."""

from __future__ import annotations

import fcntl
import gc
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.table import Row
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.jobs.measuring.detect import detect


class Place(NamedTuple):
    """A device and how much it is given to do.

    Attributes:
        device: "cuda" or "cpu".
        small: whether sizes are those of a self-test.
    """

    device: str
    small: bool

    @property
    def is_cuda(self) -> bool:
        """Whether it is a CUDA device."""
        return self.device == "cuda"

    def cluster(self, devices: int = 1) -> ClusterSpec:
        """As many devices like this one."""
        if not self.is_cuda:
            return ClusterSpec.local(devices)
        here = detect()
        return here if devices == 1 else parse_cluster(f"{devices}x{here.groups[0].device.kind}")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other process that asks for it is on the device: what is timed is not disturbed by shares beside it."""
        if not self.is_cuda:
            yield
            return
        with (Path(tempfile.gettempdir()) / "benchmarks-gpu.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def forget(self) -> None:
        """Give back what the allocator holds for nobody."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def sync(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize()


def here() -> Place:
    """The CUDA device where there is one."""
    return Place("cuda", False) if torch.cuda.is_available() else Place("cpu", True)


def described() -> Row:
    """Hardware and versions, which every figure is to be quoted with."""
    row: Row = {"torch": torch.__version__, "device": "cpu"}
    if torch.cuda.is_available():
        query = (
            "nvidia-smi",
            "--query-gpu=driver_version,clocks.max.sm,power.limit,pcie.link.gen.max,pcie.link.width.max",
            "--format=csv,noheader",
        )
        told = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        row |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "driver": told}
        row |= {"triton": metadata.version("triton"), "cudnn": torch.backends.cudnn.version()}
    return {**row, "note": ", ".join(f"{key} {value}" for key, value in row.items())}


def median_ms(call: Callable[[], object], place: Place, times: int = 10, warm: int = 3) -> float:
    """Median milliseconds of a call, the device waited for."""
    times, warm = (2, 1) if place.small else (times, warm)
    found = []
    for index in range(warm + times):
        place.sync()
        started = time.perf_counter()
        call()
        place.sync()
        if index >= warm:
            found.append(1e3 * (time.perf_counter() - started))
    return statistics.median(found)


def busy(call: Callable[[], object], place: Place) -> tuple[float | None, float, dict[str, float]]:
    """What a call takes of the device and of the host.

    Returns:
        Milliseconds that kernels and copies run, added up; until the call is back, the device not waited for; and of
        the kernels that take the most, by name. Nothing of a device where there is none.
    """
    place.sync()
    started = time.perf_counter()
    call()
    host_ms = 1e3 * (time.perf_counter() - started)
    place.sync()
    if not place.is_cuda:
        return None, host_ms, {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        place.sync()
    times: dict[str, float] = defaultdict(float)
    for event in profile.events():
        times[event.name[:80]] += event.self_device_time_total / 1e3
    most = dict(sorted(times.items(), key=lambda each: -each[1])[:MOST_KERNELS])
    return sum(times.values()), host_ms, most


MOST_KERNELS = 25


class Room:
    """Memory of the device while it was watched.

    Attributes:
        peak_bytes: the most allocated at once, above what others had before.
        reserved_bytes: likewise of what the allocator took from the device.
    """

    peak_bytes = 0
    reserved_bytes = 0


@contextmanager
def watching(place: Place, others: int = 0, reserved: int = 0) -> Iterator[Room]:
    """Peaks of what is done inside; nothing is known on a CPU."""
    room = Room()
    if place.is_cuda:
        place.sync()
        torch.cuda.reset_peak_memory_stats()
    yield room
    if place.is_cuda:
        place.sync()
        room.peak_bytes = torch.cuda.max_memory_allocated() - others
        room.reserved_bytes = torch.cuda.max_memory_reserved() - reserved


@contextmanager
def no_waiting(place: Place) -> Iterator[None]:
    """A wait of the host for the device inside is an error."""
    if not place.is_cuda:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def ratio(measured: float, wanted: float) -> float | None:
    """Their quotient; None where either is unknown."""
    return measured / wanted if measured and wanted else None
