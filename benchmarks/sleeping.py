"""A plan's steps on the real executor with kernels that only take their time: does the simulator count what runs?

Everything is as in training: blocks as codegen emits them, `Executor.run` over the program's steps, inputs, drops,
accumulations, messages, tiers. Only leaves are others: an op makes tensors of the right shapes and moves its rank's
clock on by the op's price; a collective or message is queued on its stream, a thread, which meets the other ranks there
and then takes its price; a wait holds the clock until then (`sleeping_streams`). So prices cancel, and what is left to
compare is the order of issues and waits, what runs beside what, who waits for whom, and what runs at all. Collectives
share one stream per link level, as they are priced.

The result is both: when the last rank's clock says that the step is over, and when it really is. Without sleeping
(`sleeps=False`) the former alone, which no load on the machine changes.
"""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, fx

from benchmarks.sleeping_streams import Board, Clock, ClockedCopier, Flight, Meeting, Streams, ThreadMeeting
from paraplan.codegen import build_modules
from paraplan.cost_models.costs import Costs
from paraplan.cost_models.predict import plan_costs
from paraplan.cost_models.simulator.rank_trace import Simulation
from paraplan.ir.execution.offsets import place_of
from paraplan.ir.execution.rank_program import Block, Instr, InstrKind, PeerTransfer, RankProgram, Step
from paraplan.ir.machine.mesh import Layout
from paraplan.ir.machine.rank_groups import holding_of, holdings
from paraplan.ir.model.program import Program
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.plan import Plan
from paraplan.runtime.batch import shard_batch
from paraplan.runtime.executing.executor import Executor, make_tapes
from paraplan.runtime.executing.instructions import COPY_KERNELS, INSTR
from paraplan.runtime.rank import Rank
from paraplan.runtime.state.params import cut
from paraplan.runtime.transport.transport import Handle, UnevenRoute


class Blank:
    """Zeros for every parameter and buffer."""

    def __init__(self, program: Program) -> None:
        self._specs = {f"param:{name}": entry.spec for name, entry in program.params.items()}
        self._specs |= {f"buffer:{name}": spec for name, spec in program.buffers.items()}

    def shard(self, name: str, layout: Layout, mesh_shape: tuple[int, ...], coordinates: tuple[int, ...]) -> Tensor:
        """A rank's part."""
        spec = self._specs[name]
        return cut(
            torch.zeros((), dtype=getattr(torch, spec.dtype)).expand(spec.shape), layout, mesh_shape, coordinates
        )


class SleepingPort:
    """A rank's messages."""

    def __init__(
        self, program: RankProgram, place: int, costs: Costs, scale: float, streams: Streams, meeting: Meeting
    ) -> None:
        self._streams, self._meeting = streams, meeting
        transfers = program.transfers.values()
        parts = Counter((transfer.message, transfer.sends) for transfer in transfers)
        self._seconds = {
            (transfer.message, transfer.sends, transfer.peers[place]): scale
            * parts[transfer.message, transfer.sends]
            * costs.moves.message_s(transfer)
            for transfer in transfers
        }

    def send(self, x: Tensor, peer: int, what: str) -> Handle:
        """Start to send."""
        return self._begin(x, peer, what, True)

    def receive(self, out: Tensor, peer: int, what: str) -> Handle:
        """Start to receive."""
        return self._begin(out, peer, what, False)

    def _begin(self, x: Tensor, peer: int, what: str, sends: bool) -> Handle:
        handle = Handle(x, what)
        seconds = self._seconds[what.rpartition(" of microbatch ")[0], sends, peer]
        flight = Flight(
            self._streams.clock.at, seconds, lambda begin, takes: self._meeting.between(peer, sends, begin, takes)
        )
        self._streams.issue(f"p2p:{'to' if sends else 'from'}:{peer}", flight, handle)
        return handle

    def ready(self, handle: Handle) -> bool:
        """Waits."""
        if not handle.done:
            self._streams.wait(handle)
        return True

    def issue(
        self, kind: str, x: Tensor, reduction: str, axis: int, in_place: bool = False, route: UnevenRoute | None = None
    ) -> Handle:
        """Only recordings issue collectives through a port."""
        raise NotImplementedError("kernels are asleep: nothing is recorded")


class SleepingExecutor(Executor):
    """An executor that takes the time of the kernels it calls itself: sums of gradients, parts cut out to be sent."""

    def take_time(self, clock: Clock, costs: Costs, scale: float) -> None:
        """Whose clock, and what things cost."""
        self._clock, self._costs, self._scale = clock, costs, scale

    def _accumulate(self, step: Step) -> Tensor:
        grows = step.args[0] in self.outer
        total = super()._accumulate(step)
        if grows:
            held = _spec(total)
            seconds = self._costs.op_s("aten.add_.Tensor", ("%0", "%1"), {}, (held, held), (held,))
            self._clock.busy(self._scale * seconds)
        return total

    def _begin_message(self, step: Step) -> None:
        transfer: PeerTransfer = self.program.transfers[step.transfer]
        if transfer.starts:
            self._clock.busy(self._scale * self._costs.memory_s(transfer.nbytes, transfer.nbytes))
        super()._begin_message(step)


class SleepingRank:
    """One rank of a plan.

    Args:
        plan, programs, simulation: of the plan; the simulation says what an update takes.
        rank: which.
        meeting: with the others.
        scale: how many times longer than predicted everything takes.
        groups: as of a transport; None where no process groups are there.
        sleeps: whether clocks are kept to.
    """

    def __init__(
        self,
        plan: Plan,
        programs: tuple[RankProgram, ...],
        simulation: Simulation,
        rank: int,
        meeting: Meeting,
        *,
        scale: float = 1.0,
        groups: tuple[str, ...] | None = None,
        sleeps: bool = True,
    ) -> None:
        index = plan.schedule.rank_class[rank]
        self.plan, self.program, self.costs, self.scale = plan, programs[index], plan_costs(plan)[index], scale
        self.clock, self.meeting = Clock(sleeps), meeting
        self.streams = Streams(self.clock)
        updates = [span.busy_s for span in simulation.traces[index].spans if span.label == "update"]
        staged = sum(step.staged is not None for step in self.program.steps)
        self.update_s, later = sum(updates[: len(updates) - staged]), cycle(updates[len(updates) - staged :])
        mesh = holding_of(holdings(plan), rank).mesh
        coordinates = mesh.coordinates(rank)
        modules = build_modules(self.program, groups)
        tapes = make_tapes(self.program, modules)
        for name, block in self.program.blocks.items():
            put_to_sleep(modules[name], block, self)
        place = place_of(coordinates, mesh.shape)
        port = SleepingPort(self.program, place, self.costs, scale, self.streams, meeting)
        copier = ClockedCopier(self.streams, self.copy_s, sleeps, rank)
        executor = SleepingExecutor(self.program, modules, coordinates, port, rank, tapes=tapes, copier=copier)
        executor.take_time(self.clock, self.costs, scale)
        executor.update_with(lambda step, outer: self.clock.busy(scale * next(later)))
        self.rank = Rank(plan, executor, Blank(plan.program), 0)
        self.executor = executor

    def copy_s(self, tier: str, nbytes: int, from_host: bool, both_ways: bool) -> float:
        """Seconds of a copy."""
        return self.scale * self.costs.moves.copy_s(tier, nbytes, from_host, both_ways)

    def ready(self) -> None:
        """Bind a batch."""
        specs = {name: entry.spec for name, entry in self.plan.program.batch.items()}
        batch = {name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()}
        self.rank.start(shard_batch(self.plan, self.rank.stage, self.executor.coordinates, batch))

    def step(self, begin: float) -> float:
        """A step from `begin` on, as `Trainer.step` and an optimizer take it: when it is over by this rank's clock."""
        self.clock.at = begin
        self.clock.keep(begin)
        self.executor.run(self.rank.before)
        self.clock.busy(self.scale * self.update_s)
        self.executor.run(self.rank.tail())
        self.clock.keep(self.clock.at)
        return self.streams.end


def put_to_sleep(module: fx.GraphModule, block: Block, rank: SleepingRank) -> None:
    """Every leaf of an emitted block takes its price and makes tensors of its shapes; copies are the copier's."""
    for node in module.graph.nodes:
        if INSTR in node.meta and node.target not in COPY_KERNELS and node.target is not operator.getitem:
            instr = block.instrs[node.meta[INSTR]]
            many = any(user.target is operator.getitem for user in node.users) or len(instr.outs) > 1
            leaf = _leaf(block, instr, rank, many)
            leaf.__name__ = leaf.__qualname__ = f"asleep_{node.meta[INSTR]}"
            node.target = leaf
    module.recompile()


def _leaf(block: Block, instr: Instr, rank: SleepingRank, many: bool) -> Callable[..., Any]:
    clock, streams = rank.clock, rank.streams
    made = [None if name is None else block.values[name] for name in instr.outs]
    seconds = rank.scale * rank.costs.instr_s(block, instr)
    if instr.kind is InstrKind.WAIT:

        def waited(issued: Tensor, *held: Tensor) -> Tensor:
            streams.wait(issued)
            return issued

        return waited

    def outputs() -> list[Tensor | None]:
        return [
            None if x is None else torch.empty_strided(x.shape, x.strides, dtype=getattr(torch, x.dtype)) for x in made
        ]

    if instr.kind is InstrKind.COLLECTIVE:
        overwrites = block.values[instr.outs[0] or ""].base != instr.outs[0]
        stream = rank.costs.stream(instr)

        def issued(x: Tensor, *more: Any) -> Any:
            result = x if overwrites else outputs()[0]
            meet = lambda begin, takes: (rank.meeting.over(instr.axis, begin), takes)  # noqa: E731
            streams.issue(stream, Flight(clock.at, seconds, meet), result)
            clock.busy(rank.costs.instr_taken_s(block, instr))
            return result

        return issued

    def kernel(*args: Any, **kwargs: Any) -> Any:
        clock.busy(seconds)
        results = outputs()
        return results if many else results[0] if results else None

    return kernel


def _spec(x: Tensor) -> TensorSpec:
    return TensorSpec(str(x.dtype).removeprefix("torch."), tuple(x.shape))


def step_by_threads(plan: Plan, programs: tuple[RankProgram, ...], simulation: Simulation) -> float:
    """What a step takes by the ranks' clocks, every rank a thread and none sleeping."""
    board = Board()
    ranks = [
        SleepingRank(plan, programs, simulation, rank, ThreadMeeting(board, plan, rank), sleeps=False)
        for rank in range(plan.cluster.num_devices)
    ]
    ends: dict[int, float] = {}
    faults: list[Exception] = []

    def run(number: int, rank: SleepingRank) -> None:
        try:
            rank.ready()
            ends[number] = rank.step(0.0)
        except Exception as fault:  # noqa: BLE001  (raised below)
            faults.append(fault)

    threads = [threading.Thread(target=run, args=each) for each in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in ranks:
        rank.streams.close()
    if faults:
        raise faults[0]
    return max(ends.values())
