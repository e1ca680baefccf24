"""What a rank's allocator reserves in a step: the step's allocations and frees, replayed over the caching allocator.

The order is that of `memory.MemoryWalk`: what is there before the step first, then instruction by instruction what a
block makes, the workspace of an op (allocated and freed), and what dies. The step is taken twice, since blocks cached
in the first are where the second begins. Limits: those of `allocator`; what libraries allocate for themselves (cuBLAS'
workspaces, NCCL's buffers, the context) is not the allocator's or not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from paraplan.cost_models.simulator.allocator import AllocatedBlock, CachingAllocator
from paraplan.cost_models.simulator.live_bytes import MemoryWalk
from paraplan.cost_models.simulator.step_memory import StepMemory, Storage
from paraplan.ir.execution.names import Name, Role
from paraplan.ir.execution.rank_program import RankProgram, Step, StepKind


def reserved_bytes(program: RankProgram, capacity_bytes: int) -> int:
    """The most the allocator has reserved at once, in bytes.

    Args:
        program: what the rank runs.
        capacity_bytes: of the device; beyond it cached segments are given back first.
    Raises:
        CostModelError: the program names what does not exist.
    """
    allocator = CachingAllocator(capacity_bytes)
    states = program.update_bytes("")[0]
    kept = {}
    for name, value in program.outer.items():
        if value.nbytes and not value.tier:
            kept[name] = allocator.allocate(value.nbytes)
    if states:  # made parameter by parameter: slots of its size each
        _states(program, allocator, states)
    for _ in range(2):
        replay = _Replay(program, allocator, kept)
        for step in program.steps:
            replay.take(step)
        kept = replay.leave()
    return allocator.peak_reserved_bytes


def _states(program: RankProgram, allocator: CachingAllocator, total: int) -> None:
    """The optimizer's states on the device, as tensors of the sizes of what it updates."""
    sizes = [value.nbytes for value in program.outer.values() if value.role is Role.STATE and not value.tier]
    whole = sum(sizes)
    slots = total // whole if whole else 0
    for size in sizes * slots:
        allocator.allocate(size)
    if total > slots * whole:
        allocator.allocate(total - slots * whole)


@dataclass
class _Replay:
    """One step on its way.

    Attributes:
        program, allocator: see `reserved_bytes`.
        given: blocks of what was there before, by outer name.
    """

    program: RankProgram
    allocator: CachingAllocator
    given: dict[Name, AllocatedBlock]
    blocks: dict[Storage, AllocatedBlock] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.walk = MemoryWalk(self.program)
        for name, block in self.given.items():
            self.blocks[self.walk.outer[name].storage] = block

    def take(self, step: Step) -> None:
        """Take a step."""
        outer = self.walk.outer
        touched = [outer[name].storage for name in (*step.drops, *step.outs) if name is not None and name in outer]
        bound = {outer[name].storage for name in {*step.outs} - {*step.drops} if name is not None and name in outer}
        if step.kind is StepKind.ACCUMULATE:
            touched.append(outer[step.args[1]].storage)
        given = [outer[name].storage for name in step.args] if step.kind is StepKind.CALL else []
        memory = self.walk.advance(step)
        if step.kind is StepKind.CALL:
            self._call(step, memory, given, touched, bound)
            return
        workspace = self.program.update_workspace(step) if step.kind is StepKind.UPDATE else 0
        if workspace and not self.program.update_tier(step):
            self.allocator.release(self.allocator.allocate(workspace))
        for name in step.outs:
            if name is not None and (storage := outer[name].storage) not in self.blocks and storage.nbytes:
                self._make(storage)
        self._let_go(touched)

    def _call(
        self, step: Step, memory: StepMemory, given: list[Storage], touched: list[Storage], bound: set[Storage]
    ) -> None:
        """Replay a block; what dies because a result takes its name dies as the call ends."""
        block = self.walk.blocks[step.block]
        taken = tuple(name is not None for name in step.outs)
        made, ended = block.ends(memory.args, taken)
        later = {*given, *bound}
        self._let_go([storage for storage in touched if storage not in later])
        deaths: dict[int, list[Storage]] = {}
        for index, last in ended.items():
            deaths.setdefault(last, []).append(given[index])
        for storage in deaths.pop(-1, ()):
            self._let_go([storage])
        local: dict[str, AllocatedBlock] = {}
        frees: dict[int, list[str]] = {}
        for owner, last in made.items():
            frees.setdefault(last, []).append(owner)
        count = len(block.block.instrs)
        for index, instr in enumerate(block.block.instrs):
            for owner, size in block.fresh[index]:
                if size and not block.block.values[owner].tier:
                    local[owner] = self.allocator.allocate(size)
            if instr.workspace_bytes:
                self.allocator.release(self.allocator.allocate(instr.workspace_bytes))
            self._end_of(local, frees.get(index, ()), deaths.get(index, ()))
        self._end_of(local, frees.get(count, ()), deaths.get(count, ()))
        results = dict(zip(step.outs, block.results, strict=True))  # of a name given twice, the last
        for name, result in results.items():
            if name is not None and result is not None and (owner := block.owners[result]) in local:
                self.blocks[self.walk.outer[name].storage] = local.pop(owner)
        self._end_of(local, [*local], ())
        self._let_go(touched)

    def _end_of(self, local: dict[str, AllocatedBlock], owners: Iterable[str], storages: Iterable[Storage]) -> None:
        for owner in owners:
            if owner in local:
                self.allocator.release(local.pop(owner))
        self._let_go(storages)

    def _make(self, storage: Storage) -> None:
        if not storage.tier:
            self.blocks[storage] = self.allocator.allocate(storage.nbytes)

    def _let_go(self, storages: Iterable[Storage]) -> None:
        """Free what no name holds."""
        for storage in storages:
            if storage.names == 0 and (block := self.blocks.pop(storage, None)) is not None:
                self.allocator.release(block)

    def leave(self) -> dict[Name, AllocatedBlock]:
        """End the step: blocks of what stays, by outer name; the rest is freed."""
        stays = {name: self.walk.outer[name].storage for name in self.given if name in self.walk.outer}
        sizes = {name: value.nbytes for name, value in self.program.outer.items()}
        kept = {
            name: self.blocks[storage]
            for name, storage in stays.items()
            if storage in self.blocks and storage.nbytes == sizes[name]
        }
        held = {id(block) for block in kept.values()}
        for block in self.blocks.values():
            if id(block) not in held:
                self.allocator.release(block)
        for name in [name for name in self.given if name not in kept]:  # the batch of the next step comes anew
            kept[name] = self.allocator.allocate(self.program.outer[name].nbytes)
        return kept
