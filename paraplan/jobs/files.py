"""Plan and profile files: read strictly, refused with a reason, verified as a whole. Data only; no torch."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from paraplan.cost_models.predict import predict, with_reserved
from paraplan.cost_models.profiles.profile_file import choose_profile, read_profiles
from paraplan.cost_models.realised_plan import Realised, realised
from paraplan.ir.errors import InvalidPlanError, PlanMismatchError
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.digests import plan_digest, program_digest
from paraplan.ir.plan import PLAN_VERSION, Plan
from paraplan.ir.profile import Profile
from paraplan.ir.struct import from_json, read_bytes, to_json, write_bytes
from paraplan.lowering import lower
from paraplan.lowering.verification.verify_plan import check_plan


class _Head(msgspec.Struct):
    """What is read first, whatever else the file holds."""

    version: int
    made_with: dict[str, str] = {}


class _Filed(Plan, frozen=True, kw_only=True):
    """A plan as its file has it. The digests find what was changed by accident; they are no signatures."""

    program_digest: str
    plan_digest: str = ""


EDITED = "the file is not as a planner wrote it: priced anew as it is, and nothing is proved of it"
"""Note of a plan whose prediction and certificate may be of other decisions."""


class Programs(NamedTuple):
    """How plans are lowered and simulated, to know that they can be."""

    lowered: Callable[[Plan], tuple[RankProgram, ...]] = lower
    realised: Callable[[Plan], Realised] = realised


def read_with_programs(path: str | Path) -> tuple[Plan, tuple[RankProgram, ...]]:
    """As `read_plan`, with its rank programs."""
    plan = read_plan(path)
    return plan, lower(plan)


def read_plan(path: str | Path, by: Programs | None = None) -> Plan:
    """A plan from a file, legal and such as lowers.

    Args:
        path: of the file.
        by: how it is lowered and simulated.
    Raises:
        InvalidPlanError: unreadable, truncated, no plan, an unknown key, a wrong type, or not legal.
        PlanMismatchError: the plan was made by a newer paraplan.
    """
    data = read_bytes(path, "plan file", InvalidPlanError)
    return decode_plan(data, str(path), by)


def decode_plan(data: bytes, what: str, by: Programs | None = None) -> Plan:
    """As `read_plan`, from bytes.

    Args:
        data: the file's bytes.
        what: they are, for messages.
        by: how the plan is lowered and simulated.
    """
    try:
        head = msgspec.json.decode(data, type=_Head)
    except msgspec.ValidationError as fault:
        raise InvalidPlanError(f"{what} is no plan file: {fault}") from None
    except (msgspec.DecodeError, RecursionError) as fault:
        raise InvalidPlanError(f"{what} is truncated or no JSON: {fault}") from None
    if head.version < PLAN_VERSION:
        made = head.made_with.get("paraplan", "an older paraplan")
        raise PlanMismatchError(
            f"{what}: plan version {head.version}, made by paraplan {made}; this one reads version {PLAN_VERSION}, "
            "whose plans say which Python values and code their program was captured of. Plan again with this version"
        )
    if head.version > PLAN_VERSION:
        made = head.made_with.get("paraplan", "a newer paraplan")
        raise PlanMismatchError(
            f"{what}: plan version {head.version}, made by a newer paraplan ({made}); "
            f"this one reads version {PLAN_VERSION}. "
            "Upgrade paraplan, or plan again with this version"
        )
    filed = from_json(data, _Filed, what, InvalidPlanError)
    plan = Plan(**{name: getattr(filed, name) for name in Plan.__struct_fields__})
    by = by or Programs()
    try:
        check_plan(plan)
        by.lowered(plan)
    except InvalidPlanError as fault:
        raise InvalidPlanError(f"{what}: {fault}") from None
    except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError, AssertionError) as fault:
        raise InvalidPlanError(
            f"{what}: it does not lower to programs of its ranks ({type(fault).__name__}: {fault}): the file was "
            "edited or damaged. Take the file as it was saved, or plan again"
        ) from fault
    if program_digest(plan.program) != filed.program_digest:
        raise InvalidPlanError(
            f"{what}: its program is not the one that was saved (program_digest differs): the file was edited or "
            "damaged. Take the file as it was saved, or plan again"
        )
    if (plan.prediction or plan.certificate) is not None and plan_digest(plan) != filed.plan_digest:
        plan = _priced_anew(plan, by.realised)
    return plan


def _priced_anew(plan: Plan, made_by: Callable[[Plan], Realised]) -> Plan:
    """A plan without what is foretold and proved of another."""
    bare = msgspec.structs.replace(plan, prediction=None, certificate=None)
    notes = (*(note for note in plan.notes if note != EDITED), EDITED)
    made = made_by(bare)
    priced = msgspec.structs.replace(bare, prediction=predict(bare, made.programs, made.simulation), notes=notes)
    return with_reserved(priced, made.programs)


def encode_plan(plan: Plan) -> bytes:
    """A plan as the bytes of its file: canonical JSON with digests of its program and of all else."""
    fields = {name: getattr(plan, name) for name in Plan.__struct_fields__}
    return to_json(_Filed(**fields, program_digest=program_digest(plan.program), plan_digest=plan_digest(plan)))


def write_plan(plan: Plan, path: str | Path) -> None:
    """Canonical bytes: equal plans make equal files. What was there before is replaced by the whole.

    Raises:
        InvalidPlanError: the file cannot be written.
    """
    write_bytes(path, encode_plan(plan), "plan file", InvalidPlanError)


def profile_for(path: str | Path, cluster: ClusterSpec, torch: str, any_machine: bool = False) -> tuple[Profile, str]:
    """The times in a profile file that fit a cluster's device, and what a plan should say of them.

    Args:
        path: of the file.
        cluster: its first device counts; processes of this machine's processor are told apart by its name.
        torch: version the plan is made for.
        any_machine: take the nearest machine's where none fits.
    Raises:
        ProfileError: see `read_profiles` and `choose_profile`.
    """
    device = cluster.groups[0].device
    name = cpu_name() if device.backend == "cpu" else None
    processes = max(group.devices_per_node for group in cluster.groups) if device.backend == "cpu" else 1
    return choose_profile(read_profiles(path), device.kind, name, torch, any_machine, processes)


def cpu_name() -> str:
    """What the kernel calls this machine's processor."""
    try:
        found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()
