"""The program of POFO: what the first forward of a chain keeps, copies out, or leaves to be made again.

The first forward passes the chain once, dividing it: a block keeps what its backward needs (on the device, or copied
out), or a run of blocks s … t keeps only the boundary after it (on the device, or copied out) and is reversed later by
the best persistent schedule without copies, C(s, t, m) of `rotor.py`. With m slots of memory not taken by what is kept,
and q and r bytes to copy,

    V(s, m, q, r) = min over those choices of  forward + reversal + stalls + V(next, m', q', r')

q: bytes on their way out, still in memory when the forward of s begins; an op's seconds drain rate · seconds of them,
and where they leave too little room the step waits for the difference. r: bytes that blocks before s want back, so many
of them while the backward of s runs; what does not fit in those seconds must have come back before it, in memory all
the while, or is waited for. V(L, m, q, r) = r / rate. Copies go in order, as early as they can out, as late as they can
back.

With a tie, the fewest bytes are copied, early: an offload is charged `TIE` of its copy's seconds, more for later
blocks.

Source: Beaumont, Eyraud-Dubois & Shilova 2021 (POFO, NeurIPS). Limits: see `pofo.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paraplan.baselines.chains.block_costs import BlockCosts
from paraplan.baselines.chains.chain_blocks import BlockRun, forwards
from paraplan.baselines.chains.rotor import CostTable
from paraplan.baselines.common import Clock
from paraplan.planner.memory.problem import Tier

SLOTS = 48
QUEUE = 10
LONGEST = 24
"""Blocks that a run reversed later may have."""

TIE = 0.01


@dataclass(frozen=True)
class Choice:
    """What the first forward does with blocks first … last: keep all of one (`saves`) or pass; copied out or not."""

    first: int
    last: int
    saves: bool
    offloads: bool


class PofoTable:
    """V for every block, and the choice that attains it; of no use where time passed on the way."""

    def __init__(self, costs: BlockCosts, room_bytes: int, tier: Tier, clock: Clock) -> None:
        self.costs, self.tier, self.chain = costs, tier, costs.chain
        self.table = CostTable(costs, room_bytes, SLOTS)
        self.unit = max(1.0, self.table.room * self.table.unit / QUEUE)
        length, self.levels = len(costs.chain), np.arange(QUEUE + 1)
        self.free_bytes = np.arange(self.table.room + 1) * self.table.unit
        shape = (self.table.room + 1, QUEUE + 1, QUEUE + 1)
        self.value = [np.full(shape, np.inf) for _ in range(length + 1)]
        self.taken = [np.full(shape, -1, np.int32) for _ in range(length)]
        self.value[length][:] = (self.levels * self.unit / tier.back_bytes_per_s)[None, None, :]
        self.choices = [self._choices(first) for first in range(length)]
        for first in reversed(range(length)):
            if clock.over:  # values so far are of no use: there is no path from block 0
                break
            for number, choice in enumerate(self.choices[first]):
                found = self._priced(choice)
                better = found < self.value[first]
                self.value[first][better] = found[better]
                self.taken[first][better] = number

    def _choices(self, first: int) -> list[Choice]:
        length = len(self.chain)
        found = [Choice(first, first, True, False), Choice(first, first, True, True)]
        for last in range(first, min(length, first + LONGEST)):
            found.append(Choice(first, last, False, False))
            if last < length - 1:
                found.append(Choice(first, last, False, True))
        return found

    def _held_bytes(self, choice: Choice) -> int:
        """Bytes that stay over the turn of the forward."""
        if choice.saves:
            return self.costs.saved_bytes[choice.first]
        if choice.last == len(self.chain) - 1:
            return 0
        return self.costs.checkpoint_bytes(choice.first, choice.last)

    def _priced(self, choice: Choice) -> NDArray[np.float64]:
        """Seconds from here on by (m, q, r)."""
        seconds, slots_after, queue_after, wanted_after = self._moved(choice)
        rest = self.value[choice.last + 1][
            np.maximum(slots_after, 0)[:, None, None], queue_after[:, :, None], wanted_after[:, None, :]
        ]
        found = seconds + rest
        found[slots_after < 0] = np.inf
        return found

    def _moved(
        self, choice: Choice
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Seconds by (m, q, r), slots left by m, q' by (m, q), r' by (m, r)."""
        costs, chain, first = self.costs, self.chain, choice.first
        span = range(first, choice.last + 1)
        forward_s = sum(chain.forward_s[k] for k in span)
        room = self.free_bytes[:, None].astype(np.float64)
        queue = (self.levels * self.unit)[None, :].astype(np.float64)
        peaks = costs.saving_peak if choice.saves else costs.forward_peak
        need = max((costs.checkpoint_bytes(first, k - 1) if k > first else 0) + peaks[k] for k in span)
        stays, forward_stall = self._squeezed(room - need, queue, self.tier.out_bytes_per_s)
        if choice.saves:
            backward_s: NDArray[np.float64] = np.full(room.shape, chain.backward_s[first])
            back, backward_stall = self._squeezed(room - costs.backward_peak[first], queue, self.tier.back_bytes_per_s)
        else:
            reversal = self.table.seconds[first, choice.last]
            taken = -(-self.levels * self.unit // self.table.unit).astype(np.int64)
            inside = np.arange(len(reversal))[:, None] - taken[None, :]
            beside = np.where(inside >= 0, reversal[np.maximum(inside, 0)], np.inf)
            waiting = reversal[:, None] + queue / self.tier.back_bytes_per_s
            backward_s = np.where(beside <= waiting, beside, reversal[:, None])
            back = np.where(beside <= waiting, queue, 0.0)
            backward_stall = np.where(beside <= waiting, 0.0, queue / self.tier.back_bytes_per_s)
        held = self._held_bytes(choice)
        more = held if choice.offloads else 0
        drained = np.maximum(stays - forward_s * self.tier.out_bytes_per_s, 0) + more
        usable_s = np.where(np.isfinite(backward_s), backward_s, 0.0)
        pending = np.maximum(back - usable_s * self.tier.back_bytes_per_s, 0) + more
        seconds = (forward_s + forward_stall)[:, :, None] + (backward_s + backward_stall)[:, None, :]
        if choice.offloads:
            seconds += TIE * self.tier.out_s(held) * (1 + first / len(chain))
        over = (self._level(drained) > QUEUE)[:, :, None] | (self._level(pending) > QUEUE)[:, None, :]
        seconds = np.where(over, np.inf, seconds)
        slots = np.arange(len(self.free_bytes)) - (0 if choice.offloads else self.table.slots(held))
        return seconds, slots, np.minimum(self._level(drained), QUEUE), np.minimum(self._level(pending), QUEUE)

    def _squeezed(
        self, spare: NDArray[np.float64], queue: NDArray[np.float64], rate: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What of a queue may stay in some spare bytes, and the seconds waited for the rest; ∞ without spare."""
        stays = np.minimum(queue, np.maximum(spare, 0))
        return stays, np.where(spare < 0, np.inf, (queue - stays) / rate)

    def _level(self, nbytes: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.rint(nbytes / self.unit).astype(np.int64)

    def plan(self) -> tuple[list[BlockRun], frozenset[int]] | None:
        """The steps and the tensors copied out of the best path; None where there is none."""
        before: list[BlockRun] = []
        after: list[list[BlockRun]] = []
        away: set[int] = set()
        first, m, q, r = 0, self.table.room, 0, 0
        if not np.isfinite(self.value[0][m, q, r]):
            return None
        while first < len(self.chain):
            choice = self.choices[first][int(self.taken[first][m, q, r])]
            _, slots, queue, wanted = self._moved(choice)
            before += forwards(first, choice.last + 1)
            after.append([BlockRun(first, backward=True)] if choice.saves else self._reversal(choice, m, r))
            if choice.offloads:
                away |= self.costs.saved[first] if choice.saves else self.chain.boundary[choice.last]
            first, m, q, r = choice.last + 1, int(slots[m]), int(queue[m, q]), int(wanted[m, r])
        return before + [step for steps in reversed(after) for step in steps], frozenset(away)

    def _reversal(self, choice: Choice, m: int, r: int) -> list[BlockRun]:
        """C's steps beside what is coming back, or in all the room where that is shorter."""
        room = m - int(-(-r * self.unit // self.table.unit))
        inside = self.table.seconds[choice.first, choice.last]
        waiting = inside[m] + r * self.unit / self.tier.back_bytes_per_s
        use = room if room >= 0 and inside[room] <= waiting else m
        return self.table.steps(choice.first, choice.last, use)
