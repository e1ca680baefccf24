"""Online policies by hand, the arena's bookkeeping, and recursion along a tree decomposition."""

from __future__ import annotations

import itertools

import pytest

from paraplan.baselines import MEMORY, Limits
from paraplan.baselines.policies.coop import FREE, _Coop
from paraplan.baselines.policies.dtr import HEURISTICS, dtr
from paraplan.ir.errors import SolverLimitError
from paraplan.planner.memory.memory_schedule import evaluate, freeing
from paraplan.planner.memory.problem import MemOp, MemoryProblem, MemTensor
from tests.baselines.steps import training
from tests.planner.memory.graphs import chain, random_step

LIMITS = Limits(time_s=60)


def idle(first: tuple[float, int], second: tuple[float, int]) -> MemoryProblem:
    """Two results (seconds, bytes) that wait while a large one comes and goes."""
    ops = (
        MemOp("x", first[0], (), (0,)),
        MemOp("y", second[0], (), (1,)),
        MemOp("big", 1.0, (), (2,)),
        MemOp("use", 1.0, (2,), (3,)),
        MemOp("end", 1.0, (0, 1, 3), (4,)),
    )
    sizes = (first[1], second[1], 6, 1, 1)
    return MemoryProblem(ops, tuple(MemTensor(size, i, kept=i == 4) for i, size in enumerate(sizes)))


@pytest.mark.parametrize(
    ("heuristic", "first", "second", "again"),
    [
        ("h_dtr", (8.0, 4), (1.0, 4), "y"),  # 8/(4·1) against 1/(4·0): staleness of the newest is nearly none
        ("h_lru", (8.0, 4), (1.0, 4), "x"),
        ("h_size", (1.0, 4), (8.0, 5), "y"),
        ("h_msps", (8.0, 4), (1.0, 4), "y"),
        ("h_dtr_local", (1.0, 4), (8.0, 4), "x"),
    ],
)
def test_scores_choose(heuristic: str, first: tuple[float, int], second: tuple[float, int], again: str) -> None:
    problem = idle(first, second)
    if heuristic == "h_dtr":  # make y older too, so that its cost decides
        problem = MemoryProblem((*problem.ops[:2], MemOp("wait", 9.0, (), (5,)), *_moved(problem)), _sized(problem))
    found = dtr(problem, 14 if heuristic != "h_size" else 15, LIMITS, heuristic)
    runs = [problem.ops[action.index].name for action in found.actions if action.act.value == "R"]
    assert [name for name in set(runs) if runs.count(name) > 1] == [again]


def _moved(problem: MemoryProblem) -> tuple[MemOp, ...]:
    """The ops after an inserted one."""
    return problem.ops[2:]


def _sized(problem: MemoryProblem) -> tuple[MemTensor, ...]:
    makers = (0, 1, 3, 4, 5)
    found = [MemTensor(t.nbytes, makers[i], t.kept) for i, t in enumerate(problem.tensors)]
    return (*found, MemTensor(0, 2))


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_every_score_gives_legal_schedules(heuristic: str) -> None:
    solved = 0
    for seed in range(12):
        problem = random_step(seed, 8)
        whole = evaluate(problem, freeing(problem, tuple(range(8)))).peak_bytes
        for budget in range(max(map(problem.working_bytes, range(8))), whole + 1):
            try:
                found = dtr(problem, budget, LIMITS, heuristic)
            except SolverLimitError:
                continue
            solved += 1
            assert found.evaluation.peak_bytes <= budget
            assert found.evaluation.step_s >= problem.compute_s
    assert solved > 12


def test_dtr_is_close_to_the_best_on_a_chain() -> None:
    """As Kirisame et al. prove: with memory of order √n, executions are linear in n."""
    for root in (4, 6, 8):
        problem = chain(root * root)
        found = dtr(problem, 2 * root + 4, LIMITS)
        assert sum(action.act.value == "R" for action in found.actions) <= 2 * len(problem.ops)


class Watched(_Coop):
    """The arena, checked whenever room was made."""

    def make_room(self, op: int) -> None:
        super().make_room(op)
        there = sorted(tensor for _, tensor in self.blocks if tensor >= 0)
        sized = {t for t in self.resident | set(self.problem.ops[op].makes) if self.problem.tensors[t].nbytes}
        assert there == sorted(sized)
        assert all(size == self.problem.tensors[t].nbytes for size, t in self.blocks if t >= 0)
        assert sum(size for size, _ in self.blocks) == self.budget_bytes - self.problem.base_bytes
        kinds = [tensor for _, tensor in self.blocks]
        assert not any(a == b == FREE for a, b in itertools.pairwise(kinds))


@pytest.mark.parametrize("seed", range(12))
def test_the_arena_holds_what_is_there(seed: int) -> None:
    problem = random_step(seed, 9) if seed % 2 else training(seed, 6)
    whole = evaluate(problem, freeing(problem, tuple(range(len(problem.ops))))).peak_bytes
    finished = 0
    for budget in range(max(map(problem.working_bytes, range(len(problem.ops)))), whole + 6):
        try:
            Watched(problem, budget, LIMITS).run_all()
            finished += 1
        except SolverLimitError as fault:
            assert "no window of adjacent tensors" in str(fault) or "thrashes" in str(fault)
    assert finished


def test_coop_evicts_neighbours() -> None:
    """x y z in a row, four bytes each; eight are needed: two neighbours go, though x and z would be the cheaper two."""
    ops = (
        MemOp("x", 1.0, (), (0,)),
        MemOp("y", 4.0, (), (1,)),
        MemOp("z", 1.0, (), (2,)),
        MemOp("big", 1.0, (), (3,)),
        MemOp("use", 1.0, (3,), (4,)),
        MemOp("end", 1.0, (0, 1, 2, 4), (5,)),
    )
    sizes = (4, 4, 4, 8, 1, 1)
    problem = MemoryProblem(ops, tuple(MemTensor(size, i, kept=i == 5) for i, size in enumerate(sizes)))
    arena = Watched(problem, 14, LIMITS)
    names = [problem.ops[index].name for index in arena.run_all()]
    assert names.count("y") == 1 or names.count("y") + min(names.count("x"), names.count("z")) == 3
    assert len(names) > len(ops)


def test_treewidth_takes_logarithmic_memory_on_a_chain() -> None:
    """A chain's step has width two; 64 layers in 16 bytes where keeping all takes 66."""
    problem = chain(64)
    found = MEMORY["treewidth"](problem, 16, LIMITS)
    assert found.evaluation.peak_bytes <= 16
    assert sum(action.act.value == "R" for action in found.actions) <= 6 * len(problem.ops)
    steps = [MEMORY["treewidth"](problem, budget, LIMITS).evaluation.step_s for budget in (16, 30, 66)]
    assert steps == sorted(steps, reverse=True) and steps[-1] == problem.compute_s
