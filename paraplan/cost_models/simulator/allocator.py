"""CUDA's caching allocator, as far as sizes and order decide: what a sequence of allocations reserves.

A request is rounded up to 512 bytes. At most 1 MiB it comes from segments of 2 MiB, above that from segments of 20 MiB
if below 10 MiB, else from one of its own size rounded up to 2 MiB. The smallest free block of the pool that is large
enough is taken (of equals the one at the lowest address) and split where more than 1 MiB is left (small pool: 512
bytes); freed blocks merge with free neighbours of their segment. No block is large enough: a new segment is made, and
where that goes beyond the device, segments that are free as a whole are given back first. What is reserved is the sum
of segments.

Limits: one stream, addresses of segments in the order they were made, no `expandable_segments`, no garbage collection
by threshold. Source: torch c10/cuda/CUDACachingAllocator.cpp (2.11 to 2.13).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from paraplan.cost_models.constants import CUDA_BLOCK_BYTES

SMALL_BYTES = 1 << 20
"""Requests up to this are of the small pool (kSmallSize)."""
SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20
OWN_SEGMENT_BYTES = 10 << 20
"""Requests from this on get a segment of their own size (kMinLargeAlloc)."""
ROUND_BYTES = 2 << 20


@dataclass(eq=False, slots=True)
class AllocatedBlock:
    """A stretch of a segment."""

    address: int
    nbytes: int
    small: bool
    free: bool = False
    before: AllocatedBlock | None = None
    after: AllocatedBlock | None = None


@dataclass
class CachingAllocator:
    """The allocator's state.

    Attributes:
        capacity_bytes: what the device has.
        reserved_bytes, allocated_bytes: now.
        peak_reserved_bytes, peak_allocated_bytes: the most so far.
        times_given_back: how often cached segments were.
    """

    capacity_bytes: int
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    times_given_back: int = 0
    _free: dict[bool, list[tuple[int, int, AllocatedBlock]]] = field(default_factory=lambda: {True: [], False: []})
    _end: int = 0

    def allocate(self, nbytes: int) -> AllocatedBlock:
        """A block for so many bytes."""
        size = max(CUDA_BLOCK_BYTES, -(-nbytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES)
        small = size <= SMALL_BYTES
        pool = self._free[small]
        place = bisect_left(pool, (size, -1))
        block = pool.pop(place)[2] if place < len(pool) else self._segment(size, small)
        block.free = False
        left = block.nbytes - size
        if left >= CUDA_BLOCK_BYTES if small else left > SMALL_BYTES:
            rest = AllocatedBlock(block.address + size, left, small, True, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.nbytes = rest, size
            insort(self._free[small], (left, rest.address, rest))  # maybe a new list
        self.allocated_bytes += block.nbytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def touch(self, nbytes: int) -> None:
        """Allocate and give back at once: where a free block is large enough, all is as it was."""
        size = max(CUDA_BLOCK_BYTES, -(-nbytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES)
        pool = self._free[size <= SMALL_BYTES]
        if not pool or pool[-1][0] < size or self.allocated_bytes + pool[-1][0] > self.peak_allocated_bytes:
            self.release(self.allocate(nbytes))

    def release(self, block: AllocatedBlock) -> None:
        """Give a block back."""
        self.allocated_bytes -= block.nbytes
        block.free = True
        gone = block.before
        if gone is not None and gone.free:
            self._remove(gone)
            block.address, block.before = gone.address, gone.before
            block.nbytes += gone.nbytes
            if gone.before is not None:
                gone.before.after = block
        gone = block.after
        if gone is not None and gone.free:
            self._remove(gone)
            block.nbytes, block.after = block.nbytes + gone.nbytes, gone.after
            if gone.after is not None:
                gone.after.before = block
        insort(self._free[block.small], (block.nbytes, block.address, block))

    def _segment(self, size: int, small: bool) -> AllocatedBlock:
        """A new segment, as one block."""
        if small:
            nbytes = SMALL_SEGMENT_BYTES
        elif size < OWN_SEGMENT_BYTES:
            nbytes = LARGE_SEGMENT_BYTES
        else:
            nbytes = -(-size // ROUND_BYTES) * ROUND_BYTES
        if self.reserved_bytes + nbytes > self.capacity_bytes:
            self._give_back()
        block = AllocatedBlock(self._end, nbytes, small)
        self._end += nbytes
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def _give_back(self) -> None:
        """Every segment that is free as a whole."""
        self.times_given_back += 1
        for small, pool in self._free.items():
            kept = [entry for entry in pool if entry[2].before is not None or entry[2].after is not None]
            self.reserved_bytes -= sum(entry[0] for entry in pool) - sum(entry[0] for entry in kept)
            self._free[small] = kept

    def _remove(self, block: AllocatedBlock) -> None:
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.nbytes, block.address))]
