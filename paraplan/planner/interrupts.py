"""What is found of a search that is interrupted (Ctrl-C): the fastest plan that it had until then.

An interrupt ends every search that is under way, so it passes through all of them as the exception it is. Each hands on
with it what it had found (`Interrupted`), as far as that is what the next one looks for; the outermost one gives the
fastest, or, where there is none yet, the first plan that fits (`interrupted_plan`). Whoever ends a search by finishing
its best plan, or a first one, is not guarded while that is done: a second interrupt ends that as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from paraplan.ir.errors import NoPlanError
from paraplan.planner.best_plan import BestPlan, Progress

T = TypeVar("T")
FIRST_WORDS = "interrupted before a plan was found: the first that fits ends it, another interrupt at once"
NOTE = "the search was interrupted: with more time, a faster plan may be found"


class Interrupted(KeyboardInterrupt):
    """A search was interrupted.

    Attributes:
        found: what it had found; nothing where that is empty.
    """

    def __init__(self, found: Sequence[Any]) -> None:
        super().__init__()
        self.found = tuple(found)


def found_until(fault: KeyboardInterrupt, kind: type[T]) -> list[T]:
    """What an interrupted search had found of a kind: candidates, or plans.

    Args:
        fault: the interrupt, as it came out of the search.
        kind: of what is looked for.
    """
    return [each for each in getattr(fault, "found", ()) if isinstance(each, kind)]


@contextmanager
def handing_on(found: list[T]) -> Iterator[None]:
    """Within it, an interrupt hands on what is in a list by then."""
    try:
        yield
    except KeyboardInterrupt as fault:
        raise Interrupted((*found, *getattr(fault, "found", ()))) from None


def ended(best: BestPlan, is_interrupted: bool) -> BestPlan:
    """The best plan of a search that came to its end.

    Raises:
        Interrupted: it did not: with the plan.
    """
    if is_interrupted:
        raise Interrupted((best,))
    return best


def interrupted_plan(fault: KeyboardInterrupt, first: Callable[[], BestPlan], progress: Progress) -> BestPlan:
    """The fastest plan that was found until an interrupt, with a note that it came; before any was, the first that
    fits.

    Args:
        fault: the interrupt.
        first: makes that.
        progress: told that it is made.
    Raises:
        KeyboardInterrupt: there is none, or another interrupt came.
    """
    found = found_until(fault, BestPlan)
    if not found:
        progress(FIRST_WORDS)
        try:
            found = [first()]
        except (KeyboardInterrupt, NoPlanError):
            raise KeyboardInterrupt from None
    best = min(found, key=lambda each: each.step_s)
    plan = msgspec.structs.replace(best.plan, notes=(*best.plan.notes, NOTE))
    return replace(best, plan=plan, is_interrupted=True)
