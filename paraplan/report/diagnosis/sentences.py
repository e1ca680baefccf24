"""What is found out in sentences: every number is a record's. The terminal and the HTML say the same."""

from __future__ import annotations

from collections.abc import Sequence

from paraplan.report.breakdown import UPDATE_WORK
from paraplan.report.diagnosis.records import (
    AS_FAST,
    COMPUTE,
    CONTRADICTS,
    FASTER,
    ISSUING,
    NOT_FOUND,
    PART_WORDS,
    TOO_LARGE,
    Breakdown,
    Diagnosis,
    MemoryUse,
    MoreMemory,
    Over,
    SavedMemory,
    StepPart,
    WhyNot,
)
from paraplan.report.units import show_bytes, show_seconds, show_share

SIMULATED = "The same plan where something is 10 % faster (simulated, nothing is planned anew)"
BETTER = 0.005
"""By what share a plan has to be faster for a user to be sent for it."""
_CLASSES, _COLLECTIVES = 4, 2


def binding_words(told: Diagnosis) -> str:
    """What the step consists of most, and on which ranks."""
    binding, first = told.binding, told.binding.parts[0]
    where = f"{binding.ranks}{f', {binding.where}' if binding.where else ''}"
    which = f"{where}, which wait least for others" if told.positions else where
    return (
        f"{PART_WORDS[first.key]}: {show_seconds(first.seconds)} of {show_seconds(binding.step_s)} "
        f"({show_share(first.seconds, binding.step_s)}) on {which}"
    )


def part_words(told: Breakdown, part: StepPart) -> str:
    """What a part consists of most: classes of ops, or what was waited for and which collectives there are."""
    if part.key == COMPUTE:
        rows = [row for row in told.work if row.name != UPDATE_WORK]
        return ", ".join(f"{row.name} {show_seconds(row.seconds)}" for row in rows[:_CLASSES])
    if part.key == ISSUING:
        return "kernels shorter than it takes to issue them; steps replayed as CUDA graphs (cuda_graphs=True) have none"
    if not part.taken_s and not part.busy_s:
        return ""
    waited = f"waited {show_seconds(part.seconds - part.taken_s)}, compute taken {show_seconds(part.taken_s)}"
    issued = [row for row in told.collectives if row.link == part.key]
    most = ", ".join(
        f"{row.name} over {row.axis} ({row.purpose}) {show_seconds(row.seconds)}" for row in issued[:_COLLECTIVES]
    )
    return "; ".join(filter(None, (waited if part.taken_s else "", most)))


def memory_words(use: MemoryUse) -> str:
    """The fullest device against what it may hold."""
    left = use.budget_bytes - use.needed_bytes
    room = f"{show_bytes(left)} are free" if left >= 0 else f"{show_bytes(-left)} too much"
    reserved = f", for which {show_bytes(use.reserved_bytes)} are reserved," if use.reserved_bytes else ""
    return (
        f"fullest: {use.ranks}, {show_bytes(use.peak_bytes)} alive at the peak{reserved} of "
        f"{show_bytes(use.budget_bytes)} that a plan may hold there ({show_bytes(use.memory_bytes)} in all); {room}"
    )


def saving_words(saving: Sequence[SavedMemory]) -> tuple[str, ...]:
    """Each thing that is done to hold less, what it costs, and whether memory asks for it."""
    if not saving:
        return ("nothing is recomputed, run in chunks or kept off the device",)
    return tuple(_saved_words(each) for each in saving)


def _saved_words(each: SavedMemory) -> str:
    costs = f"costs {show_seconds(each.costs_s)} a step" if each.costs_s > 0 else "costs nothing"
    without = f"without it the peak would be {show_bytes(each.peak_bytes)}"
    if each.pinned:
        over = f", {show_bytes(each.over_bytes)} too much" if each.over_bytes else ", which fits"
        return f"{each.what} was asked for and {costs}; {without}{over}"
    if each.forced:
        return f"memory forces {each.what}, which {costs}: {without}, {show_bytes(each.over_bytes)} too much"
    return f"{each.what} {costs}; {without}, which would fit as alive"


def more_memory_title(more: MoreMemory) -> str:
    """How much of what, and that it is a search."""
    return f"{show_bytes(more.extra_bytes)} more memory on every device (planned anew)"


def more_memory_words(told: Diagnosis, more: MoreMemory) -> tuple[str, ...]:
    """What the family gains, or that it gains nothing; and where it was planned badly, that."""
    family = f"family: {more.family} (a free search may gain more)" if more.family else "family: everything"
    if more.step_s is None:
        return (f"nothing was found: {more.said}", family)
    anew = (
        (
            f"planned anew as it is, the family takes {show_seconds(more.again_s)}, "
            f"{show_seconds(told.step_s - more.again_s)} less than this plan: plan again, with a longer --time-limit",
        )
        if more.again_s is not None and more.again_s < (1 - BETTER) * told.step_s
        else ()
    )
    if not more.saved_s:
        return (f"saves nothing: no faster plan was found with it ({show_seconds(more.step_s)})", *anew, family)
    what = f": {', '.join(more.changed)}" if more.changed else ""
    again = "" if more.again_s is None else f" (planned anew without it, {show_seconds(more.again_s)})"
    return (f"saves {show_seconds(more.saved_s)}: a step of {show_seconds(more.step_s)}{again}{what}", *anew, family)


def verdict_words(told: Diagnosis, other: WhyNot) -> tuple[str, ...]:
    """What became of the pins, and what else was pinned."""
    beside = [
        *([f"still pinned, as for this plan: {other.kept}"] if other.kept else []),
        *([f"no longer pinned, as for this plan: {other.dropped}"] if other.dropped else []),
    ]
    if other.verdict == CONTRADICTS:
        return (f"it is a contradiction: {other.said}", *beside)
    if other.verdict in (TOO_LARGE, NOT_FOUND):
        return (f"{'it does not fit' if other.over else 'no plan was found'}: {other.said}", *beside)
    assert other.step_s is not None
    step_s, longer = told.step_s, abs(other.step_s - told.step_s)
    how = "as fast" if other.verdict == AS_FAST else f"{show_seconds(longer)} {other.verdict} a step"
    share = "" if other.verdict == AS_FAST else f" ({100 * (other.step_s / step_s - 1):+.1f} %)"
    better = other.verdict == FASTER and longer > BETTER * step_s
    advice = ("plan it with these options of paraplan plan: a search ends with its time",) if better else ()
    return (f"it is {how}{share}, planned anew: {other.plan}", *advice, *beside)


def over_words(over: Over) -> str:
    """By how much a plan that was made all the same is too large."""
    return f"{over.how} it needs {show_bytes(over.peak_bytes)}, {show_bytes(over.over_bytes)} too much:"
