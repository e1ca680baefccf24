"""Measuring a model's local ops on a device, into a profile file: what is there is not measured again.

A model is captured from meta at its global batch, and every local op a planner may ask for (`local_ops`) is measured
once per machine, torch version and number of threads. What was measured is kept whenever this ends; going on means
starting it again. A model of the same sizes finds everything there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from paraplan.cost_models.machine.catalog import catalog_device
from paraplan.cost_models.profiles.learn import pooled
from paraplan.cost_models.profiles.measured import InterpolationErrors, MeasuredTimes
from paraplan.cost_models.profiles.profile_file import Machine, ProfileWriter
from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.profile import UPDATE, VIEW, OpTime, Profile
from paraplan.jobs.files import cpu_name
from paraplan.jobs.measuring.contention import FAULTS, Beside, companions, crowding
from paraplan.jobs.measuring.detect import catalog_name
from paraplan.jobs.measuring.local_ops import LocalOp, families, moves
from paraplan.jobs.measuring.measure_ops import caller, kind_of, measure_op, measure_update, measure_view, updater
from paraplan.jobs.optimizers import OPTIMIZER_CLASSES

UPDATED = tuple(1 << power for power in range(6, 23, 2))
"""Elements of the parameters whose update is measured: 256 B to 16 MiB of float32."""


@dataclass
class MeasuringRun:
    """What a run of measuring did.

    Attributes:
        measured, known: local ops measured now, and found in the file.
        failed: target, and the kernel where there are several -> why, of ops that could not be run on random inputs.
        profile: all the file has of this machine.
        errors: of interpolation, by cross-validation, per class of op.
    """

    measured: int = 0
    known: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    profile: Profile | None = None
    errors: dict[str, InterpolationErrors] = field(default_factory=dict)


@dataclass
class Book:
    """Where times are entered.

    Attributes:
        writer: of the file.
        known: by full key, what it has.
        again: what it had when the book was opened is measured once more.
        entered: keys since then.
    """

    writer: ProfileWriter
    known: dict[str, OpTime]
    again: bool
    entered: set[str] = field(default_factory=set)

    def lacks(self, key: str) -> bool:
        """Whether an op is to be measured."""
        return key not in self._among

    def lacks_all(self, target: str) -> bool:
        """Whether of a target no op was measured, of whatever shape."""
        return all(self.known[key].target != target for key in self._among)

    @property
    def _among(self) -> Iterable[str]:
        return self.entered if self.again else self.known

    def enter(self, found: OpTime) -> None:
        """Keep a time, with what was known of it."""
        key = found.full_key
        known = self.known.get(key)
        self.known[key] = found if known is None or not known.samples else pooled(known, found)
        self.entered.add(key)
        self.writer.add(self.known[key])


@dataclass(frozen=True)
class Meter:
    """Measures ops on a device, others doing the same.

    Attributes:
        device: where.
        others: processes beside this one.
        crowd: processes to a core.
    """

    device: str
    others: Beside
    crowd: float

    def stretched(self, found: OpTime) -> OpTime:
        """A time by the processor's clock as the wall's, where processes share cores."""
        return msgspec.structs.replace(found, seconds=found.seconds * self.crowd)

    def op(self, op: LocalOp) -> OpTime:
        """The time of an op.

        Raises:
            RuntimeError, ...: whatever its kernel raises on random inputs.
        """
        with self.others.running(partial(caller, op, "cpu")):
            return self.stretched(measure_op(op, self.device))

    def update(
        self, name: str, cls: type[torch.optim.Optimizer], options: dict[str, Any], shape: tuple[int, ...]
    ) -> OpTime:
        """The time of an optimizer's update of a parameter.

        Args:
            name, cls, options, shape: as of `measure_ops.measure_update`.
        """
        with self.others.running(partial(updater, cls, options, shape, "cpu")):
            return self.stretched(measure_update(name, cls, options, shape, self.device))


def this_machine(device: str, threads: int = 1, processes: int = 1) -> Machine:
    """What times taken here are known by.

    Args:
        device: "cpu", or "cuda" with or without a number.
        threads: of a CPU process.
        processes: of CPU that work at once.
    Raises:
        ConstraintError: there is no such device here.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = ""
    if kind == "cuda" and torch.cuda.is_available():
        name = torch.cuda.get_device_name(torch.device(device))
        return Profile(device=catalog_name(name) or name, name=name, torch=metadata.version("torch"))
    if kind != "cpu":
        there = "cpu and cuda" if torch.cuda.is_available() else "cpu"
        raise ConstraintError(f"--device {device!r}: this machine has {there}")
    return Profile(device="cpu", name=cpu_name(), torch=metadata.version("torch"), threads=threads, processes=processes)


class CpuShare(NamedTuple):
    """What a step has of a CPU.

    threads: of each process.
    processes: that share the machine's memory in a step: so many run each op at once while it is measured.
    """

    threads: int = 1
    processes: int = 1


def profile_program(
    program: Program,
    path: Path,
    *,
    device: str = "cpu",
    ways: int = 8,
    optimizer: str = "adamw",
    cpu: CpuShare | None = None,
    again: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> MeasuringRun:
    """Measure what a file lacks of a program's local ops.

    Args:
        program: captured at the global batch it is planned for.
        path: the file; made where it does not exist.
        device: where.
        ways: devices of the largest mesh.
        optimizer: whose update is measured.
        cpu: what a step has of it; one thread of one process if left out.
        again: also what it has, and keep both by their samples: a machine that others use is quicker and slower for
            seconds on end, which a median over hundredths of one does not see.
        tell: told what is measured.
    Raises:
        ProfileError: the file is none, or locked.
        ConstraintError: there is no such device.
    """
    cpu = cpu or CpuShare()
    machine = this_machine(device, cpu.threads, cpu.processes)
    kind = kind_of(device)
    done = MeasuringRun()
    beside = companions(machine.processes - 1, cpu.threads)
    with ProfileWriter(path, machine) as writer, _threads(cpu.threads), beside as others:
        meter = Meter(device, others, crowding(machine.processes))
        book = Book(writer, {op.full_key: op for op in writer.profile().ops}, again)
        for op in _always(optimizer, meter, book):
            book.enter(op)
            done.measured += 1
        parts = families(program, _cluster(machine), OPTIMIZERS[optimizer], ways)
        covered = frozenset() if again else writer.covered()
        for number, family in enumerate(parts):
            if family.name in covered:
                continue
            ops = (*family.make(), *(moves() if not family.name else ()))
            before = dict(done.failed)
            tell(f"op {number + 1} of {len(parts)}, {done.measured} shapes measured: {ops[0].target if ops else ''}")
            for op in ops:
                for way in op.ways(*kind):
                    _measure(way, meter, book, done)
            if family.name and done.failed == before:
                writer.cover(family.name)
        done.profile = writer.profile()
    times = MeasuredTimes(done.profile, _cluster(machine).groups[0].device)
    done.errors = times.cross_validate()
    return done


def _measure(op: LocalOp, meter: Meter, book: Book, done: MeasuringRun) -> None:
    if not book.lacks(op.full_key):
        done.known += 1
        return
    if op.name in done.failed:
        return
    try:
        found = meter.op(op)
    except FAULTS as fault:
        done.failed[op.name] = f"{type(fault).__name__}: {fault}"
        return
    book.enter(found)
    done.measured += 1


def _always(optimizer: str, meter: Meter, book: Book) -> Iterator[OpTime]:
    """What any model needs: the time of a view, the optimizer's updates."""
    if book.lacks_all(VIEW):
        yield meter.stretched(measure_view(meter.device))
    cls, options = OPTIMIZER_CLASSES[optimizer]
    if book.lacks_all(UPDATE + OPTIMIZERS[optimizer].timed_as):
        for count in UPDATED:
            yield meter.update(optimizer, cls, options, (count,))


def _cluster(machine: Machine) -> ClusterSpec:
    """One device like this machine's, for the analytic model that interpolation leans on."""
    local = ClusterSpec.local(1)
    if machine.device == "cpu":
        return local
    device = msgspec.structs.replace(catalog_device("H100"), kind=machine.device)
    if catalog_name(machine.name) is not None:
        device = catalog_device(machine.device)
    return msgspec.structs.replace(local, groups=(msgspec.structs.replace(local.groups[0], device=device),))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def json_of(done: MeasuringRun) -> dict[str, Any]:
    """The JSON object of `--json`."""
    assert done.profile is not None
    return {
        "measured": done.measured,
        "known": done.known,
        "failed": done.failed,
        "ops": len(done.profile.ops),
        "device": done.profile.device,
        "name": done.profile.name,
        "torch": done.profile.torch,
        "interpolation": {
            kind: {"points": e.points, "median_error": e.median, "ninth_decile_error": e.ninth_decile}
            for kind, e in done.errors.items()
        },
    }
