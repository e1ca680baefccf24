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
from collections.abc import Callable, Sequence
from typing import Protocol

from paraplan.cost_models.costs import Costs
from paraplan.cost_models.simulator.block_replay import TimeBlock, compile_time
from paraplan.cost_models.simulator.live_bytes import MemoryWalk
from paraplan.cost_models.simulator.message_times import Key, Mailbox
from paraplan.cost_models.simulator.rank_trace import MemoryPoint, RankTrace, Simulation
from paraplan.cost_models.simulator.step_memory import StepMemory
from paraplan.cost_models.simulator.timeline import TimeWalk
from paraplan.ir.errors import CostModelError
from paraplan.ir.execution.name import Role
from paraplan.ir.execution.rank_program import MESSAGES, RankProgram, Step, StepKind
from paraplan.ir.execution.streams import COMPUTE, StreamKind, message_stream, update_stream
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.process.memo import SESSION, Lately, Same

_COMMUNICATES = (StreamKind.COMMUNICATION, StreamKind.MESSAGE)
_BLOCKS: Lately[TimeBlock] = SESSION.lately("simulate.blocks", 50_000, lambda block: 1 + len(block.events))


Act = Callable[[TimeWalk], None]
"""What a step does to the clocks of its rank."""


class RankEngine:
    """One rank of a class on its way through its program; every block is read and priced once.

    Args:
        program: of the rank.
        costs: on its mesh.
        mailbox: of all ranks; None where there is one.
        keeps: whether `acts` are kept.

    Attributes:
        acts: what every step taken so far has done to the clocks; None of messages and of what does nothing.
    """

    def __init__(self, program: RankProgram, costs: Costs, mailbox: Mailbox | None = None, keeps: bool = False) -> None:
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
        self._keeps = keeps
        self.acts: list[Act | None] = []
        self._parts = Counter((transfer.message, transfer.sends) for transfer in program.transfers.values())

    @property
    def ended(self) -> bool:
        """Whether every step was taken."""
        return self._next == len(self.program.steps)

    @property
    def waits_for(self) -> str:
        """The message the next step needs and nobody has posted yet; "" where it needs none."""
        step = None if self.ended else self.program.steps[self._next]
        if step is None or step.kind is not StepKind.AWAIT or self.key(step) in self._mailbox.times:
            return ""
        message, m = self.key(step)
        of = f" of microbatch {m}" if m >= 0 else ""
        return f"{step.action} waits for message {message}{of}"

    def advance(self) -> None:
        """Take the next step; not to be called while it waits for a message."""
        step = self.program.steps[self._next]
        memory = self.memory.advance(step)
        act = None
        if step.kind in MESSAGES:
            self.message(step, self.time, self._mailbox)
        elif (act := self._act(step, memory)) is not None:
            act(self.time)
        if self._keeps:
            self.acts.append(act)
        if memory.peak > self.peak[0]:
            inside = memory.profile.peak_instr if memory.profile and memory.peak > memory.before else -1
            self.peak = (memory.peak, self._next, inside)
        for tier, part in memory.tiers.items():
            self.tier_peaks[tier] = max(part.peak, self.tier_peaks.get(tier, 0))
        end = self.time.clock[COMPUTE]
        self.points.append(MemoryPoint(step=self._next, end_s=end, live_bytes=memory.after, peak_bytes=memory.peak))
        self._next += 1

    def _act(self, step: Step, memory: StepMemory) -> Act | None:
        """What a step that is no message does to the clocks."""
        if step.kind is StepKind.CALL:
            block = self.block(step.block)
            return lambda time: time.call(step, block)
        if step.kind is StepKind.ACCUMULATE:
            seconds, issue_s = self._accumulate_s(memory), self.costs.kernel_issue_s
            return (lambda time: time.compute(step, seconds, "accumulate", issue_s)) if seconds else None
        if step.kind is StepKind.UPDATE:
            return self._update(step)
        return TimeWalk.updated if step.kind is StepKind.UPDATED else None

    def trace(self) -> RankTrace:
        """What was seen so far."""
        return self.traced(self.time)

    def traced(self, time: TimeWalk) -> RankTrace:
        """What was seen so far, by these clocks."""
        work = dict(time.work)
        compute = work.pop(COMPUTE)
        copies = {stream: work.pop(stream) for stream in [*work] if stream.kind is StreamKind.COPY}
        updates = {stream: work.pop(stream) for stream in [*work] if stream.kind is StreamKind.UPDATE}
        return RankTrace(
            step_s=time.end_s,
            peak_bytes=self.peak[0],
            peak_step=self.peak[1],
            peak_instr=self.peak[2],
            start_bytes=self.start_bytes,
            compute_s=compute,
            comm_s=work,
            exposed_comm_s=time.stalled_s(*_COMMUNICATES) + (time.end_s - time.clock[COMPUTE]),
            spans=tuple(time.spans),
            memory=tuple(self.points),
            copy_s=copies,
            bubble_s=time.bubble_s,
            exposed_copy_s=time.stalled_s(StreamKind.COPY),
            update_s=updates,
            exposed_update_s=time.stalled_s(StreamKind.UPDATE),
            tier_peak_bytes={tier: peak for tier, peak in self.tier_peaks.items() if peak},
            stalled_s=time.all_stalled_s,
            bubbles=tuple(time.bubbles),
        )

    def key(self, step: Step, later: int = 0) -> Key:
        """A step's message, taken so many microbatches later."""
        m = step.microbatch + later if step.microbatch >= 0 else -1
        return self.program.transfers[step.transfer].message, m

    def message(self, step: Step, time: TimeWalk, mailbox: Mailbox, later: int = 0) -> None:
        """Begin a message, or wait until one is through.

        Args:
            step: which does.
            time, mailbox: clocks of the rank and messages of all.
            later: by how many microbatches later it is taken.
        """
        transfer, key = self.program.transfers[step.transfer], self.key(step, later)
        if step.kind is StepKind.AWAIT:
            time.message(step, message_stream(transfer.channel), transfer.message, *mailbox.times[key])
            return
        if transfer.starts:
            time.compute(step, self.costs.memory_s(transfer.nbytes, transfer.nbytes), "copy")
        parts = self._parts[transfer.message, transfer.sends]
        seconds = parts * self.costs.moves.message_s(transfer)
        mailbox.post(transfer.channel, key, transfer.sends, time.clock[COMPUTE], seconds, parts)

    def block(self, name: str) -> TimeBlock:
        """How long a block takes."""
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

    def _update(self, step: Step) -> Act:
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
            take = TimeWalk.late_update if step.late else TimeWalk.update
            return lambda time: take(time, step, update_stream(tier), seconds)
        seconds = self.costs.update_s(tuple(sizes), params + grads + states, params + states)
        return lambda time: time.compute(step, seconds, "update")

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
    engines = engines_of(programs, costs)
    made = {id(engine): engine.trace() for engine in engines}
    return simulation_of([made[id(engine)] for engine in engines], rank_class)


def engines_of(programs: Sequence[RankProgram], costs: Sequence[Costs], keeps: bool = False) -> list[RankEngine]:
    """Engines that have taken every step; one per rank class, equal ones for equal programs at equal costs.

    Args:
        programs, costs: as of `simulate`.
        keeps: see `RankEngine`.
    Raises:
        CostModelError: as `simulate`.
    """
    if not programs or len(programs) != len(costs):
        raise CostModelError(f"{len(programs)} rank programs, {len(costs)} costs: one of each per class, at least one")
    pairs = [(id(program), id(of)) for program, of in zip(programs, costs, strict=True)]
    mailbox, engines = Mailbox(), dict[tuple[int, int], RankEngine]()
    for pair, program, of in zip(pairs, programs, costs, strict=True):
        if pair not in engines:
            engines[pair] = RankEngine(program, of, mailbox, keeps)
    run(list(engines.values()))
    return [engines[pair] for pair in pairs]


def simulation_of(traces: Sequence[RankTrace], rank_class: tuple[int, ...]) -> Simulation:
    """A simulation of these traces, one per rank class."""
    busiest = max(range(len(traces)), key=lambda index: traces[index].step_s)
    return Simulation(traces=tuple(traces), rank_class=rank_class, busiest=busiest)


class Engine(Protocol):
    """What takes a rank's steps one at a time."""

    @property
    def ended(self) -> bool: ...

    @property
    def waits_for(self) -> str: ...

    def advance(self) -> None: ...


def run(engines: Sequence[Engine]) -> None:
    """Let every engine run until all have ended.

    Raises:
        CostModelError: they wait for each other.
    """
    running = list(engines)
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
