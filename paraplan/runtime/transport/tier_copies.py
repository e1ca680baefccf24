"""Copies between the device and the tiers outside of it: the host's memory, and files on its disk.

A rank has a `Copier`. `offload` begins to copy a tensor away and returns what stands for it there (`TierTensor`);
`prefetch` begins to copy it back and returns the tensor, which holds nothing yet; `wait` ends either. What lives on a
tier (`disk_store`) is brought to the device likewise, or to the host's memory by `lift`, and overwritten by `store`.
What is copied from must live until then, which the program sees to. Each tier has one stream each way, on which
copies run in order:

* CUDA: a stream of the device and pinned memory, ordered by events; nothing blocks the host but files.
* CPU: a thread, so that copies run beside the program; or (`beside=False`) at once, for runs that are to be the same
  every time. The host tier is then other memory of the same kind, accounted apart.

A tensor on the disk tier is one file in a folder of this process' own (`folders`), removed with the last name for the
tensor and after a failure (`abandon`). What goes to disk is staged in host memory, which is not accounted.
`pace` makes every copy take at least the seconds it says: how a fast machine stands in for a slow link.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from paraplan.ir.errors import RuntimeFailure
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.model.strides import contiguous_strides, is_dense
from paraplan.runtime.transport.current_device import on_this_device
from paraplan.runtime.transport.disk_store import Homes, Region
from paraplan.runtime.transport.folders import TensorFolder, unlink

Pace = Callable[[str, int], float]
"""(tier, bytes) -> the least seconds a copy takes."""


class TierTensor:
    """A tensor on a tier.

    Attributes:
        tier: which.
        dtype, shape, strides: of the tensor; what lies dense comes back as it lay.
        nbytes: it takes there.
        content: the tensor in host memory, the file, or its part of the file of what lives on disk.
        adds: whether what is stored there is added to what is there already.
    """

    __slots__ = ("__weakref__", "adds", "content", "dtype", "nbytes", "shape", "strides", "tier")

    def __init__(self, x: Tensor, tier: str) -> None:
        self.tier, self.dtype, self.shape = tier, x.dtype, tuple(x.shape)
        self.strides = tuple(x.stride()) if is_dense(self.shape, tuple(x.stride())) else contiguous_strides(self.shape)
        self.nbytes = math.prod(self.shape) * x.element_size()
        self.content: Tensor | Path | Region | None = None
        self.adds = False


def tensor_of(value: Tensor | TierTensor) -> Tensor:
    """A tensor, wherever in memory it is."""
    if isinstance(value, Tensor):
        return value
    assert isinstance(value.content, Tensor), f"a tensor on {value.tier} is not in memory"
    return value.content


class CopyUnderWay:
    """A copy under way. What it copies is let go before it says that it is done."""

    def __init__(self, work: Callable[[], object], what: str, least_s: float) -> None:
        self.what, self.fault = what, ""
        self.event: Any = None
        self.done = threading.Event()
        self._work: Callable[[], object] | None = work
        self._least_s = least_s

    def fly(self) -> None:
        """Do it."""
        started = time.perf_counter()
        work, self._work = self._work, None
        assert work is not None
        try:
            work()
        except Exception as fault:  # noqa: BLE001  (told to whoever waits; the traceback would hold tensors)
            self.fault = f"{type(fault).__name__}: {fault}"
        del work
        early_s = self._least_s - (time.perf_counter() - started)
        if early_s > 0.0:  # a sleep of no time gives the processor away
            time.sleep(early_s)
        self.done.set()


def _serve(queue: SimpleQueue[CopyUnderWay | None], begin: Callable[[], None]) -> None:
    begin()
    while (flight := queue.get()) is not None:
        flight.fly()
        del flight


class Copier:
    """The copies of one rank.

    Args:
        device: "cpu" or "cuda".
        beside: on CPU, whether copies run beside the program.
        pace: how slow copies are; None for as fast as they go. CPU only.
        folder: in which the disk tier makes its own folder; the system's for temporary files where left out.
        rank: for messages and names.
    """

    def __init__(
        self,
        device: str = "cpu",
        beside: bool = False,
        pace: Pace | None = None,
        folder: str | Path | None = None,
        rank: int = 0,
    ) -> None:
        self.device, self.rank, self._pace, self._beside = device, rank, pace, beside
        if pace is not None and device != "cpu":
            raise RuntimeFailure(f"copies of {device} tensors take the time they take: a pace is for CPU processes")
        self._folder = TensorFolder(folder, rank)
        self._is_full = False
        self.homes = Homes(folder, rank)
        self._flights: dict[int, tuple[Any, str, CopyUnderWay]] = {}
        self._queues: dict[tuple[str, str], SimpleQueue[CopyUnderWay | None]] = {}
        self._streams: dict[str, Any] = {}
        self._end = weakref.finalize(self, _end, self._queues)

    def offload(self, x: Tensor, tier: str) -> TierTensor:
        """Begin to copy a tensor to a tier."""
        away, x = TierTensor(x, tier), x.detach()
        what = f"offload of {away.nbytes} bytes to {tier}"
        if self.device == "cuda":
            return self._begin(away, self._from_cuda(away, x, what), "out")
        put = _to_host if TIERS[tier].is_memory else self._to_file(away)
        return self._begin(away, CopyUnderWay(lambda: put(away, x), what, self._least_s(away)), "out")

    def prefetch(self, away: TierTensor, tier: str) -> Tensor:
        """Begin to copy a tensor back; it holds nothing until the wait."""
        out = torch.empty_strided(away.shape, away.strides, dtype=away.dtype, device=self.device)
        what = f"prefetch of {away.nbytes} bytes from {tier}"
        if self.device == "cuda":
            return self._begin(out, self._to_cuda(away, out, what), "in", tier)
        return self._begin(out, CopyUnderWay(lambda: _fetch(away, out), what, self._least_s(away)), "in", tier)

    def kept(self, x: Tensor, tier: str) -> TierTensor:
        """What stands for a tensor that lives on a tier."""
        away = TierTensor(x, tier)
        away.content = x if TIERS[tier].is_memory else self.homes.region_of(x)
        return away

    def bring(self, away: TierTensor, tier: str) -> Tensor:
        """Begin to copy what lives on a tier to the device."""
        return self.prefetch(away, tier)

    def lift(self, away: TierTensor, tier: str) -> TierTensor:
        """Begin to copy a tensor from files to the memory where the host updates it."""
        pinned = self.device == "cuda"
        blank = torch.empty_strided(away.shape, away.strides, dtype=away.dtype, pin_memory=pinned)
        made = TierTensor(blank, TIERS[tier].updated_in)
        made.content = blank
        what = f"lift of {away.nbytes} bytes from {tier}"
        return self._begin(made, CopyUnderWay(lambda: _fetch(away, blank), what, self._least_s(away, True)), "in", tier)

    def store(self, x: Tensor | TierTensor, tier: str, home: TierTensor) -> TierTensor:
        """Begin to overwrite a tensor that lives on a tier.

        Args:
            x: the new values.
            tier: where they live.
            home: what is overwritten.
        """
        source, from_host = tensor_of(x).detach(), isinstance(x, TierTensor)
        what = f"store of {home.nbytes} bytes to {tier}"
        if source.is_cuda:
            return self._begin(home, self._store_cuda(source, home, what), "out")
        return self._begin(
            home, CopyUnderWay(lambda: self._put(home, source), what, self._least_s(home, from_host)), "out"
        )

    def wait(self, issued: Any) -> Any:
        """End what was begun; `issued` is what that returned.

        Raises:
            RuntimeFailure: the copy failed (a full disk, no memory left).
        """
        _, tier, flight = self._flights.pop(id(issued))
        flight.done.wait()
        if flight.fault:
            raise RuntimeFailure(
                f"rank {self.rank}: {flight.what} failed: {flight.fault}; {TIERS[tier].when_full}, or offload less"
            )
        if flight.event is not None:
            torch.cuda.current_stream().wait_event(flight.event)
        return issued

    def _put(self, home: TierTensor, x: Tensor) -> None:
        """Overwrite what lives there; nothing any more once that failed, so that what was to follow stays as it was."""
        if self._is_full:
            raise OSError("not tried, since a write before it failed")
        try:
            _put(home, x)
        except OSError:
            self._is_full = True
            raise

    def settle(self) -> None:
        """Block this process until what was waited for on the way out can be read by the host."""
        if "out" in self._streams:
            self._streams["out"].synchronize()

    def mark(self) -> Callable[[], object]:
        """What blocks a thread until all copies begun so far, and waited for by the program, can be relied on there."""
        events = [stream.record_event() for stream in self._streams.values()]
        return lambda: [event.synchronize() for event in events]

    def forget(self) -> None:
        """Let copies that nobody will wait for end."""
        for *_, flight in self._flights.values():
            flight.done.wait()
        if self._flights and self.device == "cuda":
            torch.cuda.synchronize()
        self._flights.clear()

    def abandon(self) -> None:
        """After a failure: let copies under way end, forget them, and remove all files."""
        self.forget()
        self._is_full = False
        self._folder.clear()

    @property
    def under_way(self) -> int:
        """Copies begun that are neither done nor waited for."""
        return sum(not flight.done.is_set() for *_, flight in self._flights.values())

    @property
    def files(self) -> list[Path]:
        """The disk tier's files, in order of their names."""
        return self._folder.files

    def _begin(self, result: Any, flight: CopyUnderWay, way: str, tier: str = "") -> Any:
        tier = tier or result.tier
        self._flights[id(result)] = (result, tier, flight)
        if self.device == "cuda" and TIERS[tier].is_memory:
            flight.fly()
        elif self.device == "cuda" or self._beside:
            self._queue(tier, way).put(flight)
        else:
            flight.fly()
        return result

    def _queue(self, tier: str, way: str) -> SimpleQueue[CopyUnderWay | None]:
        queue = self._queues.get((tier, way))
        if queue is None:
            queue = self._queues[tier, way] = SimpleQueue()
            given = queue, on_this_device(self.device)
            threading.Thread(target=_serve, args=given, name=f"copy:{tier}:{way}", daemon=True).start()
        return queue

    def _least_s(self, away: TierTensor, from_host: bool = False) -> float:
        if self._pace is None:
            return 0.0
        least = self._pace(away.tier, away.nbytes)
        through = TIERS[away.tier].through
        return max(0.0, least - self._pace(through, away.nbytes)) if from_host and through else least

    def _to_file(self, away: TierTensor) -> Callable[[TierTensor, Tensor], None]:
        path = self._folder.path()
        weakref.finalize(away, self._folder.remove, path)
        return lambda made, x: _write(made, x, path)

    def _side(self, way: str) -> Any:
        """The device's stream for one way, which has seen all that the program's stream was given so far."""
        if way not in self._streams:
            self._streams[way] = torch.cuda.Stream()
        self._streams[way].wait_stream(torch.cuda.current_stream())
        return self._streams[way]

    def _from_cuda(self, away: TierTensor, x: Tensor, what: str) -> CopyUnderWay:
        """The device's part is begun here. The program's stream waits for it before x is given back, and the flight is
        kept until then, so the allocator need not be told of the other stream."""
        side = self._side("out")
        host = torch.empty_strided(away.shape, away.strides, dtype=away.dtype, pin_memory=True)
        with torch.cuda.stream(side):
            host.copy_(x, non_blocking=True)
            event = side.record_event()
        if TIERS[away.tier].is_memory:
            away.content = host
            flight = CopyUnderWay(lambda: None, what, 0.0)
        else:
            put = self._to_file(away)

            def write() -> None:
                event.synchronize()
                put(away, host)

            flight = CopyUnderWay(write, what, 0.0)
        flight.event = event
        return flight

    def _to_cuda(self, away: TierTensor, out: Tensor, what: str) -> CopyUnderWay:
        """`out` may be memory whose last reader the program's stream has yet to reach: the side stream waits for it."""
        side = self._side("in")
        if isinstance(away.content, Tensor):
            with torch.cuda.stream(side):
                out.copy_(away.content, non_blocking=True)
                flight = CopyUnderWay(lambda: None, what, 0.0)
                flight.event = side.record_event()
            return flight

        def read() -> None:
            host = torch.empty_strided(away.shape, away.strides, dtype=away.dtype, pin_memory=True)
            _fetch(away, host)
            with torch.cuda.stream(side):
                out.copy_(host, non_blocking=True)
                side.record_event().synchronize()

        return CopyUnderWay(read, what, 0.0)

    def _store_cuda(self, x: Tensor, home: TierTensor, what: str) -> CopyUnderWay:
        """As `_from_cuda`; the program waits for what is stored before it gives x back."""
        side, there = self._side("out"), home.content
        later = home.adds or not isinstance(there, Tensor)
        host = torch.empty_strided(home.shape, home.strides, dtype=home.dtype, pin_memory=True) if later else there
        with torch.cuda.stream(side):
            host.copy_(x, non_blocking=True)
            event = side.record_event()

        def write() -> None:
            event.synchronize()
            self._put(home, host)

        flight = CopyUnderWay(write if later else lambda: None, what, 0.0)
        flight.event = event
        return flight


def _to_host(away: TierTensor, x: Tensor) -> None:
    with torch.no_grad():
        content = torch.empty_strided(away.shape, away.strides, dtype=away.dtype)
        away.content = content.copy_(x)


def _write(away: TierTensor, x: Tensor, path: Path) -> None:
    """The tensor's elements in row-major order; what was written of a file that does not fit is removed."""
    try:
        with open(path, "wb") as file:
            file.write(memoryview(_bytes(x.contiguous())))
    except OSError:
        unlink(path)
        raise
    away.content = path


def _put(home: TierTensor, x: Tensor) -> None:
    """Overwrite what lives there, or add to it."""
    if isinstance(home.content, Tensor):
        with torch.no_grad():
            home.content.add_(x) if home.adds else home.content.copy_(x)
        return
    assert isinstance(home.content, Region), "what lives on disk has its part of a file"
    if home.adds:
        there = torch.empty(home.shape, dtype=home.dtype)
        home.content.read(memoryview(_bytes(there)))
        with torch.no_grad():
            x = there.add_(x)
    home.content.write(memoryview(_bytes(x.contiguous())))


def _fetch(away: TierTensor, out: Tensor) -> None:
    if isinstance(away.content, Tensor):
        with torch.no_grad():
            out.copy_(away.content)
        return
    assert away.content is not None, "prefetched before its offload was waited for"
    rows = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
    view = memoryview(_bytes(rows))
    if isinstance(away.content, Region):
        away.content.read(view)
    else:
        with open(away.content, "rb", buffering=0) as file:
            Region(file.fileno(), 0, len(view)).read(view)
    if rows is not out:
        out.copy_(rows)


def _bytes(x: Tensor) -> Any:
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy()


def _end(queues: dict[tuple[str, str], SimpleQueue[CopyUnderWay | None]]) -> None:
    for queue in queues.values():
        queue.put(None)
