"""Genetic search over the order of ops and which tensors may be swapped; copies follow from those.

An individual is a priority per op and a weight per tensor. Ops run in list order: of those whose inputs are made, the
highest priority first. Where memory is short, the tensor with the latest next access among those of highest weight
class (may be swapped) leaves right after its last access and comes back before the next (Belady's rule); copies are
timed as in `swap_writing.py`. Fitness is the evaluated step, or, above the budget, worse than any that fits, by the
excess.
Each generation keeps the best, draws parents by tournament, crosses priorities over at a random op (one part from each)
and weights element by element, and mutates a few. The first population holds the step's own order.

Source: Huang, Jin & Li 2020 (SwapAdvisor, ASPLOS). Limits: memory pools (the paper's third
chromosome) do not exist here, where bytes are what counts; seeded, so equal input and generations give equal answers,
but a time limit that cuts generations short does not; nothing is proved.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

from paraplan.baselines.common import Clock, Limits, answer, best_within, check_budget, fits, tier_of
from paraplan.baselines.swapping.swap_writing import Gap, Spans, timed, within_capacity, written
from paraplan.planner.memory.answer import MemoryAnswer
from paraplan.planner.memory.problem import GIVEN, MemoryProblem, Tier

POPULATION = 24
GENERATIONS = 40
MUTATION = 0.05


@dataclass(frozen=True)
class Individual:
    """A priority per op, and per tensor whether it may be swapped."""

    priority: tuple[float, ...]
    movable: tuple[bool, ...]


def swapadvisor(problem: MemoryProblem, budget_bytes: int, limits: Limits) -> MemoryAnswer:
    """The best individual of all generations.

    Raises:
        SolverLimitError: none is within the budget.
    """
    check_budget(problem, budget_bytes)
    tier = tier_of(problem, "swapadvisor")
    clock, draw = Clock(limits), random.Random(limits.seed)
    count = len(problem.ops)
    own = tuple(float(count - index) for index in range(count))
    people = [Individual(own, (True,) * len(problem.tensors))]
    while len(people) < POPULATION:
        people.append(_mutated(people[0], draw, 4 * MUTATION))
    rated: list[tuple[tuple[float, float], int, Individual, MemoryAnswer]] = []
    born = generation = 0
    while True:
        for person in people:
            found = _answer(problem, person, budget_bytes, tier, generation)
            excess = max(0, found.evaluation.peak_bytes - budget_bytes)
            rated.append(((float(excess), found.evaluation.step_s), born, person, found))
            born += 1
            if clock.over:
                break
        rated = sorted(rated, key=lambda each: each[:2])[:POPULATION]
        best = rated[0][3]
        done = fits(best, budget_bytes) and best.evaluation.step_s <= problem.compute_s
        if done or clock.over or generation == GENERATIONS:
            break
        generation += 1
        people = [_child(rated, draw) for _ in range(POPULATION)]
    return best_within("swapadvisor", [rated[0][3]], budget_bytes, f"{generation} generations of {POPULATION}")


def _child(rated: list[tuple[tuple[float, float], int, Individual, MemoryAnswer]], draw: random.Random) -> Individual:
    def parent() -> Individual:
        return min(draw.sample(rated, min(3, len(rated))), key=lambda each: each[:2])[2]

    one, other = parent(), parent()
    cut = draw.randrange(len(one.priority) + 1)
    priority = one.priority[:cut] + other.priority[cut:]
    movable = tuple(draw.choice(pair) for pair in zip(one.movable, other.movable, strict=True))
    return _mutated(Individual(priority, movable), draw, MUTATION)


def _mutated(person: Individual, draw: random.Random, rate: float) -> Individual:
    spread = max(1.0, len(person.priority) / 20)
    return Individual(
        tuple(p + draw.gauss(0, spread) if draw.random() < rate else p for p in person.priority),
        tuple(not m if draw.random() < rate else m for m in person.movable),
    )


def _answer(problem: MemoryProblem, person: Individual, budget_bytes: int, tier: Tier, generation: int) -> MemoryAnswer:
    ops = listed(problem, person.priority)
    spans = Spans(problem, ops)
    gaps = within_capacity(problem, farthest(spans, person.movable, budget_bytes), tier)
    swaps = timed(spans, gaps, budget_bytes, tier)
    notes = (f"{len(swaps)} swaps, from generation {generation}",)
    return answer(problem, written(problem, ops, swaps, tier), notes=notes)


def listed(problem: MemoryProblem, priority: tuple[float, ...]) -> tuple[int, ...]:
    """The order in which, of ops whose inputs are made, the highest priority runs first."""
    inputs = [{m for t in op.reads if (m := problem.tensors[t].maker) != GIVEN} for op in problem.ops]
    waiting = list(map(len, inputs))
    outputs: list[list[int]] = [[] for _ in problem.ops]
    for index, makers in enumerate(inputs):
        for maker in makers:
            outputs[maker].append(index)
    ready = [(-priority[index], index) for index, missing in enumerate(waiting) if not missing]
    heapq.heapify(ready)
    order = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for reader in outputs[index]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, (-priority[reader], reader))
    return tuple(order)


def farthest(spans: Spans, movable: tuple[bool, ...], budget_bytes: int) -> list[Gap]:
    """Gaps taken where memory is short, in order: movable tensors first, the latest next access first.

    Args:
        spans: accesses of the sequence.
        movable: [tensor] whether it is taken before the others.
        budget_bytes: that may be held.
    """
    problem = spans.problem
    gaps = [gap for tensor in range(len(problem.tensors)) for gap in spans.gaps(tensor)]
    left = sorted((g for g in gaps if problem.tensors[g.tensor].nbytes), key=lambda g: (-movable[g.tensor], -g.before))
    profile = spans.profile([])
    chosen: list[Gap] = []
    for position in range(len(profile)):
        for gap in list(left):
            if profile[position] <= budget_bytes:
                break
            if gap.after < position < gap.before:
                left.remove(gap)
                chosen.append(gap)
                for away in range(gap.after + 1, gap.before):
                    profile[away] -= problem.tensors[gap.tensor].nbytes
    return chosen
