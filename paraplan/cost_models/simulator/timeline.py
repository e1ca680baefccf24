"""Streams of one rank: clocks that run side by side, and the spans drawn on them.

Instructions are issued in program order. Compute runs them one after another. A collective starts on its
comm stream once compute has reached it (its input is then ready) and the stream is free, and runs beside
compute; a wait holds compute until the collective has ended. That is CUDA's stream order under
torch.distributed: one communication stream per link level. A collective that takes some of the device for itself
holds compute for that much of its time, from when it is issued: compute that would have gone on beside it is done so
much later, and compute that waits for it anyway loses nothing. Copies do the same on one stream each way per tier; one
that begins beside an update on the host takes from it the host's memory for its bytes. The host issues kernels ahead of
the device, one after another: where they are shorter than it takes to issue them, compute waits for the host.
"""

from __future__ import annotations

from paraplan.cost_models.simulator.block_replay import Issue, Run, TimeBlock
from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import Step
from paraplan.ir.execution.streams import COMPUTE, HOST, Stream, StreamKind
from paraplan.ir.struct import Value


class Span(Value, frozen=True, kw_only=True):
    """A stretch of a stream: one step's compute, one collective or one copy.

    Attributes:
        stream: that it is of.
        start_s, end_s: from the step's begin.
        label: the block, or what the collective or copy is called.
        action, segment, microbatch: of the step it belongs to.
        phase: the action's kind ("F", "B", "UPDATE").
        busy_s: seconds of work inside; the rest of a compute span is waiting.
    """

    stream: Stream
    start_s: float
    end_s: float
    label: str
    action: str
    segment: int
    microbatch: int
    phase: str
    busy_s: float


class TimeWalk:
    """The clocks of one rank while its steps are taken in order."""

    def __init__(self) -> None:
        self.clock: dict[Stream, float] = {COMPUTE: 0.0}
        self.work: dict[Stream, float] = {COMPUTE: 0.0}
        self.stalled: dict[Stream, float] = {}
        self.issued_s = 0.0
        self.bubble_s = 0.0
        self.bubbles: list[tuple[float, float]] = []
        self.spans: list[Span] = []
        self._late: tuple[Step, Stream, float] | None = None
        self._unfinished: dict[Name, tuple[float, Stream]] = {}

    @property
    def end_s(self) -> float:
        """When the last stream falls idle."""
        return max(self.clock.values())

    def stalled_s(self, *on: StreamKind) -> float:
        """Seconds compute stood still for streams of these kinds."""
        return sum((seconds for stream, seconds in self.stalled.items() if stream.kind in on), 0.0)

    @property
    def all_stalled_s(self) -> dict[Stream, float]:
        """Seconds compute stood still for each stream, and at the end for the one that ends last."""
        last, left = max(self.clock, key=lambda stream: self.clock[stream]), self.end_s - self.clock[COMPUTE]
        return {**self.stalled, last: self.stalled.get(last, 0.0) + left} if left > 0 else dict(self.stalled)

    def call(self, step: Step, block: TimeBlock) -> None:
        """Run a block's events."""
        begin = now = self.clock[COMPUTE]
        busy = 0.0
        bound = ((name, step.args[index]) for index, name in block.imported)
        ends = {name: self._unfinished[outer] for name, outer in bound if outer in self._unfinished}
        for event in block.events:
            if isinstance(event, Run):
                now = self._run(now, event.seconds, event.issue_s, event.issued_s)
                busy += event.seconds
            elif isinstance(event, Issue):
                ends[event.name] = self._issue(step, event, now)
                now += event.taken_s
                busy += event.taken_s
            else:
                end, stream = ends.get(event.name, (now, COMPUTE))
                if end > now:
                    self.stalled[stream] = self.stalled.get(stream, 0.0) + end - now
                    now = end
        self.clock[COMPUTE] = now
        self.work[COMPUTE] += busy
        for index, name in block.exported:
            outer = step.outs[index]
            if outer is not None:
                self._unfinished[outer] = ends[name]
        self._span(step, COMPUTE, begin, now, step.block, busy)

    def compute(self, step: Step, seconds: float, label: str, issue_s: float = 0.0) -> None:
        """Run one kernel outside of blocks.

        Args:
            step: that it is of.
            seconds: that it takes.
            label: of its span.
            issue_s: that the host takes to issue it.
        """
        begin = self.clock[COMPUTE]
        self.clock[COMPUTE] = self._run(begin, seconds, issue_s, issue_s + seconds)
        self.work[COMPUTE] += seconds
        self._span(step, COMPUTE, begin, self.clock[COMPUTE], label, seconds)

    def _run(self, now: float, seconds: float, issue_s: float, issued_s: float) -> float:
        """When kernels have run that the host issues meanwhile; compute stands still where it is the slower."""
        end = now + seconds
        if self.issued_s + issued_s > end:
            self.stalled[HOST] = self.stalled.get(HOST, 0.0) + self.issued_s + issued_s - end
            end = self.issued_s + issued_s
        self.issued_s += issue_s
        return end

    def update(self, step: Step, stream: Stream, seconds: float) -> None:
        """An update elsewhere, for which compute stands still.

        Args:
            step: that it is of.
            stream: of the tier that updates.
            seconds: that it takes.
        """
        now = self.clock[COMPUTE]
        begin = max(now, self.clock.get(stream, 0.0))
        self.clock[COMPUTE] = self.clock[stream] = begin + seconds
        self.work[stream] = self.work.get(stream, 0.0) + seconds
        self.stalled[stream] = self.stalled.get(stream, 0.0) + begin + seconds - now
        self._span(step, stream, begin, begin + seconds, "update", seconds)

    def late_update(self, step: Step, stream: Stream, seconds: float) -> None:
        """An update elsewhere, begun beside what follows.

        Args:
            step: that it is of.
            stream: of the tier that updates.
            seconds: that it takes.
        """
        begin = max(self.clock[COMPUTE], self.clock.get(stream, 0.0))
        self.clock[stream] = begin + seconds
        self.work[stream] = self.work.get(stream, 0.0) + seconds
        self._late = (step, stream, begin)

    def updated(self) -> None:
        """Wait for it."""
        assert self._late is not None, "a late update was begun"
        (step, stream, begin), self._late = self._late, None
        end, now = self.clock[stream], self.clock[COMPUTE]
        self._span(step, stream, begin, end, "update", end - begin)
        if end > now:
            self.stalled[stream] = self.stalled.get(stream, 0.0) + end - now
            self.clock[COMPUTE] = end

    def message(self, step: Step, stream: Stream, label: str, begin: float, end: float) -> None:
        """Wait for a message that takes from begin to end; before it begins, waiting is the pipeline's bubble.

        Args:
            step: that waits.
            stream: of the messages between the two meshes.
            label: of its span.
            begin, end: of the message, in seconds from the step's begin.
        """
        now = self.clock[COMPUTE]
        if end > now:
            if begin > now:
                self.bubble_s += begin - now
                self.bubbles.append((now, begin))
            self.stalled[stream] = self.stalled.get(stream, 0.0) + end - max(now, begin)
            self.clock[COMPUTE] = end
        if end > self.clock.get(stream, 0.0):
            self.clock[stream] = end
            self.work[stream] = self.work.get(stream, 0.0) + end - begin
            self._span(step, stream, begin, end, label, end - begin)

    def _issue(self, step: Step, event: Issue, now: float) -> tuple[float, Stream]:
        """When what is issued ends, and on which stream it runs."""
        start = max(now, self.clock.get(event.stream, 0.0))
        end = start + event.seconds
        self.clock[event.stream] = end
        self.work[event.stream] = self.work.get(event.stream, 0.0) + event.seconds
        self._span(step, event.stream, start, end, event.label, event.seconds)
        if self._late is not None and start < self.clock[self._late[1]]:  # both go through the host's memory
            self.clock[self._late[1]] += event.host_s
            self.work[self._late[1]] += event.host_s
        return end, event.stream

    def _span(self, step: Step, stream: Stream, start: float, end: float, label: str, busy: float) -> None:
        if end > start:
            span = Span(
                stream=stream,
                start_s=start,
                end_s=end,
                label=label,
                action=step.action,
                segment=step.segment,
                microbatch=step.microbatch,
                phase=step.phase.value,
                busy_s=busy,
            )
            self.spans.append(span)
