"""Times of a run: every op of some steps by processor time, for `paraplan learn`.

Steps are taken instruction by instruction, on CPU processes of one thread (a GPU's kernels are not timed one by one,
and several threads have no processor time of their own to tell). Collectives are left to `profile-links`: in a run they
wait for whoever is last.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from paraplan.cost_models.costs import lowered_op
from paraplan.cost_models.profiles.learn import Learned, learn
from paraplan.cost_models.profiles.profile_file import ProfileWriter
from paraplan.ir.errors import ConstraintError, ProfileError
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.plan import Plan
from paraplan.ir.profile import OpTime, RunTimes, check_profile
from paraplan.ir.struct import to_json, write_bytes
from paraplan.jobs.measuring.profile_ops import this_machine

Samples = Mapping[tuple[str, int], list[float]]


def check_recordable(plan: Plan, compiled: bool) -> None:
    """Refuse what cannot be timed op by op.

    Raises:
        ConstraintError: the plan is for GPUs, or blocks are compiled.
    """
    if plan.cluster.backend != "cpu":
        raise ConstraintError("--record times the ops of CPU processes; on GPUs, paraplan profile measures them")
    if compiled:
        raise ConstraintError("--record times ops one by one, --compile fuses them: leave one out")


def ops_seen(program: RankProgram, samples: Samples) -> dict[str, tuple[OpTime, list[float]]]:
    """A rank's ops by full key, each with all its samples."""
    found: dict[str, tuple[OpTime, list[float]]] = {}
    for (name, index), seconds in samples.items():
        block = program.blocks[name]
        op = lowered_op(block, block.instrs[index])
        if op is not None:
            found.setdefault(op.full_key, (op, []))[1].extend(seconds)
    return found


def run_times(plan: Plan, ranks: Iterable[dict[str, tuple[OpTime, list[float]]]], step_s: Iterable[float]) -> RunTimes:
    """What a run took, from every rank's ops.

    Args:
        plan: that ran.
        ranks: of each, by full key the op and its seconds in every step.
        step_s: seconds of each step.
    """
    ops: dict[str, OpTime] = {}
    samples: dict[str, list[float]] = defaultdict(list)
    for rank in ranks:
        for key, (op, seconds) in rank.items():
            ops.setdefault(key, op)
            samples[key] += seconds
    seen = msgspec.structs.replace(
        this_machine("cpu", torch.get_num_threads(), _processes()),
        ops=tuple(_timed(ops[key], samples[key]) for key in sorted(ops)),
    )
    predicted = plan.prediction.step_s if plan.prediction else 0.0
    return RunTimes(predicted_s=predicted, step_s=tuple(step_s), seen=seen)


def _processes() -> int:
    """Ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size() if dist.is_initialized() else 1))


def _timed(op: OpTime, seconds: list[float]) -> OpTime:
    middle = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (middle, middle, middle)
    spread = (high - low) / middle if middle else 0.0
    return msgspec.structs.replace(op, seconds=middle, spread=spread, samples=len(seconds))


def write_run(path: Path, plan: Plan, program: RankProgram, samples: Samples, step_s: Iterable[float]) -> None:
    """Gather every rank's times and have the first write them (all must call).

    Args:
        path: of the file.
        plan, program: that ran, and this rank's program.
        samples: this rank's times.
        step_s: seconds of each step.
    """
    mine = ops_seen(program, samples)
    everyone: list[dict[str, tuple[OpTime, list[float]]] | None] = [mine]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        if dist.get_rank():
            return
    found = run_times(plan, [each for each in everyone if each is not None], step_s)
    write_bytes(path, to_json(found), "--record", ConstraintError)


def read_run(path: Path) -> RunTimes:
    """A recorded run.

    Raises:
        ProfileError: unreadable, of a newer version, or no recorded run.
    """
    made_by = "paraplan run --record FILE writes one"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=RunTimes)
    except OSError as fault:
        raise ProfileError(f"cannot read {str(path)!r}: {fault.strerror}; {made_by}") from None
    except msgspec.DecodeError as fault:
        raise ProfileError(f"{str(path)!r} is no recorded run: {fault}; {made_by}") from None
    if found.version != 2:
        raise ProfileError(f"{str(path)!r} is a recorded run of version {found.version}; this paraplan reads 2")
    if not found.step_s:
        raise ProfileError(f"{str(path)!r} has no step; {made_by}")
    check_profile(found.seen, str(path))
    return found


def learn_into(profile: Path, run: RunTimes) -> Learned:
    """Bring a run's times into a profile, made where it does not exist.

    Raises:
        ProfileError: the profile is none, or locked.
    """
    machine = msgspec.structs.replace(run.seen, ops=(), collectives=(), source="")
    with ProfileWriter(profile, machine) as writer:
        found = learn(writer.profile(), run)
        for op in found.ops:
            writer.add(op)
    return found
