"""What a search has tried so far, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paraplan.ir.errors import ParaplanError
from paraplan.ir.plan import Tried
from paraplan.planner.alternatives.tried import in_vain, planned, slower
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.pipeline.draft import Draft, step_s
from paraplan.planner.pipeline.pipeline_search import Slower
from paraplan.planner.pipeline.stage_sharding import Shardings


@dataclass
class Attempts:
    """Plans found, and what was said of all that were tried.

    Attributes:
        job, constraints: what is planned, and what is pinned of any plan.
        shardings: of stages' devices.
        progress: told what is being tried.
        deadline: of all of it.
        drafts: found.
        words: of what was tried, for a note.
        tried: likewise, for `explain`.
        faults: why some were in vain.
    """

    job: Job
    constraints: Constraints
    shardings: Shardings
    progress: Callable[[str], None]
    deadline: Deadline
    drafts: list[Draft] = field(default_factory=list, kw_only=True)
    words: list[str] = field(default_factory=list, kw_only=True)
    tried: list[Tried] = field(default_factory=list, kw_only=True)
    faults: list[ParaplanError] = field(default_factory=list, kw_only=True)
    _drafted: dict[int, tuple[str, float | None, dict[str, Any]]] = field(default_factory=dict, kw_only=True)

    @property
    def best_s(self) -> float:
        """The shortest step of a plan so far."""
        return min((draft.step_s for draft in self.drafts), default=math.inf)

    def know(self, drafts: Sequence[Draft]) -> None:
        """Begin with plans found elsewhere, which others have to be faster than."""
        self.drafts += drafts
        for draft in drafts:
            self._drafted[id(draft)] = "known", None, {}
            self.words.append(f"known before: {draft.step_s:.4g} s")

    def _make_fastest(self) -> None:
        """Make drafts whole until the fastest of all is."""
        while self.drafts and (best := min(self.drafts, key=step_s)).plan is None:
            self.progress(f"all microbatches of the best so far, about {best.step_s:.4g} s")
            what, estimated_s, pins = self._drafted[id(best)]
            try:
                self.tried.append(planned(what, best.made(), estimated_s, pins))
                self.words.append(f"{what}, whole: {best.step_s:.4g} s")
            except ParaplanError as fault:
                self.drafts.remove(best)
                self.faults.append(fault)
                self.tried.append(in_vain(what, fault, estimated_s))
                self.words.append(f"{what}, whole: nothing")

    def _hoped_of(self, draft: Draft) -> float:
        """The step a draft came to, or the one it was estimated at, if that is less."""
        _, estimated_s, _ = self._drafted.get(id(draft), ("", None, {}))
        return draft.step_s if estimated_s is None else min(draft.step_s, estimated_s)

    def _try(
        self,
        what: str,
        pins: Constraints,
        make: Callable[[], Draft | Slower],
        estimated: str = "",
        step_s: float | None = None,
    ) -> float | None:
        """What is planned, told with what it was estimated at: its step, or what that is not below; None where nothing
        was found."""
        text = f"{what}{estimated}"
        known = f"{text}; best so far {self.best_s:.4g} s" if self.drafts else text
        self.progress(known)
        try:
            found = make()
        except ParaplanError as fault:  # of one candidate: others are looked at
            self.faults.append(fault)
            self.tried.append(in_vain(what, fault, step_s))
            self.words.append(f"{text}: nothing")
            return None
        if isinstance(found, Slower):
            self.words.append(f"{text}: about {found.step_s:.4g} s")
            self.tried.append(slower(what, found.step_s, step_s))
            return found.step_s
        self.drafts.append(found)
        asked = self.constraints.as_data
        more = {name: value for name, value in pins.as_data.items() if asked.get(name) != value}
        self._drafted[id(found)] = what, step_s, more
        told = slower(what, found.step_s, step_s) if found.plan is None else planned(what, found.plan, step_s, more)
        self.tried.append(told)
        self.words.append(f"{text}: {'about ' if found.plan is None else ''}{found.step_s:.4g} s")
        return found.step_s
