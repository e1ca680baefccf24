"""Takes a rank's steps: binds calls, accumulates, drops, and gives what a call gives up to the block itself.

Steps are taken one way. `run` has blocks run as they were emitted (fast); `record` is a generator that plays them
instruction by instruction before an observer (an account, a clock) and yields while a collective is under way, so one
thread can step all ranks of a plan.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from paraplan.ir.errors import ParaplanError, RuntimeFailure
from paraplan.ir.execution import names as outer_names
from paraplan.ir.execution.name import Name, Role
from paraplan.ir.execution.offsets import offset_value, place_of
from paraplan.ir.execution.rank_program import MESSAGES, Block, RankProgram, Step, StepKind
from paraplan.ir.model.seeds import segment_seed
from paraplan.ir.model.sources import Locate, no_source
from paraplan.kernels.dtypes import dtype_name
from paraplan.runtime.executing.instructions import INSTR, grow_
from paraplan.runtime.executing.interpret import Player, Tape, make_tape
from paraplan.runtime.executing.observers import Account, Observer
from paraplan.runtime.executing.plain import plainly
from paraplan.runtime.transport.tier_copies import Copier, TierTensor
from paraplan.runtime.transport.transport import Handle, Port

Modules = Mapping[str, fx.GraphModule]
Recording = Generator[None, None, None]
Updater = Callable[[Step, Mapping[Name, Any]], None]
_UNSEEN = Observer()


class Late(Protocol):
    """What does late updates (`late.LateUpdates`)."""

    def begin(self) -> None:
        """Begin the update that is due, if one is."""

    def end(self) -> None:
        """Wait for it."""


class Executor:
    """One rank of a program.

    Args:
        program: of the rank's class.
        modules: its blocks, emitted (`codegen.build_modules`).
        coordinates: the rank's place on the mesh.
        port: where collectives go when recording; emitted modules reach their process groups themselves.
        rank: for messages.
        locate: (block, index of the joint graph's op) -> the user's source line.
        tapes: of the modules, where they are made already.
        copier: makes copies to and from tiers; left out, one that makes them at once.

    Attributes:
        account: what was done, and the memory it took, while recording.
        updater: does an UPDATE of what was brought for it, given this executor's outer values.
    """

    def __init__(
        self,
        program: RankProgram,
        modules: Modules,
        coordinates: tuple[int, ...],
        port: Port,
        rank: int = 0,
        locate: Locate = no_source,
        tapes: Mapping[str, Tape] | None = None,
        copier: Copier | None = None,
    ) -> None:
        self.program, self.coordinates, self.port, self.rank = program, coordinates, port, rank
        self.modules: dict[str, Callable[[list[Any]], Any]] = dict(modules)
        self.tapes = make_tapes(program, modules) if tapes is None else tapes
        self.outer: dict[Name, Any] = {}
        self.copier = Copier(rank=rank) if copier is None else copier
        self.account = Account()
        self.updater: Updater | None = None
        self._late: Late | None = None
        self._locate = locate
        self._player = Player(port)
        self._place = place_of(coordinates, program.mesh_shape)
        self._messages: dict[tuple[str, int], Handle] = {}
        self._seeds = [(name, int(each.source)) for name, each in program.outer.items() if each.role is Role.SEED]

    def update_with(self, updater: Updater | None = None, late: Late | None = None) -> None:
        """Who does updates: of what is brought for them, and late ones; None leaves it as it is."""
        self.updater, self._late = updater or self.updater, late or self._late

    def replace_blocks(self, blocks: Mapping[str, Callable[[list[Any]], Any]]) -> None:
        """Run these instead of what was emitted; what is observed is played as it was emitted."""
        self.modules.update(blocks)

    def bind(self, values: Mapping[Name, Tensor]) -> None:
        """Put tensors into the outer namespace.

        Raises:
            RuntimeFailure: one has another shape or dtype than the program says.
        """
        for name, tensor in values.items():
            said = self.program.outer[name]
            dtype = dtype_name(tensor.dtype)
            if (dtype, tuple(tensor.shape)) != (said.dtype, said.shape):
                raise RuntimeFailure(
                    f"rank {self.rank}: {name} is {dtype}{tuple(tensor.shape)}, "
                    f"the program expects {said.dtype}{said.shape}"
                )
            if said.tier:
                shared = said.role is Role.STATE and not said.nbytes  # the parameter's own storage
                away = self.outer[outer_names.param(said.source)] if shared else self.copier.kept(tensor, said.tier)
                self.outer[name] = away
            else:
                self.outer[name] = tensor

    def seed(self, base: int, step: int) -> None:
        """Give segments their random seeds of a step, in the memory that they have where they have any."""
        for name, segment in self._seeds:
            seed, held = segment_seed(base, step, segment), self.outer.get(name)
            if held is None:
                self.outer[name] = torch.full((), seed, dtype=torch.int64, device=self.copier.device)
            else:
                held.fill_(seed)

    def inputs(self, step: Step) -> list[Any]:
        """What a call is given: its arguments, its offsets, the copier; names the step drops are given up."""
        given: list[Any] = [self.outer[name] for name in step.args]
        for name in step.drops:
            del self.outer[name]
        tape = self.tapes[step.block]
        given += [offset_value(text, self.coordinates, max(step.microbatch, 0)) for text in tape.offsets]
        return [*given, self.copier] if tape.copies else given

    def run(self, steps: Iterable[Step]) -> None:
        """Take steps, fast: blocks are run as they were emitted, and nobody is told of their instructions.

        Raises:
            RuntimeFailure: a step failed; names rank, action, op and source line.
        """
        with plainly():
            for _ in self._take(steps, None):
                raise RuntimeFailure(
                    f"rank {self.rank} waits for a rank of this process, which is to be stepped with it"
                )

    def record(self, steps: Iterable[Step], observer: Observer | None = None) -> Recording:
        """Take steps one instruction at a time; yields while waiting for a peer.

        Args:
            steps: to take.
            observer: is told of each; left out, `account`, to whose ledger the caller keeps a `Tracker` booked.
        Raises:
            RuntimeFailure: as `run`.
        """
        yield from self._take(steps, self.account if observer is None else observer)

    def _take(self, steps: Iterable[Step], observer: Observer | None) -> Recording:
        """Take steps; blocks instruction by instruction where somebody observes."""
        plays, observer = observer is not None, observer or _UNSEEN
        for step in steps:
            kind, self._player.index = step.kind, -1
            try:
                observer.begin(step)
                if kind is StepKind.CALL:
                    given: list[Any] = self.inputs(step)
                    if plays:
                        tape = self.tapes[step.block]
                        for position in tape.unread:
                            given[position] = None
                        observer.dropped()
                        results: Any = yield from self._player.play(tape, given, step, observer)
                        observer.begin(step)
                    else:
                        module = self.modules[step.block]
                        results = module.forward(given) if isinstance(module, fx.GraphModule) else module(given)
                    for name, value in zip(step.outs, results, strict=True):
                        if name is not None and value is not None:
                            self.outer[name] = value
                    results = value = None
                    observer.dropped()
                elif kind is StepKind.ACCUMULATE:
                    observer.made((self.outer[step.args[1]],))
                    self._accumulate(step)
                    observer.taken("accumulate")
                elif kind in MESSAGES:
                    yield from self._exchange(step)
                    observer.made([self.outer[name] for name in step.outs if name is not None])
                    self._drop(step)
                    observer.taken(kind.value, self.program.transfers[step.transfer].message)
                else:
                    self._update(step)
                    self._drop(step)
                    if kind in (StepKind.UPDATE, StepKind.UPDATED):
                        observer.taken(kind.value)
                    else:
                        observer.dropped()
            except ParaplanError:
                self._give_up()
                raise
            except Exception as fault:
                self._give_up()
                index = self._player.index if plays else _failed_instr(fault, self.modules.get(step.block))
                raise self._failure(step, index, fault) from fault

    def _exchange(self, step: Step) -> Recording:
        """Begin a message, or wait for one."""
        if step.kind is StepKind.AWAIT:
            handle = self._messages.pop((step.transfer, step.microbatch))
            while not self.port.ready(handle):
                yield
        else:
            self._begin_message(step)

    def _update(self, step: Step) -> None:
        if step.staged is not None:
            assert self.updater is not None, "an optimizer was made"
            self.updater(step, self.outer)
        elif self._late is not None and (step.late or step.kind is StepKind.UPDATED):
            self._late.begin() if step.late else self._late.end()

    def _drop(self, step: Step) -> None:
        for name in step.drops:
            if name in self.outer or step.kind is not StepKind.UPDATED:  # what was flushed is gone
                del self.outer[name]

    def _begin_message(self, step: Step) -> None:
        """SEND and RECV."""
        transfer = self.program.transfers[step.transfer]
        peer, what = transfer.peers[self._place], f"{transfer.message} of microbatch {step.microbatch}"
        x = None if step.kind is StepKind.RECV else self.outer[step.args[0]]
        for name in step.outs:
            if name is not None:
                dtype = getattr(torch, transfer.dtype)
                made = torch.empty(transfer.shape, dtype=dtype, device=self.copier.device if x is None else x.device)
                if x is not None and peer >= 0:
                    made.copy_(_part(x, transfer.starts[self._place], transfer.shape))
                self.outer[name] = x = made
        assert x is not None
        if peer < 0:
            handle = Handle(x, what, done=True)
        elif transfer.sends:
            handle = self.port.send(x, peer, what)
        else:
            handle = self.port.receive(x, peer, what)
        self._messages[step.transfer, step.microbatch] = handle

    def _accumulate(self, step: Step) -> Tensor:
        total, addend = step.args
        value = self.outer.pop(addend)
        if total in self.outer:
            grow_(self.outer[total], value)
        else:
            self.outer[total] = value
        return self.outer[total]

    def _give_up(self) -> None:
        """After a failure: what the step has on tiers goes."""
        self.copier.abandon()
        for name in [name for name, value in self.outer.items() if isinstance(value, TierTensor)]:
            if name not in self.program.outer:
                del self.outer[name]

    def _failure(self, step: Step, index: int, fault: Exception) -> RuntimeFailure:
        where = f"rank {self.rank}, action {step.action}"
        if step.kind is StepKind.CALL:
            where += f", segment {step.segment}, {describe(self.program.blocks[step.block], index, self._locate)}"
        else:
            where += f", {step.kind.value} of {', '.join(map(str, step.args or step.drops))}"
        return RuntimeFailure(f"{where}: {type(fault).__name__}: {fault}")


def _part(x: Tensor, starts: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """A rectangle of a tensor, as a view."""
    return x[tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))]


def make_tapes(program: RankProgram, modules: Modules) -> dict[str, Tape]:
    """A program's blocks, ready to be played; executors of equal programs can share them."""
    return {name: make_tape(modules[name], block) for name, block in program.blocks.items()}


def describe(block: Block, index: int, locate: Locate) -> str:
    """An instruction in words: "k2.0.F[17] aten.mm.default (model.py:12, in forward: x @ w)".

    Args:
        block, index: where the instruction is.
        locate: (block, op of the joint graph) -> the user's line.
    """
    if not 0 <= index < len(block.instrs):
        return block.name
    instr = block.instrs[index]
    source = f" ({locate(block, instr.origin)})" if instr.origin >= 0 else ""
    return f"{block.name}[{index}] {instr.target}{source}"


def _failed_instr(fault: Exception, module: object) -> int:
    """Which instruction of an emitted module raised: the node assigned on the generated line; -1 if unknown."""
    if not isinstance(module, fx.GraphModule):
        return -1
    names = {node.name: node.meta.get(INSTR, -1) for node in module.graph.nodes}
    for frame in traceback.extract_tb(fault.__traceback__):
        if "eval_with_key" in frame.filename and frame.lineno is not None:
            text = linecache.getline(frame.filename, frame.lineno)
            name = text.split("=")[0].split(":")[0].strip()
            if name in names:
                return names[name]
    return -1
