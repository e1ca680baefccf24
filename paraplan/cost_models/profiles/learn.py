"""What a recorded run teaches a profile.

An op that the profile lacks is added. One it has and that the run saw take as long, within both spreads, is pooled: the
mean weighted by samples, the wider of the spreads. Where they disagree the run is believed, for it saw the op among its
neighbours, with its caches and its inputs, and the spread becomes the distance to what was known where that is larger;
so a second run that falls between pools with the first. Nothing else of the profile changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from paraplan.ir.errors import ProfileError
from paraplan.ir.profile import OpTime, Profile, RunTimes

LEAST_SPREAD = 0.05
"""Times that differ by less agree, however quiet the machine was."""


@dataclass(frozen=True)
class Learned:
    """What is to be kept.

    Attributes:
        ops: to be written.
        new, pooled, corrected: how many of them were unknown, agreed, and did not.
    """

    ops: tuple[OpTime, ...]
    new: int
    pooled: int
    corrected: int


def learn(known: Profile, run: RunTimes) -> Learned:
    """What a run says about a profile's ops.

    Raises:
        ProfileError: they are of different devices, machines, torch versions, or numbers of threads or processes.
    """
    seen = run.seen
    if known.machine != seen.machine:
        raise ProfileError(
            f"the run was on {seen.machine}, the profile is of {known.machine}: learn from runs of one machine"
        )
    have = {op.full_key: op for op in known.ops}
    ops, counts = [], {"new": 0, "pooled": 0, "corrected": 0}
    for op in seen.ops:
        found, how = merged(have.get(op.full_key), op)
        ops.append(found)
        counts[how] += 1
    return Learned(tuple(ops), **counts)


def merged(known: OpTime | None, seen: OpTime) -> tuple[OpTime, str]:
    """An op's time after a run, and whether it is "new", "pooled" or "corrected"."""
    if known is None or not known.samples:
        return seen, "new"
    distance = abs(known.seconds - seen.seconds) / max(seen.seconds, 1e-12)
    workspace = max(known.workspace_bytes, seen.workspace_bytes)
    if distance > max(LEAST_SPREAD, known.spread, seen.spread):
        return msgspec.structs.replace(seen, spread=max(seen.spread, distance), workspace_bytes=workspace), "corrected"
    return pooled(known, seen), "pooled"


def pooled(known: OpTime, seen: OpTime) -> OpTime:
    """An op's time from two measurements of it, by their samples; how far they lie apart is spread as well."""
    samples = known.samples + seen.samples
    seconds = (known.samples * known.seconds + seen.samples * seen.seconds) / max(samples, 1)
    apart = abs(known.seconds - seen.seconds) / max(seconds, 1e-12)
    return msgspec.structs.replace(
        known,
        seconds=seconds,
        spread=max(known.spread, seen.spread, apart),
        samples=samples,
        workspace_bytes=max(known.workspace_bytes, seen.workspace_bytes),
    )
