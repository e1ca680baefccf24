"""What a search tried, as a plan keeps it: few records, the fastest first, what gave nothing last."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from paraplan.ir.plan import MOST_TRIED, Plan, Tried
from paraplan.ir.plan_words import plan_words

_MOST_SAID = 200
_OVER = "what allocators reserve for it is over the budget"
_UNSEEN = "fits by the bytes alive; what allocators reserve for it was not looked at"


def planned(what: str, plan: Plan, estimated_s: float | None = None, pins: dict[str, Any] | None = None) -> Tried:
    """A plan that was made.

    Args:
        what: of it, in words.
        plan: priced.
        estimated_s: what its step was estimated at before.
        pins: what was pinned for it.
    """
    assert plan.prediction is not None
    peak = max(plan.prediction.peak_bytes)
    step_s = plan.prediction.step_s
    return Tried(what=what, step_s=step_s, peak_bytes=peak, estimated_s=estimated_s, pins=pins or {})


def in_vain(what: str, fault: object, estimated_s: float | None = None) -> Tried:
    """What no plan was found of, and why, cut short.

    Args:
        what: was planned, in words.
        fault: why there is no plan.
        estimated_s: what its step was estimated at; None where it was not.
    """
    said = str(fault)
    return Tried(
        what=what, estimated_s=estimated_s, why=said if len(said) <= _MOST_SAID else f"{said[: _MOST_SAID - 3]}..."
    )


def slower(what: str, least_s: float, estimated_s: float | None = None) -> Tried:
    """A pipeline that was left once its first microbatches said that it takes longer than the best plan.

    Args:
        what: was planned, in words.
        least_s: about what its step takes.
        estimated_s: what its step was estimated at; None where it was not.
    """
    return Tried(what=what, estimated_s=estimated_s, why=f"left at about {least_s:.4g} s")


def unreserved(first: Plan, step_s: float) -> tuple[Tried, ...]:
    """What a search by the bytes alive tried, for whose plan allocators have no room.

    Args:
        first: its plan.
        step_s: of the plan that is taken.
    """
    assert first.prediction is not None
    least_s = first.prediction.step_s
    found = first.tried or (planned(plan_words(first), first),)
    return tuple(
        msgspec.structs.replace(each, why=_OVER if each.step_s <= least_s else _UNSEEN)
        if each.step_s is not None and each.step_s < step_s
        else each
        for each in found
    )


def kept(tried: Iterable[Tried]) -> tuple[Tried, ...]:
    """The records that a plan keeps: of what has one name the last, the fastest first; nothing where all are one."""
    named = list({each.what: each for each in tried}.values())
    if len(named) < 2:
        return ()
    fast = sorted((each for each in named if each.step_s is not None), key=lambda each: each.step_s or 0.0)
    return (*fast, *(each for each in named if each.step_s is None))[:MOST_TRIED]
