"""Dynamic tensor rematerialisation: when memory is short, evict the resident tensor of the lowest score.

    h(t) = cost(t) / (bytes(t) · staleness(t)),   cost(t) = time of t's op + those of its evicted neighbourhood e*(t),

the evicted ops through which making t again would go, and those through which others would come to need t. Leaving
parts out gives the paper's ablations (`HEURISTICS`): h_dtr_local (own time only), h_lru (staleness only), h_size (bytes
only), h_msps (with evicted ancestors, no staleness: Peng et al. 2020).

Source: Kirisame, Lyubomirsky, Haan, Brennan, He, Roesch, Chen & Tatlock 2020 (arXiv 2006.09616). The
policy sees no op before its turn; an owner's release evicts at once ("eager eviction"). Limits: nothing is proved; the
neighbourhood is walked, not approximated by union-find; seconds of searching are not part of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from paraplan.baselines.common import Limits, answer_ops, check_budget, fits, nothing_fits
from paraplan.baselines.policies.online import Online
from paraplan.planner.memory.answer import MemoryAnswer
from paraplan.planner.memory.problem import MemoryProblem


class ScoreCost(Enum):
    """Which seconds a score counts."""

    NEIGHBOURHOOD = "neighbourhood"
    ANCESTORS = "ancestors"
    LOCAL = "local"
    NONE = "none"


@dataclass(frozen=True)
class Heuristic:
    """A score of tensors, the lowest to be evicted: cost / (bytes if `by_size`) / (staleness if `by_age`)."""

    cost: ScoreCost
    by_size: bool
    by_age: bool

    def score(self, machine: Online, tensor: int) -> float:
        """The score of a resident tensor."""
        problem = machine.problem
        value = 1.0
        if self.cost is not ScoreCost.NONE:
            value = problem.ops[problem.tensors[tensor].maker].time_s
        if self.cost in (ScoreCost.NEIGHBOURHOOD, ScoreCost.ANCESTORS):
            value += machine.neighbourhood_s(tensor, self.cost is ScoreCost.NEIGHBOURHOOD)
        if self.by_size:
            value /= problem.tensors[tensor].nbytes
        return value / machine.stale_s(tensor) if self.by_age else value


HEURISTICS = {
    "h_dtr": Heuristic(ScoreCost.NEIGHBOURHOOD, by_size=True, by_age=True),
    "h_dtr_local": Heuristic(ScoreCost.LOCAL, by_size=True, by_age=True),
    "h_lru": Heuristic(ScoreCost.NONE, by_size=False, by_age=True),
    "h_size": Heuristic(ScoreCost.NONE, by_size=True, by_age=False),
    "h_msps": Heuristic(ScoreCost.ANCESTORS, by_size=True, by_age=False),
}


class _Dtr(Online):
    strategy = "dtr"

    def __init__(self, problem: MemoryProblem, budget_bytes: int, limits: Limits, heuristic: Heuristic) -> None:
        super().__init__(problem, budget_bytes, limits)
        self.heuristic = heuristic
        self.live = problem.base_bytes + sum(problem.tensors[t].nbytes for t in self.resident)

    def make_room(self, op: int) -> None:
        it = self.problem.ops[op]
        need = sum(self.problem.tensors[t].nbytes for t in it.makes) + it.workspace_bytes
        while self.live + need > self.budget_bytes:
            candidates = [t for t in sorted(self.resident) if self.evictable(t)]
            if not candidates:
                raise self.give_up("nothing is left to evict")
            self.let_go(min(candidates, key=lambda t: (self.heuristic.score(self, t), t)))
        self.live += sum(self.problem.tensors[t].nbytes for t in it.makes if t not in self.resident)

    def let_go(self, tensor: int) -> None:
        self.resident.remove(tensor)
        self.live -= self.problem.tensors[tensor].nbytes


def dtr(problem: MemoryProblem, budget_bytes: int, limits: Limits, heuristic: str = "h_dtr") -> MemoryAnswer:
    """The executions of the online policy with one of `HEURISTICS`.

    Args:
        problem, budget_bytes, limits: as of `common.MemoryStrategy`.
        heuristic: of `HEURISTICS`.
    Raises:
        SolverLimitError: the policy came to a point where nothing could be evicted, thrashed, or time passed.
    """
    check_budget(problem, budget_bytes)
    ops = _Dtr(problem, budget_bytes, limits, HEURISTICS[heuristic]).run_all()
    found = answer_ops(problem, ops, (f"{len(ops) - len(problem.ops)} executions more, by {heuristic}",))
    if not fits(found, budget_bytes):
        raise nothing_fits("dtr", budget_bytes, found.evaluation.peak_bytes, "by the evaluation")
    return found
