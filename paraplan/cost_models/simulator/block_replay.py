"""A block made ready for replay: what it does to storages and to streams, worked out once.

A 126-layer model calls one block 126 times a microbatch. Its events on streams do not depend on the call;
its effect on memory does only through which inputs share storage, which of them the caller has given up, and
which results it takes. So each block is read once, and each such situation ("signature") once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from paraplan.cost_models.costs import Costs
from paraplan.cost_models.ops.fusion import fused_kernels
from paraplan.ir.errors import CostModelError
from paraplan.ir.execution.rank_program import Block, InstrKind, is_compiled
from paraplan.ir.execution.streams import COMPUTE, Stream
from paraplan.ir.model.graph import refs
from paraplan.ir.model.storages import BEGIN, BlockStorages

# Per argument: (position of the first argument with the same storage, whether no outer name holds it, its bytes).
ArgState = tuple[int, bool, int]


@dataclass(frozen=True)
class MemoryProfile:
    """What a call does to memory, in one situation.

    Attributes:
        begin_drop: bytes that die as the call begins.
        allocated, freed: bytes per instruction.
        end_drop: bytes that die as the call ends.
        net: bytes alive after the call minus before.
        peak: the most bytes alive inside the call, above those alive before it.
        peak_instr: the instruction that reaches it (-1: the block has none).
        tiers: the same of every tier the block has values on, by name.
    """

    begin_drop: int
    allocated: tuple[int, ...]
    freed: tuple[int, ...]
    end_drop: int
    net: int
    peak: int
    peak_instr: int
    tiers: tuple[tuple[str, MemoryProfile], ...] = ()


_PROFILES = 64
"""Situations remembered of a block, which a search's plans share."""

NO_EFFECT = MemoryProfile(begin_drop=0, allocated=(), freed=(), end_drop=0, net=0, peak=0, peak_instr=-1)
"""Of a block on a tier it has no values on."""


class ResultAs(NamedTuple):
    """Where a result of a block lies.

    Attributes:
        argument: the position of that whose storage it lies in; -1 for one the block makes.
        owner, nbytes, tier: of that one.
        dtype, shape: of the result.
    """

    argument: int
    owner: str
    nbytes: int
    tier: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class MemoryBlock(BlockStorages):
    """A block's storages, and what calls of it do to memory."""

    _profiles: dict[object, MemoryProfile] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def tiers(self) -> tuple[str, ...]:
        """Tiers the block has values on, by name."""
        return tuple(sorted({value.tier for value in self.block.values.values()} - {""}))

    @cached_property
    def results_as(self) -> tuple[ResultAs | None, ...]:
        """Per result, where it lies; None where there is none."""
        inputs, values = {name: at for at, name in enumerate(self.block.inputs)}, self.block.values
        found: list[ResultAs | None] = []
        for name in self.results:
            if name is None:
                found.append(None)
                continue
            owner, value = self.owners[name], values[name]
            at, nbytes = inputs.get(owner, -1), self.storage_bytes.get(owner, 0)
            found.append(ResultAs(at, owner, nbytes, values[owner].tier, value.dtype, value.shape))
        return tuple(found)

    @cached_property
    def shapes(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Per instruction, local shapes of its outputs."""
        values = self.block.values
        return tuple(tuple(values[name].shape for name in instr.outs if name) for instr in self.block.instrs)

    def profile(self, args: tuple[ArgState, ...], taken: tuple[bool, ...]) -> MemoryProfile:
        """The effect on memory of a call whose arguments are in state `args`, taking the results in `taken`."""
        key = (args, taken)
        if key not in self._profiles:
            if len(self._profiles) == _PROFILES:
                self._profiles.clear()
            away = tuple((tier, self._make_profile(args, taken, tier)) for tier in self.tiers)
            self._profiles[key] = replace(self._make_profile(args, taken, ""), tiers=away)
        return self._profiles[key]

    def ends(self, args: tuple[ArgState, ...], taken: tuple[bool, ...]) -> tuple[dict[str, int], dict[int, int]]:
        """After which instruction of such a call what dies in it dies: what it makes, by owner, and its arguments.

        An argument goes by the position of the first with its storage. BEGIN: as the call begins; len(instrs): as it
        ends. What outlives the call is left out.
        """
        owners, count = self.owners, len(self.block.instrs)
        kept = {owners[name] for name, take in zip(self.results, taken, strict=True) if take and name is not None}
        # Results the caller does not take are held to the end of the block, as results are.
        held = {owners[name] for name in self.results if name is not None} - kept
        made = {
            owner: count if owner in held else min(self.last_hold[owner], count)
            for owner in self.storage_bytes
            if owner not in kept
        }
        given: dict[int, int] = {}
        for index, (first, orphan, _) in enumerate(args):
            if first != index or not orphan:
                continue
            same = [name for name, state in zip(self.block.inputs, args, strict=True) if state[0] == index]
            if not any(name in kept for name in same):
                last = count if any(name in held for name in same) else max(self.last_hold[name] for name in same)
                given[index] = min(last, count)
        return made, given

    def _make_profile(self, args: tuple[ArgState, ...], taken: tuple[bool, ...], tier: str) -> MemoryProfile:
        block = self.block
        freed = [0] * (len(block.instrs) + 1)
        begin_drop = 0
        made, given = self.ends(args, taken)
        for owner, last in made.items():
            if block.values[owner].tier == tier:
                freed[last] += self.storage_bytes[owner]
        for index, last in given.items():
            if block.values[block.inputs[index]].tier != tier:
                continue
            if last == BEGIN:
                begin_drop += args[index][2]
            else:
                freed[last] += args[index][2]
        return self._walk(begin_drop, freed, tier)

    def _walk(self, begin_drop: int, freed: list[int], tier: str) -> MemoryProfile:
        live, peak, peak_instr = -begin_drop, 0, -1
        values = self.block.values
        allocated = tuple(sum(size for name, size in made if values[name].tier == tier) for made in self.fresh)
        for index, instr in enumerate(self.block.instrs):
            live += allocated[index]
            workspace = 0 if tier else instr.workspace_bytes
            if peak_instr < 0 or live + workspace > peak:
                peak, peak_instr = live + workspace, index
            live -= freed[index]
        return MemoryProfile(
            begin_drop=begin_drop,
            allocated=allocated,
            freed=tuple(freed[:-1]),
            end_drop=freed[-1],
            net=live - freed[-1],
            peak=peak,
            peak_instr=peak_instr,
        )


# Events of a block on streams: run compute for a while; issue a collective or a copy; wait for one.
@dataclass(frozen=True)
class Run:
    """Compute busy for `seconds`.

    The host issues its kernels in `issue_s`, and the last has run `issued_s` after it issued the first, however early
    the device was free.
    """

    seconds: float
    issue_s: float = 0.0
    issued_s: float = 0.0


@dataclass(frozen=True)
class Issue:
    """A collective or copy put on `stream` once compute gets here; its end is known as `name`.

    `taken_s` of what compute could do in the meantime it takes for itself; `host_s` of what the host's memory could.
    """

    stream: Stream
    seconds: float
    name: str
    label: str
    taken_s: float = 0.0
    host_s: float = 0.0


@dataclass(frozen=True)
class Wait:
    """Compute stands still until the collective or copy behind `name` has ended."""

    name: str


Event = Run | Issue | Wait


@dataclass(frozen=True)
class TimeBlock:
    """A block's events on streams; consecutive ops are one run.

    Attributes:
        events: in program order.
        work: seconds per stream.
        exported: (result index, name) of issued collectives and copies that leave the block unfinished.
        imported: (argument index, name) of values the block waits for but did not issue.
    """

    events: tuple[Event, ...]
    work: dict[Stream, float]
    exported: tuple[tuple[int, str], ...]
    imported: tuple[tuple[int, str], ...]


class Running:
    """Ops one after another, on the device and as the host issues them."""

    def __init__(self) -> None:
        self.seconds = self.issue_s = self.issued_s = 0.0

    def add(self, seconds: float, issue_s: float) -> None:
        """One more op; it begins when the last has run and the host has issued it."""
        self.seconds += seconds
        self.issue_s += issue_s
        self.issued_s = max(self.issued_s, self.issue_s) + seconds

    @property
    def runs(self) -> list[Event]:
        """These ops as one event; nothing where there are none."""
        return [Run(self.seconds, self.issue_s, self.issued_s)] if self.seconds or self.issue_s else []


def compile_time(block: Block, costs: Costs) -> TimeBlock:
    """A block's events, each instruction priced once.

    Raises:
        CostModelError: a price is refused, or a wait names nothing issued or passed in.
    """
    events: list[Event] = []
    work: dict[Stream, float] = {}
    run = Running()
    issued: set[str] = set()
    waited: set[str] = set()
    fused = _fused_s(block, costs) if costs.compiled and is_compiled(block) else {}
    for index, instr in enumerate(block.instrs):
        seconds, stream = fused.get(index, -1.0), costs.stream(instr)
        seconds = costs.instr_s(block, instr) if seconds < 0 else seconds
        work[stream] = work.get(stream, 0.0) + seconds
        if instr.kind is InstrKind.OP:
            run.add(seconds, 0.0 if index in fused else costs.issue_s(block, instr))
            continue
        events += run.runs
        run = Running()
        if instr.issues:
            name = instr.outs[0] or ""
            issued.add(name)
            taken = costs.instr_taken_s(block, instr)
            work[COMPUTE] = work.get(COMPUTE, 0.0) + taken
            events.append(Issue(stream, seconds, name, instr.target, taken, costs.host_s(block, instr)))
        else:
            name = next(refs(instr.args))
            if name not in issued and name not in block.inputs:
                raise CostModelError(f"block {block.name}: waits for {name!r}, which nothing issued")
            waited.add(name)
            events.append(Wait(name))
    events += run.runs
    results = (*block.outputs, *block.saved)
    return TimeBlock(
        events=tuple(events),
        work=work,
        exported=tuple((index, name) for index, name in enumerate(results) if name in issued - waited and name),
        imported=tuple((index, name) for index, name in enumerate(block.inputs) if name in waited - issued),
    )


def _fused_s(block: Block, costs: Costs) -> dict[int, float]:
    """Seconds of the instructions that are fused: a kernel's with its last, unless its ops take less apart."""
    found: dict[int, float] = {}
    for kernel in fused_kernels(block):
        apart = sum(costs.instr_s(block, block.instrs[index]) for index in kernel.members)
        seconds = costs.memory_s(kernel.read_bytes, kernel.write_bytes)
        if seconds < apart:
            found |= {**dict.fromkeys(kernel.members, 0.0), kernel.members[-1]: seconds}
    return found
