"""Optimal persistent checkpointing of a heterogeneous chain.

C(s, t, m): the least seconds to run forward and backward of blocks s … t with m bytes beside the boundary s starts
from, which stays until the backward of s. Either the forward of s keeps all its backward needs, or it only passes on,
and the next checkpoint is the boundary into some block s' in s + 1 … t:

    C(s, t, m) = min( f_s + C(s + 1, t, m − saved_s) + b_s                                        if saving s fits,
                      min over s' of  Σ_{s ≤ k < s'} f_k + C(s', t, m − checkpoint_{s'−1}) + C(s, s' − 1, m) )
    C(s, s, m) = f_s + b_s  if both fit, else ∞

Exact in bytes where the budget is within `memory_slots` (otherwise in that many slots, sizes rounded up): optimal
among schedules that keep a checkpoint until the backward of the block that starts from it ("memory persistent").

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly & Shilova 2019 (hal-02352969); Walther & Griewank 2008 for
equal bytes. Limits: O(L³) vector operations over the slots; chains of blocks (`blocks.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paraplan.baselines.chains.block_costs import BlockCosts, block_costs
from paraplan.baselines.chains.chain_blocks import BlockRun, Chain, chain_of, forwards
from paraplan.baselines.common import Clock, Limits, answer, check_budget, fits, given_bytes, nothing_fits, pruned
from paraplan.planner.memory.answer import MemoryAnswer, MemoryStatus
from paraplan.planner.memory.memory_schedule import freeing
from paraplan.planner.memory.problem import MemoryProblem

RETRIES = 6
"""How often the budget of the recurrence is lowered by what the evaluated peak was above the real one."""

SAVE = -2
NONE = -1


class CostTable:
    """C for every s ≤ t and number of slots, and what attains it (SAVE, or the block of the next checkpoint)."""

    def __init__(self, costs: BlockCosts, room_bytes: int, slots: int) -> None:
        self.costs = costs
        self.unit = max(1, -(-room_bytes // slots))
        self.room = room_bytes // self.unit
        length = len(costs.chain)
        shape = (length, length, self.room + 1)
        self.seconds: NDArray[np.float64] = np.full(shape, np.inf)
        self.choice: NDArray[np.int32] = np.full(shape, NONE, np.int32)
        self.forward_to = np.concatenate([[0.0], np.cumsum(costs.chain.forward_s)])
        for span in range(length):
            for first in range(length - span):
                self._fill(first, first + span)

    def slots(self, nbytes: int) -> int:
        """Slots that bytes take."""
        return -(-nbytes // self.unit)

    def _fill(self, first: int, last: int) -> None:
        costs, chain = self.costs, self.costs.chain
        seconds, choice = self.seconds[first, last], self.choice[first, last]
        own_s = chain.forward_s[first] + chain.backward_s[first]
        least = self.slots(max(costs.incoming_bytes[last] + costs.saving_peak[first], costs.backward_peak[first]))
        if least <= self.room:
            if first == last:
                seconds[least:], choice[least:] = own_s, SAVE
                return
            saved = self.slots(costs.saved_bytes[first])
            least = max(least, saved)
            seconds[least:] = own_s + self.seconds[first + 1, last, least - saved : self.room + 1 - saved]
            choice[least:] = SAVE
        passing = 0
        for start in range(first + 1, last + 1):
            before = costs.checkpoint_bytes(first, start - 2) if start - 1 > first else 0
            passing = max(passing, costs.incoming_bytes[last] + before + costs.forward_peak[start - 1])
            held = self.slots(costs.checkpoint_bytes(first, start - 1))
            begin = max(self.slots(passing), held)
            if begin > self.room:
                continue
            through = self.forward_to[start] - self.forward_to[first]
            found = through + self.seconds[start, last, begin - held : self.room + 1 - held]
            found = found + self.seconds[first, start - 1, begin:]
            better = found < seconds[begin:]
            seconds[begin:][better] = found[better]
            choice[begin:][better] = start

    def steps(self, first: int, last: int, room: int) -> list[BlockRun]:
        """The steps of an entry of the table that is finite.

        Args:
            first, last: blocks.
            room: slots of memory.
        """
        start = int(self.choice[first, last, room])
        if start == SAVE:
            inner = room - self.slots(self.costs.saved_bytes[first])
            rest = self.steps(first + 1, last, inner) if first < last else []
            return [BlockRun(first), *rest, BlockRun(first, backward=True)]
        held = self.slots(self.costs.checkpoint_bytes(first, start - 1))
        return [*forwards(first, start), *self.steps(start, last, room - held), *self.steps(first, start - 1, room)]


def plan_chain(chain: Chain, budget_bytes: int, limits: Limits, strategy: str) -> MemoryAnswer:
    """The best persistent schedule of a chain.

    Args:
        chain: of blocks.
        budget_bytes: that may be held.
        limits: of time, and slots of the budget.
        strategy: its name, for messages.
    Raises:
        SolverLimitError: the recurrence has none within the budget.
    """
    problem, clock = chain.problem, Clock(limits)
    costs = block_costs(chain)
    room = budget_bytes - problem.base_bytes - given_bytes(problem)
    least = None
    for attempt in range(RETRIES):
        if room < 0 or (attempt and clock.over):
            break
        table = CostTable(costs, room, limits.memory_slots)
        if not np.isfinite(table.seconds[0, -1, table.room]):
            break
        ops = pruned(problem, chain.ops(table.steps(0, len(chain) - 1, table.room)))
        exact = attempt == 0 and table.unit == 1
        found = answer(
            problem,
            freeing(problem, ops),
            status=MemoryStatus.OPTIMAL if exact else MemoryStatus.FEASIBLE,
            notes=(
                f"{len(chain)} blocks; "
                + ("optimal" if exact else f"optimal in slots of {table.unit} bytes")
                + " among persistent schedules of these blocks",
            ),
        )
        if fits(found, budget_bytes):
            return found
        least = min(found.evaluation.peak_bytes, least or found.evaluation.peak_bytes)
        room -= found.evaluation.peak_bytes - budget_bytes
    raise nothing_fits(strategy, budget_bytes, least, f"a chain of {len(chain)} blocks, persistent checkpoints")


def rotor(problem: MemoryProblem, budget_bytes: int, limits: Limits) -> MemoryAnswer:
    """The best persistent schedule of the chain of blocks.

    Raises:
        SolverLimitError: there is none within the budget.
    """
    check_budget(problem, budget_bytes)
    return plan_chain(chain_of(problem, "rotor"), budget_bytes, limits, "rotor")
