"""Bytes alive on a rank as its program runs, and the sequence of entries a recording must equal.

Storages are counted as `ir.execution.rank_program` says: one lives while an outer name or a name of the running block
holds it. Block calls are replayed from profiles (see `block_replay`), so a step costs little however many
instructions it has. Limits: the allocator's rounding and fragmentation are not modelled here; a storage has
the bytes its `LocalValue` or `OuterValue` says. Tiers (host, disk) are accounts of their own beside the device's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from paraplan.cost_models.simulator.block_replay import NO_EFFECT, ArgState, MemoryBlock, MemoryProfile
from paraplan.cost_models.simulator.step_memory import Bytes, HeldTensor, StepMemory, Storage
from paraplan.ir.errors import CostModelError
from paraplan.ir.execution.entry import Entry
from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import MESSAGES, InstrKind, RankProgram, Step, StepKind
from paraplan.ir.process.memo import SESSION, Lately, Same

_BLOCKS: Lately[MemoryBlock] = SESSION.lately("live_bytes.blocks", 50_000, lambda block: 1 + len(block.block.instrs))


class MemoryWalk:
    """The outer namespace of one rank while its steps are taken in order."""

    def __init__(self, program: RankProgram) -> None:
        self.program = program
        self.blocks = {
            name: _BLOCKS.get(Same(block), partial(MemoryBlock, block)) for name, block in program.blocks.items()
        }
        self.outer: dict[Name, HeldTensor] = {}
        self.levels = Bytes({tier: program.update_bytes(tier)[0] for tier in ("", *program.update_tiers)})
        for name, value in program.outer.items():
            self._bind(name, HeldTensor(Storage(value.nbytes, value.tier), value.dtype, value.shape), Bytes())
            self.levels[value.tier] += value.nbytes
        self.taken = 0
        self._beside = Bytes()

    @property
    def live(self) -> int:
        """Bytes alive on the device."""
        return self.levels[""]

    def advance(self, step: Step) -> StepMemory:
        """Take one step.

        Raises:
            CostModelError: the step names a value or block that does not exist, with its place.
        """
        try:
            result = _TAKE[step.kind](self, step)
        except KeyError as fault:
            where = f"step {self.taken} ({step.action}, {step.kind.value})"
            raise CostModelError(f"{where}: nothing is called {fault}") from None
        self.taken += 1
        if self._beside and not step.late:
            result = self._with_beside(result)
        if step.late or step.kind is StepKind.UPDATED:
            self._beside = Bytes(
                {self.program.update_tier(step): self.program.update_workspace(step)} if step.late else {}
            )
        for tier, part in (("", result), *result.tiers.items()):
            self.levels[tier] = part.after
        return result

    def _with_beside(self, result: StepMemory) -> StepMemory:
        """What a step did to memory, with the workspace of an update that runs beside it."""
        tiers = {tier: part._replace(peak=part.peak + self._beside[tier]) for tier, part in result.tiers.items()}
        return result._replace(tiers=tiers)

    def _bind(self, name: Name, held: HeldTensor, died: Bytes) -> None:
        """Give a name to a value; what dies because the name meant something else is added to `died`."""
        held.storage.names += 1
        if name in self.outer:
            self._give_up(name, died)
        self.outer[name] = held

    def _give_up(self, name: Name, died: Bytes) -> None:
        """Take a name away; what dies if nothing else holds it is added to `died`."""
        storage = self.outer.pop(name).storage
        storage.names -= 1
        if not storage.names:
            died[storage.tier] += storage.nbytes

    def _without(self, died: Bytes) -> dict[str, StepMemory]:
        """What a step that is no call did to the tiers: these bytes died."""
        return {
            tier: StepMemory(
                before=self.levels[tier],
                after=self.levels[tier] - died[tier],
                peak=self.levels[tier],
                dropped=died[tier],
            )
            for tier in self.levels
            if tier
        }

    def _call(self, step: Step) -> StepMemory:
        block = self.blocks[step.block]
        if len(step.args) != len(block.block.inputs) or len(step.outs) != len(block.results):
            raise CostModelError(
                f"step {self.taken} ({step.action}): block {step.block} takes {len(block.block.inputs)} values and "
                f"gives {len(block.results)}, but {len(step.args)} and {len(step.outs)} are bound"
            )
        outer = self.outer
        held = [outer[name] for name in step.args]
        first: dict[int, int] = {}
        places = [first.setdefault(id(value.storage), at) for at, value in enumerate(held)]
        dropped = Bytes()
        for name in step.drops:
            # What the block is passed dies inside of it.
            self._give_up(name, Bytes() if id(outer[name].storage) in first else dropped)
        states = tuple(
            [(place, value.storage.names == 0, value.storage.nbytes) for place, value in zip(places, held, strict=True)]
        )
        profile = block.profile(states, tuple([name is not None for name in step.outs]))
        overwritten = self._take_results(step, block, held)
        tiers = {}
        if len(self.levels) > 1 or profile.tiers:
            away = dict(profile.tiers)
            tiers = {
                tier: self._called(tier, away.get(tier, NO_EFFECT), dropped, overwritten)
                for tier in sorted(({*self.levels} | {*away}) - {""})
            }
        return self._called("", profile, dropped, overwritten, states, tiers)

    def _called(
        self,
        tier: str,
        profile: MemoryProfile,
        dropped: Bytes,
        overwritten: Bytes,
        args: tuple[ArgState, ...] = (),
        tiers: dict[str, StepMemory] | None = None,
    ) -> StepMemory:
        """What a call did to one tier."""
        before = self.levels[tier]
        start = before - dropped[tier]
        return StepMemory(
            before=before,
            after=start + profile.net - overwritten[tier],
            peak=max(before, start + profile.peak),
            dropped=dropped[tier] + profile.begin_drop,
            overwritten=overwritten[tier],
            profile=profile,
            args=args,
            tiers=tiers or {},
        )

    def _take_results(self, step: Step, block: MemoryBlock, held: list[HeldTensor]) -> Bytes:
        made: dict[str, Storage] = {}
        results: list[tuple[Name, HeldTensor]] = []
        for name, lies in zip(step.outs, block.results_as, strict=True):
            if name is None or lies is None:
                continue
            if lies.argument >= 0:
                storage = held[lies.argument].storage
            elif (known := made.get(lies.owner)) is not None:
                storage = known
            else:
                storage = made[lies.owner] = Storage(lies.nbytes, lies.tier)
            storage.names += 1  # all results are held at once before any old meaning of a name is given up
            results.append((name, HeldTensor(storage, lies.dtype, lies.shape)))
        died = Bytes()
        for outer, value_held in results:
            self._bind(outer, value_held, died)
        for _, value_held in results:
            value_held.storage.names -= 1
            died[value_held.storage.tier] += 0 if value_held.storage.names else value_held.storage.nbytes
        return died

    def _accumulate(self, step: Step) -> StepMemory:
        total, addend = step.args
        value = self.outer[addend]
        moved, died = total not in self.outer, Bytes()
        if moved:
            self._bind(total, value, died)
        for name in (addend, *(name for name in step.drops if name != addend)):
            self._give_up(name, died)
        return StepMemory(
            before=self.live,
            after=self.live - died[""],
            peak=self.live,
            dropped=died[""],
            moved=moved,
            held=self.outer[total],
            added=value.dtype,
            tiers=self._without(died),
        )

    def _drop(self, step: Step) -> StepMemory:
        return self._given_up(step, 0)

    def _allocate(self, step: Step) -> StepMemory:
        """SEND and RECV: a copy of what is sent, the room for what is received."""
        transfer, made, died = self.program.transfers[step.transfer], 0, Bytes()
        for source in step.args:
            self.outer[source]
        for out in step.outs:
            if out is not None:
                made += transfer.nbytes
                self._bind(out, HeldTensor(Storage(transfer.nbytes), transfer.dtype, transfer.shape), died)
        return StepMemory(
            before=self.live,
            after=self.live + made - died[""],
            peak=self.live + made,
            dropped=died[""],
            made=made,
            tiers=self._without(died),
        )

    def _update(self, step: Step) -> StepMemory:
        tier = self.program.update_tier(step)
        return self._given_up(step, self.program.update_workspace(step), tier)

    def _given_up(self, step: Step, workspace_bytes: int, on: str = "") -> StepMemory:
        died = Bytes()
        for name in step.drops:
            self._give_up(name, died)
        tiers = self._without(died)
        if on:
            tiers[on] = tiers[on]._replace(peak=tiers[on].peak + workspace_bytes)
        return StepMemory(
            before=self.live,
            after=self.live - died[""],
            peak=self.live + (0 if on else workspace_bytes),
            dropped=died[""],
            tiers=tiers,
        )


def peak_bytes(program: RankProgram) -> int:
    """The most bytes alive on the device at once: what a simulation of the rank finds.

    Raises:
        CostModelError: a step names something that does not exist.
    """
    walk = MemoryWalk(program)
    return max((walk.live, *(walk.advance(step).peak for step in program.steps)))


_TAKE = {
    StepKind.CALL: MemoryWalk._call,
    StepKind.ACCUMULATE: MemoryWalk._accumulate,
    StepKind.DROP: MemoryWalk._drop,
    StepKind.UPDATE: MemoryWalk._update,
    StepKind.UPDATED: MemoryWalk._drop,
    StepKind.SEND: MemoryWalk._allocate,
    StepKind.RECV: MemoryWalk._allocate,
    StepKind.AWAIT: MemoryWalk._drop,
}


def entries(program: RankProgram) -> Iterator[Entry]:
    """Everything a rank does in one step, line by line: what its recording must equal (see `ir.execution.entry`).

    Raises:
        CostModelError: a step names something that does not exist.
    """
    walk = MemoryWalk(program)
    for step in program.steps:
        memory = walk.advance(step)
        if step.kind is StepKind.CALL:
            yield from _call_entries(step, memory, walk.blocks[step.block])
        elif step.kind is StepKind.DROP:
            yield from _drop_entry(step, memory.dropped, _dropped(memory))
        elif step.kind in MESSAGES:
            transfer = program.transfers[step.transfer]
            shapes = tuple(transfer.shape for name in step.outs if name is not None)
            yield _entry(
                step,
                step.kind.value,
                shapes=shapes,
                allocated_bytes=memory.made,
                freed_bytes=memory.dropped,
                collective=transfer.message,
                tiers=_in_use(_dropped(memory)),
            )
        else:
            shapes = (memory.held.shape,) if memory.held is not None else ()
            yield _entry(
                step, step.kind.value, shapes=shapes, freed_bytes=memory.dropped, tiers=_in_use(_dropped(memory))
            )


Tiers = tuple[tuple[str, int, int], ...]


def _in_use(tiers: Tiers) -> Tiers:
    """As an entry says it: the tiers where anything was done."""
    return tuple(each for each in tiers if each[1] or each[2])


def _dropped(memory: StepMemory) -> Tiers:
    return tuple((tier, 0, part.dropped) for tier, part in sorted(memory.tiers.items()))


def _call_entries(step: Step, memory: StepMemory, block: MemoryBlock) -> Iterator[Entry]:
    profile = memory.profile
    assert profile is not None
    yield from _drop_entry(step, memory.dropped, _dropped(memory), step.block)
    for index, instr in enumerate(block.block.instrs):
        is_collective = instr.kind is InstrKind.COLLECTIVE
        yield _entry(
            step,
            "wait" if instr.kind is InstrKind.WAIT else instr.target,
            shapes=block.shapes[index],
            allocated_bytes=profile.allocated[index],
            freed_bytes=profile.freed[index],
            collective=f"{instr.target}@{instr.axis}" if is_collective else "",
            note=f"{step.block}[{index}]",
            tiers=_in_use(tuple((tier, of.allocated[index], of.freed[index]) for tier, of in profile.tiers)),
        )
    ended = tuple(
        (tier, 0, (part.profile.end_drop if part.profile else 0) + part.overwritten)
        for tier, part in sorted(memory.tiers.items())
    )
    yield from _drop_entry(step, profile.end_drop + memory.overwritten, ended, step.block)


def _drop_entry(step: Step, freed_bytes: int, tiers: Tiers, note: str = "") -> Iterator[Entry]:
    used = _in_use(tiers)
    if freed_bytes or used:
        yield _entry(step, "drop", freed_bytes=freed_bytes, tiers=used, note=note)


def _entry(
    step: Step,
    target: str,
    *,
    shapes: tuple[tuple[int, ...], ...] = (),
    allocated_bytes: int = 0,
    freed_bytes: int = 0,
    collective: str = "",
    tiers: Tiers = (),
    note: str = "",
) -> Entry:
    return Entry(
        action=step.action,
        segment=step.segment,
        microbatch=step.microbatch,
        target=target,
        shapes=shapes,
        allocated_bytes=allocated_bytes,
        freed_bytes=freed_bytes,
        collective=collective,
        tiers=tiers,
        note=note,
    )


def live_bytes(program: RankProgram) -> Iterator[int]:
    """Bytes alive on the device after each entry of `entries(program)`, the start's not included."""
    live = program.optimizer_bytes + sum(value.nbytes for value in program.outer.values() if not value.tier)
    for entry in entries(program):
        live += entry.allocated_bytes - entry.freed_bytes
        yield live
