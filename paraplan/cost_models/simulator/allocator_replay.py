"""What a rank's allocator reserves in a step: the step's allocations and frees, replayed over the caching allocator.

The order is that of `live_bytes.MemoryWalk`: what is there before the step first, then instruction by instruction what
a block makes, the workspace of an op (allocated and freed), and what dies. A step's requests are worked out once, those
of a block once in each situation it is called in, and made at least twice, since blocks cached in the first step are
where the second begins: until a step goes by without cached segments being given back for want of room. A device that
has more room than a plan is allowed caches more and reserves more, which says nothing of whether the plan fits.

Limits: those of `allocator`; what libraries allocate for themselves (cuBLAS' workspaces, NCCL's buffers, the context)
is not the allocator's or not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paraplan.cost_models.simulator.allocator import AllocatedBlock, CachingAllocator
from paraplan.cost_models.simulator.block_replay import ArgState, MemoryBlock
from paraplan.cost_models.simulator.live_bytes import MemoryWalk
from paraplan.cost_models.simulator.step_memory import StepMemory, Storage
from paraplan.ir.execution.name import Name, Role
from paraplan.ir.execution.rank_program import RankProgram, Step, StepKind
from paraplan.ir.process.memo import SESSION, Lately, Same

STEPS = 4
"""Steps that are replayed at most."""
ALIKE = 7
"""Programs of as many steps that are remembered: those of plans that differ elsewhere are equal."""
_RESERVED: Lately[list[tuple[RankProgram, int]]] = SESSION.lately("allocator_replay.reserved", 100)
_LAST: Lately[int] = SESSION.lately("allocator_replay.last", 100)


class Request(NamedTuple):
    """One request to the allocator.

    Attributes:
        nbytes: to allocate; 0 to give back.
        number: of what is given back, counted from 0 as it was allocated; -1 where it is allocated and given back at
            once.
    """

    nbytes: int
    number: int = 0


def reserved_bytes(program: RankProgram, capacity_bytes: int) -> int:
    """The most the allocator has reserved at once, in bytes.

    Args:
        program: what the rank runs.
        capacity_bytes: what the device has for it; beyond it cached segments are given back first. Where more than
            that is reserved all the same, the program does not fit.
    Raises:
        CostModelError: the program names what does not exist.
    """
    return _LAST.get((Same(program), capacity_bytes), lambda: _looked_up(program, capacity_bytes))


def _looked_up(program: RankProgram, capacity_bytes: int) -> int:
    alike = _RESERVED.get((len(program.steps), len(program.outer), capacity_bytes), list)
    for known, nbytes in alike:
        if known == program:
            return nbytes
    found = _reserved_bytes(program, capacity_bytes)
    alike[:] = [*alike[-ALIKE:], (program, found)]
    return found


def _reserved_bytes(program: RankProgram, capacity_bytes: int) -> int:
    allocator = CachingAllocator(capacity_bytes)
    states = program.update_bytes("")[0]
    kept = {}
    for name, value in program.outer.items():
        if value.nbytes and not value.tier:
            kept[name] = allocator.allocate(value.nbytes)
    if states:  # made parameter by parameter: slots of its size each
        _states(program, allocator, states)
    step = _step_requests(program, list(kept))
    given_back = 0
    for taken in range(STEPS):
        settled = taken > 1 and allocator.times_given_back == given_back
        if settled or allocator.peak_reserved_bytes > capacity_bytes:
            break
        given_back = allocator.times_given_back
        blocks = _made(allocator, step.requests, list(kept.values()))
        ended = {name: blocks[number] for name, number in step.stays.items()}
        for name in kept:
            if name not in ended:  # the batch of the next step comes anew
                ended[name] = allocator.allocate(program.outer[name].nbytes)
        kept = {name: ended[name] for name in kept}
    return allocator.peak_reserved_bytes


def _made(
    allocator: CachingAllocator, runs: Iterable[tuple[int, Sequence[Request]]], blocks: list[AllocatedBlock]
) -> list[AllocatedBlock]:
    """What was allocated, of which the first blocks are there, by number."""
    allocate, release, keep = allocator.allocate, allocator.release, blocks.append
    for base, requests in runs:
        for nbytes, number in requests:
            if not nbytes:
                release(blocks[base + number])
            elif number < 0:
                allocator.touch(nbytes)
            else:
                keep(allocate(nbytes))
    return blocks


def _states(program: RankProgram, allocator: CachingAllocator, total: int) -> None:
    """The optimizer's states on the device, as tensors of the sizes of what it updates."""
    sizes = [value.nbytes for value in program.outer.values() if value.role is Role.STATE and not value.tier]
    whole = sum(sizes)
    slots = total // whole if whole else 0
    for size in sizes * slots:
        allocator.allocate(size)
    if total > slots * whole:
        allocator.allocate(total - slots * whole)


class _StepRequests(NamedTuple):
    """A step's requests, and the numbers of what outlives it by the names that were there before it.

    Attributes:
        requests: in order, in runs whose numbers are counted from the first of each.
        stays: see above.
    """

    requests: list[tuple[int, Sequence[Request]]]
    stays: dict[Name, int]


def _step_requests(program: RankProgram, given: Sequence[Name]) -> _StepRequests:
    """What a step asks of the allocator, where these names are there before it, numbered in order."""
    replay = _Replay(program, given)
    for step in program.steps:
        replay.take(step)
    return _StepRequests(replay.requests, replay.leave())


class _CallRequests(NamedTuple):
    """What a call of a block asks for in one situation.

    Attributes:
        begins: arguments, by position, that die as it begins.
        parts: of its requests, in order, numbered from 0; after each but the last some arguments die.
        ends: which do, by position.
        results: per result the number of what holds it; -1 where that is an argument's, or nothing.
        left: numbers of what is there as it ends.
        num_held: how many are allocated and not given back at once.
    """

    begins: tuple[int, ...]
    parts: tuple[tuple[Request, ...], ...]
    ends: tuple[tuple[int, ...], ...]
    results: tuple[int, ...]
    left: frozenset[int]
    num_held: int


def _call_requests(block: MemoryBlock, args: tuple[ArgState, ...], taken: tuple[bool, ...]) -> _CallRequests:
    """What a call whose arguments are in state `args`, taking the results in `taken`, asks for."""
    made, ended = block.ends(args, taken)
    deaths: dict[int, list[int]] = {}
    for index, last in ended.items():
        deaths.setdefault(last, []).append(index)
    frees: dict[int, list[str]] = {}
    for owner, last in made.items():
        frees.setdefault(last, []).append(owner)
    parts: list[list[Request]] = [[]]
    ends: list[tuple[int, ...]] = []
    numbers: dict[str, int] = {}
    count, instrs, values = 0, block.block.instrs, block.block.values
    for index in range(len(instrs) + 1):
        requests = parts[-1]
        for owner, size in block.fresh[index] if index < len(instrs) else ():
            if size and not values[owner].tier:
                numbers[owner], count = count, count + 1
                requests.append(Request(size))
        if index < len(instrs) and instrs[index].workspace_bytes:
            requests.append(Request(instrs[index].workspace_bytes, -1))
        requests += [Request(0, numbers.pop(owner)) for owner in frees.get(index, ()) if owner in numbers]
        if index in deaths:
            ends.append(tuple(deaths[index]))
            parts.append([])
    results = tuple(-1 if name is None else numbers.get(block.owners[name], -1) for name in block.results)
    return _CallRequests(
        tuple(deaths.get(-1, ())), tuple(map(tuple, parts)), tuple(ends), results, frozenset(numbers.values()), count
    )


@dataclass
class _Replay:
    """One step on its way.

    Attributes:
        program: see `reserved_bytes`.
        given: names of what was there before.
        requests: so far, in runs.
        numbers: of what holds a storage.
        count: what was allocated, with what was there before.
    """

    program: RankProgram
    given: Sequence[Name]
    requests: list[tuple[int, Sequence[Request]]] = field(default_factory=list)
    numbers: dict[Storage, int] = field(default_factory=dict)
    count: int = 0
    _calls: dict[object, _CallRequests] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.walk = MemoryWalk(self.program)
        for name in self.given:
            self.numbers[self.walk.outer[name].storage] = self.count
            self.count += 1

    def take(self, step: Step) -> None:
        """Take a step."""
        outer = self.walk.outer
        touched = [outer[name].storage for name in (*step.drops, *step.outs) if name is not None and name in outer]
        if step.kind is StepKind.CALL:
            given = [outer[name].storage for name in step.args]
            bound = {outer[name].storage for name in {*step.outs} - {*step.drops} if name is not None and name in outer}
            self._call(step, self.walk.advance(step), given, touched, bound)
            return
        if step.kind is StepKind.ACCUMULATE:
            touched.append(outer[step.args[1]].storage)
        self.walk.advance(step)
        workspace = self.program.update_workspace(step) if step.kind is StepKind.UPDATE else 0
        if workspace and not self.program.update_tier(step):
            self._ask(Request(workspace, -1))
        for name in step.outs:
            if name is not None and (storage := outer[name].storage) not in self.numbers:
                if storage.nbytes and not storage.tier:
                    self._ask(Request(storage.nbytes))
                    self.numbers[storage] = self.count
                    self.count += 1
        self._let_go(touched)

    def _call(
        self, step: Step, memory: StepMemory, given: list[Storage], touched: list[Storage], bound: set[Storage]
    ) -> None:
        """Replay a block; what dies because a result takes its name dies as the call ends."""
        block, taken = self.walk.blocks[step.block], tuple([name is not None for name in step.outs])
        key = (step.block, memory.args, taken)
        asked = self._calls.get(key)
        if asked is None:
            asked = self._calls[key] = _call_requests(block, memory.args, taken)
        self._let_go([storage for storage in touched if storage not in bound and storage not in given])
        self._let_go([given[index] for index in asked.begins])
        base, (*parts, last) = self.count, asked.parts
        for part, dying in zip(parts, asked.ends, strict=True):
            self.requests.append((base, part))
            self._let_go([given[index] for index in dying])
        self.requests.append((base, last))
        self.count += asked.num_held
        results = dict(zip(step.outs, asked.results, strict=True))  # of a name given twice, the last
        held = set()
        for name, number in results.items():
            if name is not None and number >= 0:
                self.numbers[self.walk.outer[name].storage] = base + number
                held.add(number)
        self._ask(*(Request(0, base + number) for number in sorted(asked.left - held)))
        self._let_go(touched)

    def _ask(self, *requests: Request) -> None:
        """Ask for something that is no call's."""
        if requests:
            self.requests.append((0, requests))

    def _let_go(self, storages: Iterable[Storage]) -> None:
        """Free what no name holds."""
        for storage in storages:
            if storage.names == 0 and (number := self.numbers.pop(storage, None)) is not None:
                self._ask(Request(0, number))

    def leave(self) -> dict[Name, int]:
        """End the step: the numbers of what stays, by the names that were there before; the rest is freed."""
        outer = self.walk.outer
        kept = {
            name: self.numbers[outer[name].storage]
            for name in self.given
            if name in outer
            and outer[name].storage in self.numbers
            and outer[name].storage.nbytes == self.program.outer[name].nbytes
        }
        held = frozenset(kept.values())
        self._ask(*(Request(0, number) for number in self.numbers.values() if number not in held))
        return kept
