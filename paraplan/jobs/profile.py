"""Measuring a model's local ops on a device, into a profile file: what is there is not measured again.

A model is captured from meta at its global batch, and every local op a planner may ask for (`local_ops`) is measured
once per machine, torch version and number of threads. What was measured is kept whenever this ends; going on means
starting it again. A model of the same sizes finds everything there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import torch

from paraplan.cost_models.catalog import catalog_device
from paraplan.cost_models.measured import Errors, MeasuredTimes
from paraplan.cost_models.profile_file import Machine, ProfileWriter
from paraplan.ir.cluster import ClusterSpec
from paraplan.ir.errors import ConstraintError
from paraplan.ir.plan import OPTIMIZERS
from paraplan.ir.profile import OpTime, Profile
from paraplan.ir.program import Program
from paraplan.jobs.detect import catalog_name
from paraplan.jobs.files import cpu_name
from paraplan.jobs.local_ops import LocalOp, families, moves
from paraplan.jobs.measure_ops import measure_op, measure_update, measure_view
from paraplan.jobs.optimizers import OPTIMIZER_CLASSES

UPDATED = tuple(1 << power for power in range(6, 23, 2))
"""Elements of the parameters whose update is measured: 256 B to 16 MiB of float32."""


@dataclass
class Measuring:
    """What a run of measuring did.

    Attributes:
        measured, known: local ops measured now, and found in the file.
        failed: target -> why, of ops that could not be run on random inputs.
        profile: all the file has of this machine.
        errors: of interpolation, by cross-validation, per class of op.
    """

    measured: int = 0
    known: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    profile: Profile | None = None
    errors: dict[str, Errors] = field(default_factory=dict)


def this_machine(device: str, threads: int = 1) -> Machine:
    """What times taken here are known by.

    Args:
        device: "cpu", or "cuda" with or without a number.
        threads: of a CPU process.
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
    return Profile(device="cpu", name=cpu_name(), torch=metadata.version("torch"), threads=threads)


def profile_program(
    program: Program, path: Path, *, device: str = "cpu", ways: int = 8, optimizer: str = "adamw", threads: int = 1,
    tell: Callable[[str], None] = lambda text: None,
) -> Measuring:  # fmt: skip
    """Measure what a file lacks of a program's local ops.

    Args:
        program: captured at the global batch it is planned for.
        path: the file; made where it does not exist.
        device: where.
        ways: devices of the largest mesh.
        optimizer: whose update is measured.
        threads: of a CPU process.
        tell: told what is measured.
    Raises:
        ProfileError: the file is none, or locked.
        ConstraintError: there is no such device.
    """
    machine = this_machine(device, threads)
    done = Measuring()
    with ProfileWriter(path, machine) as writer, _threads(threads):
        have = {op.full_key for op in writer.profile().ops}
        for op in _always(optimizer, device, have):
            writer.add(op)
            done.measured += 1
        parts = families(program, _cluster(machine), OPTIMIZERS[optimizer], ways)
        covered = writer.covered()
        for number, family in enumerate(parts):
            if family.name in covered:
                continue
            ops = (*family.make(), *(moves() if not family.name else ()))
            before = dict(done.failed)
            tell(f"op {number + 1} of {len(parts)}, {done.measured} shapes measured: {ops[0].target if ops else ''}")
            for op in ops:
                _measure(op, device, have, writer, done)
            if family.name and done.failed == before:
                writer.cover(family.name)
        done.profile = writer.profile()
    times = MeasuredTimes(done.profile, _cluster(machine).groups[0].device)
    done.errors = times.cross_validate()
    return done


def _measure(op: LocalOp, device: str, have: set[str], writer: ProfileWriter, done: Measuring) -> None:
    key = op.full_key
    if key in have:
        done.known += 1
        return
    if op.target in done.failed:
        return
    try:
        found = measure_op(op, device)
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as fault:
        done.failed[op.target] = f"{type(fault).__name__}: {fault}"
        return
    writer.add(found)
    have.add(key)
    done.measured += 1


def _always(optimizer: str, device: str, have: set[str]) -> Iterator[OpTime]:
    """What any model needs: the time of a view, the optimizer's updates."""
    if not any(key.startswith("view;") for key in have):
        yield measure_view(device)
    cls, options = OPTIMIZER_CLASSES[optimizer]
    if not any(key.startswith(f"update.{optimizer};") for key in have):
        for count in UPDATED:
            yield measure_update(optimizer, cls, options, (count,), device)


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


def json_of(done: Measuring) -> dict[str, Any]:
    """The JSON object of `--json`."""
    assert done.profile is not None
    return {
        "measured": done.measured, "known": done.known, "failed": done.failed, "ops": len(done.profile.ops),
        "device": done.profile.device, "name": done.profile.name, "torch": done.profile.torch,
        "interpolation": {
            kind: {"points": e.points, "median_error": e.median, "ninth_decile_error": e.ninth_decile}
            for kind, e in done.errors.items()
        },
    }  # fmt: skip
