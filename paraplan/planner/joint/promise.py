"""What estimates promise, as plans made of others have shown how far they are off.

An estimate is taken to be off by as much as the last one of its family was; a pipeline's of a family not planned yet by
as much as the best of others, and not by more than `ALIKE`: what is left out of it is left out of all. Where one had
to be estimated again for fewer bytes, those of its family and its kind (inner axes and samples of a microbatch) are
taken to be longer by as much as that was; where one was to fit and does not, others of its kind, and those of its
family by as much again. What pipelines need beyond what they were estimated at, others need as well: by what the
nearest to fitting is over, all are estimated anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from paraplan.planner.joint.combinations import ONE_STAGE
from paraplan.planner.joint.estimate import Estimate

SLACK, FIRST_SLACK, ONE_STAGE_SLACK = 0.01, 0.05, 0.1
"""What an estimate may be too high by: combinations estimated so much above the best plan are left; the second until
one of its schedule was planned, and it is known by how much estimates are off; the third of one stage, whose plans take
a second. The first is multiplied by the share of the time that is left then, the second by its square."""
ALIKE = 1.05
"""How much longer than estimated pipelines of a family not planned yet are thought to be at most, for those of others
having been."""
ORDERED, ORDERED_MOST = 256, 3
"""Forwards of a step up to which a pipeline's orders are searched for; of how many pipelines they are."""
FEW_SEGMENTS = 32
"""Of a model, up to which they are of pipelines that are not the best: a search takes seconds for each."""
UNFIT = 1.15
"""How much longer than estimated pipelines of a kind are taken to be for each that was to fit and does not."""
SEGMENTS, SMALL = 32 * 2**20, 1 / 32
"""Bytes of an allocator's segments that are used in part, and the share of the budget that these are at most."""
LEANER = (0.9, 0.75, 0.5)
"""Of the budget, what pipelines are estimated for where some that were to fit in more do not."""
BEYOND, LESS = 1.5, 0.02
"""Times what the nearest to fitting is over, and of the budget, what others are estimated to leave free then."""


@dataclass
class Promise:
    """What is known of estimates.

    Attributes:
        off: per family, what its last plan took to its estimate.
        fewer: per kind and family, what its last estimate came to for the bytes that it was planned for in the end.
        unfit: per kind, and per kind and family, how many were to fit and did not.
        over_bytes: by how much the nearest of these to fitting is over; 0 where that is not known.
    """

    off: dict[str, float] = field(default_factory=dict)
    fewer: dict[tuple[Hashable, str], float] = field(default_factory=dict)
    unfit: Counter[Hashable] = field(default_factory=Counter)
    over_bytes: int = 0

    def hoped_s(self, estimate: Estimate, kind: Hashable) -> float:
        """What its plan is thought to take.

        Args:
            estimate: which.
            kind: of its prices.
        """
        known = [off for family, off in self.off.items() if family != ONE_STAGE]
        usual = 1.0 if estimate.family == ONE_STAGE or not known else min(*known, ALIKE)
        unfit = self.unfit[kind] + self.unfit[kind, estimate.family]
        longer = self.fewer.get((kind, estimate.family), 1.0) * UNFIT**unfit
        return estimate.step_s * self.off.get(estimate.family, usual) * longer

    def slack(self, estimate: Estimate, left: float) -> float:
        """What it may be too high by to be worth planning.

        Args:
            estimate: which.
            left: of the time, the share that is left once it is planned: with less of it, what is less likely to be
                faster is left out, and what takes long to plan before what does not.
        """
        if estimate.family == ONE_STAGE:
            return ONE_STAGE_SLACK
        left = max(left, 0.0)
        return SLACK * left if estimate.family in self.off else FIRST_SLACK * left**2

    def begin(self) -> None:
        """Others are estimated: what did not fit may."""
        self.unfit.clear()
        self.over_bytes = 0

    @staticmethod
    def first(budget: int, reserves: bool) -> float:
        """For how much of the budget pipelines are estimated first.

        Args:
            budget: bytes of a device.
            reserves: whether allocators have to have room.
        """
        return 1.0 - min(SEGMENTS / budget, SMALL) if reserves else 1.0

    def leaner(self, share: float, budget: int) -> float | None:
        """For how much of the budget pipelines are to be estimated next, after those for a share of it; None where for
        no less."""
        least = next((each for each in LEANER if each < share), None)
        if least is None or not self.over_bytes:
            return least
        return max(least, share - BEYOND * self.over_bytes / budget - LESS)

    def lacks(self, estimate: Estimate, over_bytes: int) -> None:
        """It does not fit by so many bytes; 0 where it does, or that is not known."""
        if estimate.combination.pp > 1 and over_bytes:
            self.over_bytes = min(self.over_bytes or over_bytes, over_bytes)

    def planned(self, estimate: Estimate, kind: Hashable, found_s: float | None, ended_s: float) -> None:
        """It was planned.

        Args:
            estimate: one that was to fit.
            kind: of its prices.
            found_s: what its plan takes; None where it does not fit.
            ended_s: what it was estimated at in the end, where it was planned for fewer bytes.
        """
        if found_s is None:
            self.unfit.update((kind, (kind, estimate.family)))
        else:
            self.off[estimate.family] = found_s / ended_s
            self.fewer[kind, estimate.family] = ended_s / estimate.step_s


def to_be_ordered(best: Estimate | None, near: Iterable[Estimate], segments: int) -> list[Estimate]:
    """Those whose orders are worth searching for: of pipelines of few actions the first of each, whatever its schedule,
    and those of a long model only where it is the best.

    Args:
        best: of the best plan; None where that is no pipeline.
        near: others, the most promising first.
        segments: of the model.
    """
    alike: dict[object, Estimate] = {}
    for each in (*([] if best is None else [best]), *near):
        c = each.combination
        if c.pp > 1 and c.num_actions <= ORDERED and (each is best or segments <= FEW_SEGMENTS):
            alike.setdefault((c.pp, c.mesh, c.microbatches, c.each), each)
    return list(alike.values())[:ORDERED_MOST]
