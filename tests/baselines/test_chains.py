"""Strategies on chains: blocks, closed forms, and rotor against every persistent schedule."""

from __future__ import annotations

import heapq
from math import comb, isqrt

import pytest

from paraplan.baselines import MEMORY, Limits
from paraplan.baselines.chains.chain_blocks import BlockRun, chain_of, forwards
from paraplan.baselines.chains.revolve import best_split, reversal
from paraplan.baselines.common import pruned
from paraplan.ir.errors import ConstraintError, SolverLimitError
from paraplan.planner.memory.memory_schedule import evaluate, freeing
from paraplan.planner.memory.problem import MemOp, MemoryProblem, MemTensor
from tests.baselines.steps import two_results
from tests.planner.memory.brute import least
from tests.planner.memory.graphs import chain

LIMITS = Limits()


def test_blocks_of_a_chain_are_its_layers() -> None:
    """The last op of the backward reads the first boundary and the input, so it needs no block's forward."""
    found = chain_of(chain(5), "x")
    assert found.forward == ((0,), (1,), (2,), (3,), (4,))
    assert found.backward == ((), (8, 9), (7,), (6,), (5,))
    assert found.boundary == ({1}, {2}, {3}, {4}, frozenset())


def skips() -> MemoryProblem:
    """Two residual blocks of three ops: a → b → c, c adds the block's input; then their backward."""
    reads = [(), (0,), (0, 1), (2,), (3, 2), (4,)]
    ops = [MemOp(f"f{i}", 1.0, r, (i,)) for i, r in enumerate(reads)]
    tensors = [MemTensor(1, i) for i in range(6)]
    for i in reversed(range(6)):
        made = len(tensors)
        before = (made - 1,) if i < 5 else ()
        ops.append(MemOp(f"b{i}", 1.0, tuple(sorted({*reads[i], i, *before})), (made,), backward=True))
        tensors.append(MemTensor(1, made, kept=i == 0))
    return MemoryProblem(tuple(ops), tuple(tensors))


def test_blocks_end_where_one_tensor_is_live() -> None:
    """Between f0 and f2 and between f2 and f4 a skip is live beside the branch; wider cuts are finer."""
    found = chain_of(skips(), "x")
    widths = [len(boundary) for boundary in found.boundary]
    assert [op for block in found.forward for op in block] == list(range(6))
    assert sorted(op for phase in found.backward for op in phase) == list(range(6, 12))
    assert widths == [1, 2, 1, 2, 1, 0]
    for name in ("chen-sqrt", "revolve", "rotor", "divide-conquer"):
        MEMORY[name](skips(), 20, LIMITS)


def test_no_cut_is_said() -> None:
    """Six tensors cross every place but the ends."""
    ops = [MemOp(f"f{i}", 1.0, (), (i,)) for i in range(6)] + [MemOp("sum", 1.0, tuple(range(6)), (6,))]
    tensors = [MemTensor(1, i) for i in range(7)]
    ops.append(MemOp("b", 1.0, (6, *range(6)), (7,), backward=True))
    tensors.append(MemTensor(1, 7, kept=True))
    problem = MemoryProblem(tuple(ops), tuple(tensors))
    found = chain_of(problem, "x")  # the first four ops are cuts of at most four tensors, the rest one block
    assert len(found) == 5
    wide = MemoryProblem(
        (MemOp("f", 1.0, (), tuple(range(6))), ops[6], ops[7]),
        (*(MemTensor(1, 0) for _ in range(6)), MemTensor(1, 1), MemTensor(1, 2, kept=True)),
    )
    with pytest.raises(ConstraintError, match="every cut of the forward"):
        chain_of(wide, "rotor")


@pytest.mark.parametrize("slots", range(1, 6))
def test_revolve_has_the_binomial_numbers(slots: int) -> None:
    """Griewank & Walther 2000: t(l, s) = r l − β(s + 1, r − 1), s counting the beginning's checkpoint."""

    def beta(s: int, r: int) -> int:
        return comb(s + r, s)

    for length in range(1, 40):
        repeats = next(r for r in range(length + 1) if length <= beta(slots, r))
        expected = repeats * length - beta(slots + 1, repeats - 1) if repeats else 0
        assert best_split(length, slots - 1)[0] == expected
        steps = reversal(0, length, slots - 1)
        assert sum(not step.backward for step in steps) == expected + length
        assert [step.block for step in steps if step.backward] == list(reversed(range(length)))


def fewest_advances(length: int, slots: int) -> int:
    """The fewest forward steps beside those right before their backward, over all ways to use the slots."""
    start = (frozenset({0}), 0, length)
    best = {start: 0}
    queue = [(0, 0, start)]
    count = 0
    while queue:
        spent, _, state = heapq.heappop(queue)
        if spent > best[state]:
            continue
        stored, here, left = state
        if not left:
            return spent
        moves = [(0, (stored, place, left)) for place in stored]
        moves += [(0, (stored - {place}, here, left)) for place in stored - {0}]
        if here < left - 1:
            moves.append((1, (stored, here + 1, left)))
        if here == left - 1:
            moves.append((0, (stored, 0, left - 1)))
        if len(stored) <= slots:
            moves.append((0, (stored | {here}, here, left)))
        for seconds, then in moves:
            if spent + seconds < best.get(then, 10**9):
                best[then] = spent + seconds
                count += 1
                heapq.heappush(queue, (spent + seconds, count, then))
    raise AssertionError("every chain can be reversed")


@pytest.mark.parametrize("slots", range(4))
def test_revolve_is_the_best_use_of_slots(slots: int) -> None:
    for length in range(1, 9):
        assert best_split(length, slots)[0] == fewest_advances(length, slots)


@pytest.mark.parametrize("layers", [2, 3])
def test_revolve_is_never_below_the_optimum(layers: int) -> None:
    """And with slots for all, executes again what its count says."""
    problem = two_results(None, layers)
    for budget in range(5, 3 * layers + 5):
        try:
            found = MEMORY["revolve"](problem, budget, LIMITS)
        except SolverLimitError:
            continue
        best = least(problem, budget)
        assert best is not None and found.evaluation.step_s >= best[0]
    extra = best_split(layers, layers)[0]
    assert MEMORY["revolve"](problem, 100, LIMITS).evaluation.recomputed_s == extra


@pytest.mark.parametrize("root", [2, 3, 4, 6, 9])
def test_chen_sqrt_takes_two_roots_of_memory(root: int) -> None:
    layers = root * root
    problem = chain(layers)
    found = MEMORY["chen-sqrt"](problem, 10**6, LIMITS).evaluation
    assert found.peak_bytes <= 2 * root + 2
    assert found.recomputed_s == layers - root  # every segment but the last, once
    assert isqrt(layers) == root


@pytest.mark.parametrize("power", [3, 4, 5])
def test_halving_takes_a_logarithm_of_memory(power: int) -> None:
    layers = 2**power
    problem = chain(layers)
    found = MEMORY["divide-conquer"](problem, power + 4, LIMITS).evaluation
    assert found.peak_bytes <= power + 4
    assert found.recomputed_s <= layers * power / 2


def persistent(first: int, last: int) -> list[list[BlockRun]]:
    """Every persistent schedule of some blocks."""
    inner = persistent(first + 1, last) if first < last else [[]]
    found = [[BlockRun(first), *rest, BlockRun(first, backward=True)] for rest in inner]
    for start in range(first + 1, last + 1):
        for later in persistent(start, last):
            for sooner in persistent(first, start - 1):
                found.append([*forwards(first, start), *later, *sooner])
    return found


@pytest.mark.parametrize("seed", [None, *range(8)])
def test_rotor_is_the_best_persistent_schedule(seed: int | None) -> None:
    problem = two_results(seed, 4)
    blocks = chain_of(problem, "x")
    assert len(blocks) == 4
    costs = [evaluate(problem, freeing(problem, pruned(problem, blocks.ops(steps)))) for steps in persistent(0, 3)]
    low = max(map(problem.working_bytes, range(len(problem.ops))))
    compared = 0
    for budget in range(low, max(cost.peak_bytes for cost in costs) + 1):
        best = min((cost.step_s for cost in costs if cost.peak_bytes <= budget), default=None)
        try:
            found = MEMORY["rotor"](problem, budget, LIMITS).evaluation.step_s
        except SolverLimitError:
            found = None
        assert found == best, budget
        compared += best is not None
    assert compared >= 3


@pytest.mark.parametrize("layers", [2, 3])
def test_rotor_is_optimal_on_equal_blocks(layers: int) -> None:
    problem = two_results(None, layers)
    for budget in range(5, 2 * layers + 4):
        best = least(problem, budget)
        try:
            found = MEMORY["rotor"](problem, budget, LIMITS).evaluation.step_s
        except SolverLimitError:
            found = None
        assert found == (best and best[0]), budget


def test_rotor_in_slots_stays_within_the_budget() -> None:
    problem = two_results(3, 6)
    whole = evaluate(problem, freeing(problem, tuple(range(12)))).peak_bytes
    exact = MEMORY["rotor"](problem, whole - 4, LIMITS)
    coarse = MEMORY["rotor"](problem, whole - 4, Limits(memory_slots=8))
    assert exact.status.value == "optimal" and coarse.status.value == "feasible"
    assert coarse.evaluation.peak_bytes <= whole - 4
    assert coarse.evaluation.step_s >= exact.evaluation.step_s


def test_greedy_moves_with_the_budget() -> None:
    problem = chain(36)
    steps = [MEMORY["chen-greedy"](problem, budget, LIMITS).evaluation.step_s for budget in (14, 20, 38)]
    assert steps == sorted(steps, reverse=True) and steps[-1] == problem.compute_s
    with pytest.raises(SolverLimitError, match="chen-greedy found no schedule within 6 bytes"):
        MEMORY["chen-greedy"](problem, 6, LIMITS)
