"""Storages, what lies in them, and what a step did to memory."""

from __future__ import annotations

from typing import NamedTuple

from paraplan.cost_models.simulator.block_replay import ArgState, MemoryProfile
from paraplan.ir.model.tensor import DTYPE_BYTES


class Storage:
    """Bytes on the device or a tier, and how many outer names hold them."""

    __slots__ = ("names", "nbytes", "tier")

    def __init__(self, nbytes: int, tier: str = "") -> None:
        self.nbytes = nbytes
        self.tier = tier
        self.names = 0


class Bytes(dict[str, int]):
    """Bytes by tier; "" is the device. A tier it does not name has none (a `Counter` takes longer to make)."""

    __slots__ = ()

    def __missing__(self, tier: str) -> int:
        return 0


class HeldTensor(NamedTuple):
    """What an outer name stands for: a storage, and the tensor lying in it."""

    storage: Storage
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements."""
        count = DTYPE_BYTES[self.dtype]
        for size in self.shape:
            count *= size
        return count


class StepMemory(NamedTuple):
    """What one step did to memory.

    Attributes:
        before, after: bytes alive.
        peak: the most alive inside, workspace included.
        dropped: bytes that died as it began (CALL) or in all (DROP, ACCUMULATE).
        overwritten: bytes that died as outer names were bound anew.
        profile: a CALL's inside.
        moved: whether an ACCUMULATE found no accumulator.
        held, added: an ACCUMULATE's accumulator, and the dtype of what is added.
        made: bytes a SEND or RECV allocated.
        args: the state a CALL found its arguments in.
        tiers: the same of every tier in use.
    """

    before: int
    after: int
    peak: int
    dropped: int = 0
    overwritten: int = 0
    profile: MemoryProfile | None = None
    moved: bool = False
    held: HeldTensor | None = None
    added: str = ""
    made: int = 0
    args: tuple[ArgState, ...] = ()
    tiers: dict[str, StepMemory] = {}
