"""The simulator: what a step of every rank takes, in time and in memory.

In: one `RankProgram` per class of equal ranks, and what things cost on each class' mesh. Out: step time, busy
and exposed time per stream, bytes alive, and spans for timelines. Ranks of a class do equal work at equal
times, so a class is simulated once, and a collective among them starts when any of them reaches it.

Each class is a `RankEngine` that takes its steps one at a time; `simulate` lets every engine run until it has ended or
waits for a message whose other end has not got there yet (see `message_times`), and goes round until all have ended.
Limits: contention between link levels and stragglers are not modelled, nor that a host may wait for its device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paraplan.cost_models.bound import stream_bound
from paraplan.cost_models.costs import Costs
from paraplan.cost_models.simulator.block_replay import TimeBlock, compile_time
from paraplan.cost_models.simulator.live_bytes import MemoryWalk
from paraplan.cost_models.simulator.message_times import Key, Mailbox
from paraplan.cost_models.simulator.step_memory import StepMemory
from paraplan.cost_models.simulator.timeline import Span, TimeWalk
from paraplan.ir.errors import CostModelError
from paraplan.ir.execution.names import Role
from paraplan.ir.execution.rank_program import MESSAGES, RankProgram, Step, StepKind
from paraplan.ir.execution.streams import COMPUTE, Stream, StreamKind, message_stream, update_stream
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.process.memo import SESSION, Lately, Same
from paraplan.ir.struct import Value

_COMMUNICATES = (StreamKind.COMMUNICATION, StreamKind.MESSAGE)
_BLOCKS: Lately[TimeBlock] = SESSION.lately("simulate.blocks", 50_000, lambda block: 1 + len(block.events))


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


class RankEngine:
    """One rank of a class on its way through its program; every block is read and priced once."""

    def __init__(self, program: RankProgram, costs: Costs, mailbox: Mailbox | None = None) -> None:
        if program.mesh_shape != costs.mesh.shape:
            raise CostModelError(f"a program for mesh {program.mesh_shape} cannot be priced on {costs.mesh.shape}")
        self.program, self.costs = program, costs
        self.memory, self.time = MemoryWalk(program), TimeWalk()
        self.start_bytes = self.memory.live
        self.peak = (self.memory.live, -1, -1)
        self.tier_peaks = {tier: size for tier, size in self.memory.levels.items() if tier}
        self.points: list[MemoryPoint] = []
        self._blocks: dict[str, TimeBlock] = {}
        self._accumulates: dict[tuple[str, str, tuple[int, ...]], float] = {}
        self._next = 0
        self._updated: dict[str, int] = {}
        self._mailbox = mailbox or Mailbox()
        self._parts = Counter((transfer.message, transfer.sends) for transfer in program.transfers.values())

    @property
    def ended(self) -> bool:
        """Whether every step was taken."""
        return self._next == len(self.program.steps)

    @property
    def waits_for(self) -> str:
        """The message the next step needs and nobody has posted yet; "" where it needs none."""
        step = None if self.ended else self.program.steps[self._next]
        if step is None or step.kind is not StepKind.AWAIT or self._key(step) in self._mailbox.times:
            return ""
        message, m = self._key(step)
        of = f" of microbatch {m}" if m >= 0 else ""
        return f"{step.action} waits for message {message}{of}"

    def advance(self) -> None:
        """Take the next step; not to be called while it waits for a message."""
        step = self.program.steps[self._next]
        memory = self.memory.advance(step)
        if step.kind is StepKind.CALL:
            self.time.call(step, self._block(step.block))
        elif step.kind is StepKind.ACCUMULATE:
            seconds = self._accumulate_s(memory)
            self.time.compute(step, seconds, "accumulate", self.costs.kernel_issue_s if seconds else 0.0)
        elif step.kind is StepKind.UPDATE:
            self._update(step)
        elif step.kind is StepKind.UPDATED:
            self.time.updated()
        elif step.kind in MESSAGES:
            self._message(step)
        if memory.peak > self.peak[0]:
            inside = memory.profile.peak_instr if memory.profile and memory.peak > memory.before else -1
            self.peak = (memory.peak, self._next, inside)
        for tier, part in memory.tiers.items():
            self.tier_peaks[tier] = max(part.peak, self.tier_peaks.get(tier, 0))
        end = self.time.clock[COMPUTE]
        self.points.append(MemoryPoint(step=self._next, end_s=end, live_bytes=memory.after, peak_bytes=memory.peak))
        self._next += 1

    def trace(self) -> RankTrace:
        """What was seen so far."""
        work = dict(self.time.work)
        compute = work.pop(COMPUTE)
        copies = {stream: work.pop(stream) for stream in [*work] if stream.kind is StreamKind.COPY}
        updates = {stream: work.pop(stream) for stream in [*work] if stream.kind is StreamKind.UPDATE}
        return RankTrace(
            step_s=self.time.end_s,
            peak_bytes=self.peak[0],
            peak_step=self.peak[1],
            peak_instr=self.peak[2],
            start_bytes=self.start_bytes,
            compute_s=compute,
            comm_s=work,
            exposed_comm_s=self.time.stalled_s(*_COMMUNICATES) + (self.time.end_s - self.time.clock[COMPUTE]),
            spans=tuple(self.time.spans),
            memory=tuple(self.points),
            copy_s=copies,
            bubble_s=self.time.bubble_s,
            exposed_copy_s=self.time.stalled_s(StreamKind.COPY),
            update_s=updates,
            exposed_update_s=self.time.stalled_s(StreamKind.UPDATE),
            tier_peak_bytes={tier: peak for tier, peak in self.tier_peaks.items() if peak},
            stalled_s=self.time.all_stalled_s,
            bubbles=tuple(self.time.bubbles),
        )

    def _key(self, step: Step) -> Key:
        return self.program.transfers[step.transfer].message, step.microbatch

    def _message(self, step: Step) -> None:
        """Begin a message, or wait until one is through."""
        transfer, key = self.program.transfers[step.transfer], self._key(step)
        if step.kind is StepKind.AWAIT:
            self.time.message(step, message_stream(transfer.channel), transfer.message, *self._mailbox.times[key])
            return
        if transfer.starts:
            self.time.compute(step, self.costs.memory_s(transfer.nbytes, transfer.nbytes), "copy")
        parts = self._parts[transfer.message, transfer.sends]
        seconds = parts * self.costs.moves.message_s(transfer)
        self._mailbox.post(transfer.channel, key, transfer.sends, self.time.clock[COMPUTE], seconds, parts)

    def _block(self, name: str) -> TimeBlock:
        if name not in self._blocks:
            block = self.program.blocks[name]
            made_of = (Same(block), Same(self.costs))
            self._blocks[name] = _BLOCKS.get(made_of, lambda: compile_time(block, self.costs))
        return self._blocks[name]

    def _accumulate_s(self, memory: StepMemory) -> float:
        """Nothing for a move; else one kernel that reads both, each in its dtype, and writes one."""
        if memory.moved or memory.held is None:
            return 0.0
        key = (memory.held.dtype, memory.added, memory.held.shape)
        seconds = self._accumulates.get(key)
        if seconds is None:
            held, added = TensorSpec(key[0], key[2]), TensorSpec(key[1], key[2])
            seconds = self.costs.sum_s(held, added)
            self._accumulates[key] = seconds
        return seconds

    def _update(self, step: Step) -> None:
        """Parameters and states read and written, gradients read, by the device or where they are."""
        held = self.memory.outer
        roles = (Role.PARAMETER, Role.STATE)
        by_source = {value.source: name for name, value in self.program.outer.items() if value.role in roles}
        sizes: list[int] = []
        grads = 0
        for name in step.args:
            stored = held.get(name) or held.get(by_source.get(name.source, name))
            grad = held.get(self.program.grads.get(name.source, name))
            size = stored.nbytes if stored is not None else 0
            sizes.append(size)
            grads += grad.nbytes if grad is not None else size
        tier, params = self.program.update_tier(step), sum(sizes)
        states = self._state_bytes(step, tier, params)
        if tier:
            seconds = self.costs.update_away_s(tier, params + grads + states + params + states)
            if step.late:
                self.time.late_update(step, update_stream(tier), seconds)
            else:
                self.time.update(step, update_stream(tier), seconds)
        else:
            seconds = self.costs.update_s(tuple(sizes), params + grads + states, params + states)
            self.time.compute(step, seconds, "update")

    def _state_bytes(self, step: Step, tier: str, params: int) -> int:
        """Bytes of the states an UPDATE of so many bytes of parameters reads and writes: those of its tier, in parts if
        some there are updated late and some are not."""
        if step.staged is not None:
            return step.staged.state_bytes
        whole = self.program.update_bytes(tier)[0]
        if tier not in self._updated:
            self._updated[tier] = sum(
                self.memory.outer[name].nbytes
                for other in self.program.steps
                if other.kind is StepKind.UPDATE and other.staged is None and self.program.update_tier(other) == tier
                for name in other.args
                if name in self.memory.outer
            )
        return whole * params // self._updated[tier] if self._updated[tier] else whole


def simulate_rank(program: RankProgram, costs: Costs) -> RankTrace:
    """One rank's step.

    Args:
        program: what the rank executes.
        costs: of its stage's mesh.
    Raises:
        CostModelError: the program names what does not exist, does not fit the mesh, or cannot be priced.
    """
    return simulate((program,), (costs,)).traces[0]


def simulate(programs: Sequence[RankProgram], costs: Sequence[Costs], rank_class: tuple[int, ...] = (0,)) -> Simulation:
    """One step of every rank.

    Args:
        programs: one per rank class.
        costs: parallel to `programs`: of the mesh each class runs on.
        rank_class: class of every rank.
    Raises:
        CostModelError: as `simulate_rank`, or no program at all, or ranks that wait for each other.
    """
    if not programs or len(programs) != len(costs):
        raise CostModelError(f"{len(programs)} rank programs, {len(costs)} costs: one of each per class, at least one")
    pairs = [(id(program), id(of)) for program, of in zip(programs, costs, strict=True)]
    mailbox = Mailbox()
    engines = {pair: RankEngine(program, of, mailbox) for pair, program, of in zip(pairs, programs, costs, strict=True)}
    _run(list(engines.values()))
    made = {pair: engine.trace() for pair, engine in engines.items()}
    traces = tuple(made[pair] for pair in pairs)
    busiest = max(range(len(traces)), key=lambda index: traces[index].step_s)
    return Simulation(traces=traces, rank_class=rank_class, busiest=busiest)


def _run(engines: list[RankEngine]) -> None:
    """Let every engine run until all have ended."""
    running = engines
    while running:
        moved = False
        for engine in running:
            while not engine.ended and not engine.waits_for:
                engine.advance()
                moved = True
        running = [engine for engine in running if not engine.ended]
        if running and not moved:
            waits = "; ".join(f"class {engines.index(engine)}, {engine.waits_for}" for engine in running)
            raise CostModelError(f"the schedule deadlocks, ranks wait for each other: {waits}")
