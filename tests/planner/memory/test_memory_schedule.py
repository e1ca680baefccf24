"""Schedules: what they cost, what is refused, and the least cost by brute force."""

from __future__ import annotations

import pytest

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.memory_actions import parse_actions
from paraplan.planner.memory.memory_schedule import evaluate, freeing
from paraplan.planner.memory.problem import MemOp, MemoryProblem, MemTensor, Tier, verify_problem
from tests.planner.memory.brute import least
from tests.planner.memory.graphs import chain, random_step


def test_text_comes_back() -> None:
    text = "R0 O1:host F1 R1 B1:host R2"
    assert " ".join(map(str, parse_actions(text))) == text
    for wrong in ("X1", "R", "R1:host", "O1", "Rx"):
        with pytest.raises(InvalidPlanError, match="no action"):
            parse_actions(wrong)


def test_a_chain_in_order() -> None:
    problem = chain(3)
    verify_problem(problem)
    found = evaluate(problem, freeing(problem, tuple(range(6))))
    assert found.step_s == 9 and found.recomputed_s == 0
    assert found.peak_bytes == 5  # the input, three activations and the gradient B2 makes


@pytest.mark.parametrize("seed", range(12))
def test_the_shortest_path_is_a_schedule(seed: int) -> None:
    problem = random_step(seed, 5)
    verify_problem(problem)
    whole = evaluate(problem, freeing(problem, tuple(range(5))))
    free_of_limits = least(problem, whole.peak_bytes)
    assert free_of_limits is not None and free_of_limits[0] == whole.step_s
    for budget in range(max(map(problem.working_bytes, range(5))), whole.peak_bytes):
        found = least(problem, budget, in_order=True)
        loose = least(problem, budget)
        if found is not None:
            check = evaluate(problem, found[1])
            assert check.step_s == found[0] and check.peak_bytes <= budget
            assert loose is not None and loose[0] <= found[0]


def test_recomputing_fits_a_chain_where_keeping_does_not() -> None:
    problem = chain(4)
    assert least(problem, 6) == (12.0, least(problem, 6)[1])  # type: ignore[index]
    found = least(problem, 5)
    assert found is not None and found[0] > 12
    assert least(problem, 3) is None


def test_copies_run_beside_ops_and_are_waited_for() -> None:
    tier = Tier("host", 10, out_bytes_per_s=1.0, back_bytes_per_s=2.0, latency_s=0.5)
    tensors = (MemTensor(4, -1), MemTensor(4, 0), MemTensor(1, 1), MemTensor(1, 2, kept=True))
    ops = (MemOp("a", 1.0, (0,), (1,)), MemOp("b", 2.0, (1,), (2,)), MemOp("c", 1.0, (1, 2), (3,)))
    problem = MemoryProblem(ops, tensors, tiers=(tier,))
    found = evaluate(problem, parse_actions("R0 F0 O1:host R1 F1 B1:host R2"))
    # Out from 1 to 5.5, the free waits from 3; back to 8, then c.
    assert found.step_s == 9.0 and found.waited_s == 5.0
    assert found.moved_bytes == 4 and found.tier_bytes == (4,)
    assert found.peak_bytes == 8


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("R1", r"op 1 \(F1\) reads tensors \[1\]"),
        ("R0 F0 F0", "freed but not there"),
        ("R0 R1", "never run"),
        ("R0 O1:host", "no tier 'host'"),
        ("R0 R1 R2 R3 F4", "must be there in the end"),
    ],
)
def test_what_cannot_be_is_refused(text: str, match: str) -> None:
    with pytest.raises(InvalidPlanError, match=match):
        evaluate(chain(2), parse_actions(text))


def test_an_op_that_must_not_be_repeated() -> None:
    problem = MemoryProblem((MemOp("a", 1.0, (), (0,), repeatable=False),), (MemTensor(1, 0, kept=True),))
    with pytest.raises(InvalidPlanError, match="twice"):
        evaluate(problem, parse_actions("R0 R0"))
