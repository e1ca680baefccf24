"""Profile files: SQLite, read with suspicion, written a measurement at a time.

A file holds times of any number of machines, an op's keyed by machine, target, flag, tensors (dtype, shape, strides
where they are not row-major) and detail. It is data from anywhere: its tables must be word for word those below,
nothing else may be in it (a view or a trigger would run), rows are decoded strictly and every number is checked.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any
from urllib.parse import quote

import msgspec

from paraplan.ir.errors import ProfileError
from paraplan.ir.profile import PROFILE_VERSION, CollectiveTime, Measured, OpTime, Profile, check_profile

_TABLES = {
    "machine": (
        "CREATE TABLE machine (id INTEGER PRIMARY KEY, device TEXT, name TEXT, torch TEXT, threads INTEGER, "
        "processes INTEGER, compiled TEXT, UNIQUE (device, name, torch, threads, processes, compiled))"
    ),
    "op": (
        "CREATE TABLE op (machine INTEGER, target TEXT, flag INTEGER, inputs TEXT, outputs TEXT, detail TEXT, "
        "seconds REAL, spread REAL, samples INTEGER, workspace_bytes INTEGER, "
        "PRIMARY KEY (machine, target, flag, inputs, outputs, detail))"
    ),
    "collective": (
        "CREATE TABLE collective (machine INTEGER, target TEXT, size INTEGER, local_size INTEGER, "
        "input_bytes INTEGER, seconds REAL, spread REAL, samples INTEGER, called_s REAL, "
        "PRIMARY KEY (machine, target, size, local_size, input_bytes))"
    ),
    "covered": "CREATE TABLE covered (machine INTEGER, what TEXT, PRIMARY KEY (machine, what))",
}
_LOCK_WAIT_S = 2.0
_COMMIT_EVERY_S = 1.0
_MOST_ROWS = 2_000_000

Machine = Profile
"""A profile without times: what a machine is known by."""


class ProfileWriter:
    """A profile file open for writing about one machine; made where it does not exist.

    What was added is on disk a second later, and when the writer is closed, whatever closes it.

    Raises:
        ProfileError: no profile file, locked, or not writable.
    """

    def __init__(self, path: str | Path, machine: Machine) -> None:
        self.path = Path(path)
        with _faults(self.path):
            self._db = sqlite3.connect(self.path, timeout=_LOCK_WAIT_S)
            try:
                self._machine = self._enter(machine)
            except BaseException:
                self._db.close()
                raise
        self._committed = time.monotonic()

    def _enter(self, machine: Machine) -> int:
        self._db.execute("PRAGMA trusted_schema = OFF")
        if not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            for statement in _TABLES.values():
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {PROFILE_VERSION}")
        _check_schema(self._db, self.path)
        columns = ("device", "name", "torch", "threads", "processes", "compiled")
        self._db.execute(
            f"INSERT OR IGNORE INTO machine ({', '.join(columns)}) VALUES (?, ?, ?, ?, ?, ?)", machine.machine
        )
        self._db.commit()
        where = " AND ".join(f"{column} = ?" for column in columns)
        return int(self._db.execute(f"SELECT id FROM machine WHERE {where}", machine.machine).fetchone()[0])

    def profile(self) -> Profile:
        """What the file holds of this machine."""
        with _faults(self.path):
            return next(found for number, found in _profiles(self._db, self.path) if number == self._machine)

    def add(self, found: OpTime | CollectiveTime) -> None:
        """Keep a measurement; one of the same key is replaced."""
        with _faults(self.path):
            if isinstance(found, OpTime):
                row: tuple[Any, ...] = (
                    found.target,
                    found.flag,
                    _text(found.inputs),
                    _text(found.outputs),
                    found.detail,
                    found.seconds,
                    found.spread,
                    found.samples,
                    found.workspace_bytes,
                )
                self._db.execute(
                    "INSERT OR REPLACE INTO op VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (self._machine, *row)
                )
            else:
                row = (
                    found.target,
                    found.size,
                    found.local_size,
                    found.input_bytes,
                    found.seconds,
                    found.spread,
                    found.samples,
                    found.called_s,
                )
                self._db.execute(
                    "INSERT OR REPLACE INTO collective VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (self._machine, *row)
                )
            if time.monotonic() - self._committed > _COMMIT_EVERY_S:
                self._db.commit()
                self._committed = time.monotonic()

    def covered(self) -> frozenset[str]:
        """What was measured as a whole on this machine, as `cover` was told."""
        with _faults(self.path):
            rows = self._db.execute("SELECT what FROM covered WHERE machine = ?", (self._machine,)).fetchall()
            return frozenset(str(what) for (what,) in rows)

    def cover(self, what: str) -> None:
        """Note that all of something was measured."""
        with _faults(self.path):
            self._db.execute("INSERT OR IGNORE INTO covered VALUES (?, ?)", (self._machine, what))

    def __enter__(self) -> ProfileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _faults(self.path):
            try:
                self._db.commit()
            finally:
                self._db.close()


def read_profiles(path: str | Path) -> tuple[Profile, ...]:
    """Every machine's times in a file.

    Raises:
        ProfileError: unreadable, corrupt, locked, another schema or version, or a row that is no measurement.
    """
    path = Path(path)
    if not path.is_file():
        raise ProfileError(f"no profile file {str(path)!r}; paraplan profile MODEL -o {path} makes one")
    with _faults(path):
        database = sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True, timeout=_LOCK_WAIT_S)
        try:
            database.execute("PRAGMA trusted_schema = OFF")
            _check_schema(database, path)
            return tuple(check_profile(found, str(path)) for _, found in _profiles(database, path))
        finally:
            database.close()


def choose_profile(
    profiles: tuple[Profile, ...],
    device: str,
    name: str | None,
    torch: str,
    any_machine: bool = False,
    processes: int = 1,
) -> tuple[Profile, str]:
    """The profile for a device, and what a plan should say where it is another one's.

    Args:
        profiles: of a file.
        device: kind of the cluster's device.
        name: of this machine's processor, where the cluster is made of its processes; None: any of the kind.
        torch: version the plan is made for.
        any_machine: take the nearest (device, then torch version, then most ops) where none fits.
        processes: of the cluster that share a machine's memory; times of another number are taken with a word of it.
    Raises:
        ProfileError: none fits; says what there is.
    """

    def rank(found: Profile) -> tuple[bool, bool, bool, bool, bool, bool, int]:
        same_name, same_number = name is None or found.name == name, found.processes == processes
        fits = (found.device == device, same_name, found.torch == torch)
        return (*fits, bool(found.ops), not found.compiled, same_number, len(found.ops))

    best = max(profiles, key=rank, default=None)
    if best is None:
        raise ProfileError("the profile holds no machine's times; paraplan profile MODEL -o FILE measures some")
    fits = rank(best)[:3]
    if not all(fits) and not any_machine:
        there = "; ".join(f"{each.device} ({each.name}), torch {each.torch}, {len(each.ops)} ops" for each in profiles)
        raise ProfileError(
            f"{best.source or 'the profile'} has no times of {device}{f' ({name})' if name else ''} with torch "
            f"{torch}; it has {there}. Measure there (paraplan profile), or take these as they are with --profile-any"
        )
    said = f"{best.device} ({best.name}), torch {best.torch}"
    warning = "" if all(fits) else f"times are those of another machine or version: {said}"
    if best.processes != processes:
        warning += f"{'; ' if warning else ''}times were taken with {best.processes} at work at once on a machine, "
        warning += f"this plan has {processes}: paraplan profile --processes {processes} takes them so"
    alike = sorted((each for each in profiles if rank(each)[:3] == fits), key=rank, reverse=True)
    collectives = best.collectives or max((each.collectives for each in alike), key=len)
    same = (best.device, best.name, best.torch, best.compiled)
    others = [each for each in alike if (each.device, each.name, each.torch, each.compiled) == same]
    ops = _filled(best, [each for each in others if each is not best])
    return msgspec.structs.replace(best, device=device, ops=ops, collectives=collectives), warning


def _filled(best: Profile, others: Sequence[Profile]) -> tuple[OpTime, ...]:
    """A profile's ops, and those that it lacks and other numbers of processes or threads of the machine have.

    What is filled in is scaled by the median of how the ops that both have compare, so that little measured among many
    processes does not outweigh all that was measured of one.
    """
    found = {op.full_key: op for op in best.ops}
    for other in others:
        both = [(found[op.full_key], op) for op in other.ops if op.full_key in found and op.seconds > 0]
        scale = median([have.seconds / op.seconds for have, op in both] or [1.0])
        for op in other.ops:
            found.setdefault(op.full_key, msgspec.structs.replace(op, seconds=scale * op.seconds))
    return tuple(found[key] for key in sorted(found)) if others else best.ops


def _check_schema(database: sqlite3.Connection, path: Path) -> None:
    rows = database.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    version = int(database.execute("PRAGMA user_version").fetchone()[0])
    if version > PROFILE_VERSION:
        raise ProfileError(
            f"{path}: profile version {version}; this paraplan reads up to {PROFILE_VERSION}. Upgrade it, or measure "
            "anew"
        )
    if rows and 0 < version < PROFILE_VERSION:
        raise ProfileError(
            f"{path}: profile version {version}, of an earlier paraplan, which did not note how many processes worked "
            "at once; measure anew into another file"
        )
    tables = {name: sql for kind, name, sql in rows if kind == "table"}
    others = [name for kind, name, sql in rows if kind != "table" and not (kind == "index" and sql is None)]
    if tables != _TABLES or others or version != PROFILE_VERSION:
        odd = [name for name in {**_TABLES, **tables} if tables.get(name) != _TABLES.get(name)] + others
        raise ProfileError(f"{path} is no profile file: {', '.join(odd) or 'its version'} is not as a profile has it")


def _profiles(database: sqlite3.Connection, path: Path) -> Iterator[tuple[int, Profile]]:
    for number, device, name, torch, threads, processes, compiled in database.execute(
        "SELECT * FROM machine ORDER BY id"
    ).fetchall():
        ops = database.execute(
            "SELECT target, flag, inputs, outputs, detail, seconds, spread, samples, workspace_bytes FROM op "
            "WHERE machine = ? ORDER BY target, flag, inputs, outputs, detail",
            (number,),
        ).fetchmany(_MOST_ROWS)
        collectives = database.execute(
            "SELECT target, size, local_size, input_bytes, seconds, spread, samples, called_s FROM collective "
            "WHERE machine = ? ORDER BY target, size, local_size, input_bytes",
            (number,),
        ).fetchmany(_MOST_ROWS)
        given = {
            "device": device,
            "name": name,
            "torch": torch,
            "threads": threads,
            "processes": processes,
            "compiled": compiled,
            "source": str(path.name),
            "ops": tuple(_op_row(row) for row in ops),
            "collectives": tuple(dict(zip(CollectiveTime.__struct_fields__, row, strict=True)) for row in collectives),
        }
        yield number, msgspec.convert(given, Profile)


def _op_row(row: tuple[Any, ...]) -> dict[str, Any]:
    fields = dict(zip(OpTime.__struct_fields__, row, strict=True))
    fields["inputs"] = _INPUTS.decode(fields["inputs"])
    fields["outputs"] = _OUTPUTS.decode(fields["outputs"])
    return fields


_INPUTS = msgspec.json.Decoder(tuple[Measured, ...])
_OUTPUTS = msgspec.json.Decoder(tuple[Measured | None, ...])


def _text(tensors: tuple[Measured | None, ...]) -> str:
    return msgspec.json.encode(tensors).decode()


@contextmanager
def _faults(path: Path) -> Iterator[None]:
    """SQLite's and the decoder's faults as ours."""
    try:
        yield
    except sqlite3.OperationalError as fault:
        if "locked" in str(fault):
            raise ProfileError(
                f"profile file {str(path)!r} is locked: another process writes it; wait for it, or measure into "
                "another file"
            ) from None
        raise ProfileError(f"cannot use profile file {str(path)!r}: {fault}") from None
    except sqlite3.DatabaseError as fault:
        raise ProfileError(
            f"{str(path)!r} is no profile file, or a damaged one: {fault}; measure into another"
        ) from None
    except (msgspec.DecodeError, TypeError) as fault:
        raise ProfileError(f"profile file {str(path)!r} has a row that is no measurement: {fault}") from None
