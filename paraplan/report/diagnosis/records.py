"""What is found out about a plan, as data: seconds, bytes and other plans. Terminal, HTML and JSON read the same."""

from __future__ import annotations

from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.plan import Tried
from paraplan.ir.struct import Value
from paraplan.report.breakdown import CollectiveRow, TimeRow
from paraplan.report.memory_report import PartRow

COMPUTE, RECOMPUTATION, UPDATE = "compute", "recomputation", "update"
TIER_UPDATE, TIER_MEMORY, ISSUING = "host_update", "host_memory", "issuing"
FILL_AND_DRAIN, OTHERS = "fill_and_drain", "others"
PART_WORDS = {
    COMPUTE: "compute",
    RECOMPUTATION: "recomputation",
    UPDATE: "updates on the device",
    "in_node": "links in a node",
    "between_nodes": "links between nodes",
    **{tier: f"the {tier}'s link" for tier in TIERS},
    TIER_UPDATE: "updates by the host",
    ISSUING: "waiting for the host to issue kernels",
    FILL_AND_DRAIN: "the pipeline's fill and drain",
    OTHERS: "waiting for other stages",
}
"""What the parts of a step are called."""


class StepPart(Value, frozen=True, kw_only=True):
    """A part of a step.

    Attributes:
        key: a key of `PART_WORDS`.
        seconds: of the step; of a link what compute stands still for it, and what its collectives take of the
            device for themselves meanwhile.
        busy_s: seconds it is at work, hidden ones included.
        taken_s: of `seconds`, what collectives take of the device.
    """

    key: str
    seconds: float
    busy_s: float = 0.0
    taken_s: float = 0.0


class Breakdown(Value, frozen=True, kw_only=True):
    """A step as one position of the plan goes through it.

    Attributes:
        ranks: of its class, in words.
        where: the segments it holds, in words; "" where every rank holds all.
        step_s: of the plan; the parts add up to it.
        parts: the largest first.
        work: what is computed, recomputation and updates included, by class of op; () where that was not asked for.
        collectives: by what they do and over which axis, whether hidden or not; likewise.
    """

    ranks: str
    where: str
    step_s: float
    parts: tuple[StepPart, ...]
    work: tuple[TimeRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()

    @property
    def waits_s(self) -> float:
        """Seconds of waiting for other positions."""
        return sum(part.seconds for part in self.parts if part.key in (FILL_AND_DRAIN, OTHERS))

    def of(self, key: str) -> float:
        """Seconds of a part; 0.0 where there is none."""
        return sum(part.seconds for part in self.parts if part.key == key)


class MemoryUse(Value, frozen=True, kw_only=True):
    """The fullest device.

    Attributes:
        ranks: whose peak it is, in words.
        peak_bytes: the most alive at once.
        reserved_bytes: what its allocator reserves for that; 0 where it has none that caches.
        budget_bytes: what the plan might hold.
        memory_bytes: what the device has.
        running: what runs at the peak.
        parts: bytes at the peak by role.
    """

    ranks: str
    peak_bytes: int
    reserved_bytes: int
    budget_bytes: int
    memory_bytes: int
    running: str
    parts: tuple[PartRow, ...]

    @property
    def needed_bytes(self) -> int:
        """What counts against the budget."""
        return max(self.peak_bytes, self.reserved_bytes)


class SavedMemory(Value, frozen=True, kw_only=True):
    """Something a plan does to hold less, and the same plan without it.

    Attributes:
        what: "recomputation", "running in chunks", "activations on host", "states on host" and so on.
        pinned: whether it was asked for, and not the planner's choice.
        costs_s: how much longer the step is with it, simulated.
        peak_bytes: the fullest device's peak without it.
        over_bytes: how much of that is above the budget; 0: it would fit.
    """

    what: str
    pinned: bool
    costs_s: float
    peak_bytes: int
    over_bytes: int

    @property
    def forced(self) -> bool:
        """Whether memory is the reason."""
        return not self.pinned and self.over_bytes > 0


class Faster(Value, frozen=True, kw_only=True):
    """The same plan simulated on a cluster of which something is a tenth faster.

    Attributes:
        what: a key of `FASTER_WORDS`.
        bytes_per_s: of the link or memory as it is, the slowest's; 0.0 of what has no such rate.
        step_s: simulated.
        saved_s: of the step.
        saved_s_per_gb_per_s: for each 1e9 bytes per second more; 0.0 of what has no such rate.
    """

    what: str
    bytes_per_s: float
    step_s: float
    saved_s: float
    saved_s_per_gb_per_s: float


FASTER_WORDS = {
    "device": "the device, products and memory",
    "products": "its matrix products alone",
    "device_memory": "its memory alone",
    "in_node": "links in a node",
    "between_nodes": "links between nodes",
    **{tier: f"the {tier}'s link" for tier in TIERS},
    TIER_MEMORY: "the host's memory",
    "launches": "launches of kernels",
    ISSUING: "the host, where it issues kernels",
    "latency": "latencies of all links",
}


class MoreMemory(Value, frozen=True, kw_only=True):
    """The plan's family planned again with more memory on every device.

    Attributes:
        extra_bytes: how much more.
        family: what was kept of the plan: its positions, mesh, stages, schedule and microbatches, in words.
        step_s: of the plan with more; None where none was found in time.
        again_s: of the same planned again with the memory as it is; None where that was not needed, or found nothing.
        saved_s: of the shorter of the plan's step and `again_s`; 0.0: nothing.
        changed: what is otherwise in the plan with more, in words.
        said: why there is none; "" otherwise.
    """

    extra_bytes: int
    family: str
    step_s: float | None
    again_s: float | None
    saved_s: float
    changed: tuple[str, ...] = ()
    said: str = ""


class Over(Value, frozen=True, kw_only=True):
    """A plan that does not fit.

    Attributes:
        how: as what it was planned.
        peak_bytes: of its fullest device.
        over_bytes: how much of that is above the budget.
        parts: bytes at the peak by role.
    """

    how: str
    peak_bytes: int
    over_bytes: int
    parts: tuple[PartRow, ...]


class PartDifference(Value, frozen=True, kw_only=True):
    """A part of the step here and in another plan, as of `Breakdown.parts`."""

    key: str
    here_s: float
    there_s: float


CONTRADICTS, TOO_LARGE, NOT_FOUND, SLOWER, FASTER, AS_FAST = (
    *("contradicts", "does not fit", "not found"),
    *("slower", "faster", "as fast"),
)


class WhyNot(Value, frozen=True, kw_only=True):
    """What became of other pins on the same job.

    Attributes:
        asked: the pins, in words.
        kept, dropped: what was pinned of the plan and holds on, and what the pins replace.
        verdict: `CONTRADICTS` or one of the others.
        said: the error, where there is one.
        over: where it does not fit, plans that were made all the same, and by how much they are over.
        plan: the plan in a few words.
        step_s, peak_bytes: of it.
        breakdown: of its step.
        differences: part by part; they add up to the difference of the steps.
    """

    asked: str
    kept: str
    dropped: str
    verdict: str
    said: str = ""
    over: tuple[Over, ...] = ()
    plan: str = ""
    step_s: float | None = None
    peak_bytes: int = 0
    breakdown: Breakdown | None = None
    differences: tuple[PartDifference, ...] = ()


class Diagnosis(Value, frozen=True, kw_only=True):
    """Everything found out about a plan.

    Attributes:
        title: model and cluster.
        plan: the plan in a few words.
        step_s, bound_s: simulated; proved, or None.
        binding: the position that waits least for others, so that what it does is what the step takes.
        positions: every position, where there are several.
        memory: the fullest device.
        saving: what the plan does to hold less.
        faster: the same plan on a faster cluster.
        more_memory: the plan's family with more memory; None where that was not asked for.
        tried: what the search tried.
        why_not: of the pins asked about.
        notes: what all of it rests on.
    """

    title: str
    plan: str
    step_s: float
    bound_s: float | None
    binding: Breakdown
    positions: tuple[Breakdown, ...]
    memory: MemoryUse
    saving: tuple[SavedMemory, ...]
    faster: tuple[Faster, ...]
    more_memory: MoreMemory | None
    tried: tuple[Tried, ...]
    why_not: WhyNot | None
    notes: tuple[str, ...]
