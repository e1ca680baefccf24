"""What a simulated step was: per rank class its times and bytes, and the step of the whole cluster."""

from __future__ import annotations

from paraplan.cost_models.bound import stream_bound
from paraplan.cost_models.simulator.timeline import Span
from paraplan.ir.execution.streams import COMPUTE, Stream
from paraplan.ir.struct import Value


class MemoryPoint(Value, frozen=True, kw_only=True):
    """Memory around one step of the program.

    Attributes:
        step: index into the program's steps.
        end_s: when compute has finished it.
        live_bytes: alive after it.
        peak_bytes: the most alive inside it.
    """

    step: int
    end_s: float
    live_bytes: int
    peak_bytes: int


class RankTrace(Value, frozen=True, kw_only=True):
    """What one rank of a class went through.

    Attributes:
        step_s: until its last stream falls idle.
        peak_bytes: the most bytes alive on the device at once, workspace and optimizer state included.
        tier_peak_bytes: likewise of every tier in use.
        peak_step, peak_instr: where: index of the step (-1: before the first), and of the instruction in its
            block (-1: not inside one).
        start_bytes: alive before the first step.
        compute_s: compute stream busy.
        comm_s, copy_s: per comm and per copy stream, seconds busy.
        exposed_comm_s: seconds compute stood still for communication, the step's end included
            (step_s - compute_s - exposed_copy_s - bubble_s - exposed_update_s, less what it stood still for the host).
        exposed_copy_s: seconds it stood still for copies to and from tiers.
        spans: stretches of every stream, for timelines.
        memory: one point per step.
        bubble_s: seconds compute stood still for a message that had not begun: the pipeline's bubble, but for what is
            left of the step when this rank has ended.
        update_s: per tier that updates parameters ("update:host"), seconds it does.
        exposed_update_s: seconds compute stood still for these.
        stalled_s: per stream, seconds compute stood still for it once it had begun; the step's end, where compute has
            nothing left to do, is the stream's that ends last. With compute_s and bubble_s they add up to step_s.
        bubbles: from when to when compute stood still for messages that had not begun.
    """

    step_s: float
    peak_bytes: int
    peak_step: int
    peak_instr: int
    start_bytes: int
    compute_s: float
    comm_s: dict[Stream, float]
    exposed_comm_s: float
    spans: tuple[Span, ...]
    memory: tuple[MemoryPoint, ...]
    copy_s: dict[Stream, float] = {}
    exposed_copy_s: float = 0.0
    tier_peak_bytes: dict[str, int] = {}
    bubble_s: float = 0.0
    update_s: dict[Stream, float] = {}
    exposed_update_s: float = 0.0
    stalled_s: dict[Stream, float] = {}
    bubbles: tuple[tuple[float, float], ...] = ()

    @property
    def work(self) -> dict[Stream, float]:
        """Seconds of work per stream."""
        return {COMPUTE: self.compute_s, **self.comm_s, **self.copy_s, **self.update_s}

    @property
    def bound_s(self) -> float:
        """What this work takes at least (see `bound.stream_bound`)."""
        return stream_bound(self.work)


class Simulation(Value, frozen=True, kw_only=True):
    """One step of the whole cluster.

    Attributes:
        traces: one per rank class.
        rank_class: class of every rank.
        busiest: the class whose rank ends last.
    """

    traces: tuple[RankTrace, ...]
    rank_class: tuple[int, ...]
    busiest: int

    @property
    def step_s(self) -> float:
        """Time of the step: until the last rank ends."""
        return self.traces[self.busiest].step_s

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Per rank class, the most bytes alive on the device at once."""
        return tuple(trace.peak_bytes for trace in self.traces)

    @property
    def tier_peak_bytes(self) -> dict[str, int]:
        """Per tier in use, the most bytes any rank has there at once."""
        found: dict[str, int] = {}
        for trace in self.traces:
            for tier, size in trace.tier_peak_bytes.items():
                found[tier] = max(size, found.get(tier, 0))
        return found

    @property
    def compute_s(self) -> float:
        """Compute of the busiest rank."""
        return self.traces[self.busiest].compute_s

    @property
    def comm_s(self) -> dict[Stream, float]:
        """Communication per stream of the busiest rank."""
        return self.traces[self.busiest].comm_s

    @property
    def exposed_comm_s(self) -> float:
        """Exposed communication of the busiest rank."""
        return self.traces[self.busiest].exposed_comm_s

    @property
    def copy_s(self) -> dict[Stream, float]:
        """Copies per stream of the busiest rank."""
        return self.traces[self.busiest].copy_s

    @property
    def exposed_copy_s(self) -> float:
        """Seconds the busiest rank stands still for copies."""
        return self.traces[self.busiest].exposed_copy_s
