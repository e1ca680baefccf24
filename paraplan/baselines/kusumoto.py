"""The dynamic program over lower sets; see `lower_sets.py` for the recurrence and its terms.

Source: Kusumoto et al. 2019 (NeurIPS).
"""

from __future__ import annotations

from paraplan.baselines.common import Clock, Limits, answer, check_budget, fits, nothing_fits, pruned
from paraplan.baselines.lower_sets import ForwardOps, LowerSet, forward_of
from paraplan.planner.memory.answer import MemoryAnswer, MemoryStatus
from paraplan.planner.memory.memory_schedule import freeing
from paraplan.planner.memory.problem import MemoryProblem

MOST_SETS = 3000
"""Lower sets the exact program takes on."""

EMPTY: LowerSet = frozenset()
Front = list[tuple[float, int, int, int]]
"""Pareto pairs (overhead, bytes of U), each with the set it came from and the pair there."""


def kusumoto_exact(problem: MemoryProblem, budget_bytes: int, limits: Limits) -> MemoryAnswer:
    """The least overhead of all canonical strategies.

    Raises:
        SolverLimitError: there are too many lower sets, time passed, or no canonical strategy fits.
    """
    check_budget(problem, budget_bytes)
    forward = forward_of(problem, "kusumoto-exact")
    clock = Clock(limits)
    sets = lower_sets(forward, MOST_SETS)
    if sets is None:
        raise nothing_fits("kusumoto-exact", budget_bytes, None, f"the forward has over {MOST_SETS} lower sets")
    return _planned(forward, sets, budget_bytes, clock, "kusumoto-exact")


def kusumoto_approx(problem: MemoryProblem, budget_bytes: int, limits: Limits) -> MemoryAnswer:
    """The least overhead of canonical strategies whose sets are one op with all it depends on.

    Raises:
        SolverLimitError: time passed, or none of them fits.
    """
    check_budget(problem, budget_bytes)
    forward = forward_of(problem, "kusumoto-approx")
    clock = Clock(limits)
    sets = sorted({*forward.needs, frozenset(range(forward.size))}, key=lambda each: (len(each), sorted(each)))
    return _planned(forward, sets, budget_bytes, clock, "kusumoto-approx")


def lower_sets(forward: ForwardOps, most: int) -> list[LowerSet] | None:
    """All lower sets but the empty one, small before large; None above `most`."""
    found: dict[LowerSet, None] = {EMPTY: None}
    queue = [EMPTY]
    for inside in queue:
        for op in range(forward.size):
            if op not in inside:
                grown = inside | forward.needs[op]
                if len(grown) <= len(inside) + len(forward.needs[op]) and grown not in found:
                    found[grown] = None
                    queue.append(grown)
        if len(found) > most + 1:
            return None
    return sorted((each for each in found if each), key=lambda each: (len(each), sorted(each)))


def _planned(forward: ForwardOps, sets: list[LowerSet], budget_bytes: int, clock: Clock, strategy: str) -> MemoryAnswer:
    everything = [EMPTY, *sets]
    fronts: list[Front] = [[] for _ in everything]
    fronts[0] = [(0.0, 0, -1, -1)]
    for target in range(1, len(everything)):
        inside = everything[target]
        pairs: Front = []
        for source in range(target):
            before = everything[source]
            if not fronts[source] or not before < inside:
                continue
            room = budget_bytes - forward.local_bytes(before, inside)
            if room < fronts[source][-1][1]:
                continue
            cached, overhead = forward.cached_bytes(before, inside), forward.overhead_s(before, inside)
            for place, (spent, held, _, _) in enumerate(fronts[source]):
                if held <= room:
                    pairs.append((spent + overhead, held + cached, source, place))
        if clock.over:
            raise nothing_fits(strategy, budget_bytes, None, f"time passed at {target} of {len(sets)} lower sets")
        fronts[target] = _pareto(pairs)
    if not fronts[-1]:
        raise nothing_fits(strategy, budget_bytes, None, f"no chain of its {len(sets)} lower sets fits")
    chain: list[LowerSet] = []
    target, place = len(everything) - 1, 0
    while target:
        chain.append(everything[target])
        _, _, target, place = fronts[target][place]
    ops = pruned(forward.problem, forward.ops(chain[::-1]))
    notes = (
        f"{len(chain)} of {len(sets)} lower sets; least overhead by the paper's count of memory among canonical "
        f"strategies{'' if strategy == 'kusumoto-exact' else ' of these sets'}",
    )
    found = answer(forward.problem, freeing(forward.problem, ops), status=MemoryStatus.OPTIMAL, notes=notes)
    if not fits(found, budget_bytes):
        raise nothing_fits(
            strategy, budget_bytes, found.evaluation.peak_bytes, "tensors are read far away from their op"
        )
    return found


def _pareto(pairs: Front) -> Front:
    """By overhead; each further pair holds fewer bytes."""
    found: Front = []
    for pair in sorted(pairs):
        if not found or pair[1] < found[-1][1]:
            found.append(pair)
    return found
