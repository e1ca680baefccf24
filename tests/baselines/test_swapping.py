"""Strategies that copy: what moves when, that copies run beside ops, and who wins where copies are free or slow."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from paraplan.baselines import MEMORY, Limits
from paraplan.baselines.recompute_in_order import recomputed
from paraplan.baselines.swapping.swap_writing import Gap, Spans, timed, within_capacity, written
from paraplan.baselines.swapping.swapadvisor import listed
from paraplan.baselines.swapping.vdnn import is_conv
from paraplan.ir.errors import SolverLimitError
from paraplan.planner.memory.memory_schedule import evaluate, freeing
from paraplan.planner.memory.problem import MemOp, MemoryProblem, MemTensor, Tier
from tests.baselines.steps import training, with_tier
from tests.planner.memory.graphs import chain

LIMITS = Limits(time_s=60)


def text(name: str, problem: MemoryProblem, budget: int) -> str:
    return " ".join(map(str, MEMORY[name](problem, budget, LIMITS).actions))


def named(problem: MemoryProblem, words: tuple[str, ...]) -> MemoryProblem:
    """The forward's ops called by words in turn."""
    ops = [
        replace(op, name=f"{words[i % len(words)]}{i}") if not op.backward else op for i, op in enumerate(problem.ops)
    ]
    return replace(problem, ops=tuple(ops))


def test_vdnn_copies_beside_the_reader_and_back_one_layer_ahead() -> None:
    """What F0, F1 and F2 read leaves while they run; each is under way back one op before its reader."""
    problem = with_tier(chain(4), 1.0)
    words = text("vdnn-all", problem, 100).split()
    for tensor, reader in ((0, 0), (1, 1), (2, 2)):
        out = words.index(f"O{tensor}:host")
        assert words[out + 1 : out + 3] == [f"R{reader}", f"F{tensor}"]
    for tensor, ahead in ((2, 4), (1, 5), (0, 6)):
        assert words[words.index(f"B{tensor}:host") + 1] == f"R{ahead}"


@pytest.mark.parametrize("name", ["vdnn-all", "capuchin", "swapadvisor", "pofo", "superneurons"])
def test_copies_run_beside_ops(name: str) -> None:
    problem = named(with_tier(chain(10), 0.5), ("conv",))
    whole = evaluate(problem, freeing(problem, tuple(range(20)))).peak_bytes
    found = MEMORY[name](problem, 8, LIMITS).evaluation
    tier = problem.tiers[0]
    copies_s = found.moved_bytes / tier.out_bytes_per_s + found.moved_bytes / tier.back_bytes_per_s
    assert found.moved_bytes > 0 and found.peak_bytes <= 8 < whole
    assert found.waited_s < copies_s / 2
    assert found.step_s == pytest.approx(problem.compute_s + found.recomputed_s + found.waited_s)


def test_vdnn_conv_moves_inputs_of_convolutions_only() -> None:
    problem = named(with_tier(chain(6), 0.5), ("conv", "relu"))
    moved = {word for word in text("vdnn-conv", problem, 100).split() if word.startswith("O")}
    assert moved == {"O0:host", "O2:host", "O4:host"}
    assert is_conv(problem, 0) and not is_conv(problem, 1)
    assert not is_conv(named(problem, ("conv1_bn",)), 0)


def test_a_full_tier_takes_no_more() -> None:
    problem = chain(8)
    small = replace(problem, tiers=(Tier("host", 3, 10.0, 10.0),))
    for name in ("vdnn-all", "capuchin"):
        found = MEMORY[name](small, 8, LIMITS).evaluation
        assert 0 < found.tier_bytes[0] <= 3
    with pytest.raises(SolverLimitError, match="swapadvisor found no schedule"):
        MEMORY["swapadvisor"](small, 5, LIMITS)
    gaps = [Gap(t, t, t + 9) for t in (1, 2, 1, 3, 4)]
    assert within_capacity(problem, gaps, small.tiers[0]) == [*gaps[:4]]


@pytest.mark.parametrize("seed", range(10))
def test_swaps_written_keep_to_the_memory_they_were_timed_for(seed: int) -> None:
    problem = with_tier(training(seed, 6), random.Random(seed).choice((0.1, 0.5, 2.0)))
    spans = Spans(problem, tuple(range(len(problem.ops))))
    every = [gap for tensor in range(len(problem.tensors)) for gap in spans.gaps(tensor)]
    assert max(spans.profile([])) == evaluate(problem, freeing(problem, spans.ops)).peak_bytes
    for count in range(len(every) + 1):
        chosen = random.Random(seed + count).sample(every, count)
        chosen = list({gap.tensor: gap for gap in chosen}.values())
        for budget in (max(spans.profile(chosen)), max(spans.profile([]))):
            swaps = timed(spans, chosen, budget, problem.tiers[0])
            left = [swap.gap for swap in swaps]
            found = evaluate(problem, written(problem, spans.ops, swaps, problem.tiers[0]))
            assert found.peak_bytes <= max(budget, max(spans.profile(left)))
            assert found.recomputed_s == 0
            if budget == max(spans.profile([])) and problem.tiers[0].out_bytes_per_s > 1e9:
                assert found.waited_s == 0


def test_capuchin_swaps_what_hides_and_recomputes_where_copies_are_slow() -> None:
    fast = MEMORY["capuchin"](with_tier(chain(12), 0.2), 8, LIMITS).evaluation
    assert fast.recomputed_s == 0 and fast.waited_s == 0 and fast.moved_bytes > 0
    slow = MEMORY["capuchin"](with_tier(chain(12), 50.0), 8, LIMITS).evaluation
    assert slow.moved_bytes == 0 and slow.recomputed_s > 0
    alone = MEMORY["capuchin"](chain(12), 8, LIMITS).evaluation
    assert alone.step_s == slow.step_s


def test_capuchin_recomputes_the_most_bytes_per_second() -> None:
    """x: 4 bytes in 4 s, y: 4 bytes in 1 s; both idle at the peak, one has to go."""
    ops = (
        MemOp("x", 4.0, (), (0,)),
        MemOp("y", 1.0, (), (1,)),
        MemOp("big", 1.0, (), (2,)),
        MemOp("use", 1.0, (2,), (3,)),
        MemOp("end", 1.0, (0, 1, 3), (4,)),
    )
    sizes = (4, 4, 6, 1, 1)
    tensors = tuple(MemTensor(size, index, kept=index == 4) for index, size in enumerate(sizes))
    found = MEMORY["capuchin"](MemoryProblem(ops, tensors), 14, LIMITS)
    assert found.evaluation.recomputed_s == 1.0


def test_superneurons_never_recomputes_a_convolution() -> None:
    problem = named(chain(9), ("conv", "relu", "pool"))
    found = MEMORY["superneurons"](problem, 8, LIMITS)
    runs = [action.index for action in found.actions if action.act.value == "R"]
    again = {index for index in runs if runs.count(index) > 1}
    assert again and not any(is_conv(problem, index) for index in again)


def test_segments_made_again_stay_or_do_not() -> None:
    """One segment of three: made once and kept (speed), or anew for every reader (memory)."""
    problem = chain(4)
    gaps = [gap for t in (2, 3) for gap in Spans(problem, tuple(range(8))).gaps(t) if gap.before >= 4]
    speed = recomputed(problem, gaps, frozenset({2, 3}))
    memory = recomputed(problem, gaps)
    assert speed.count(1) == 2 and memory.count(1) >= speed.count(1)
    evaluate(problem, freeing(problem, speed))
    evaluate(problem, freeing(problem, memory))


def test_swapadvisor_finds_an_order_that_needs_no_copies() -> None:
    """a, b large; c reads a, d reads b: a c b d needs 12 bytes where a b c d needs 21, and copies take for ever."""
    ops = (
        MemOp("a", 1.0, (), (0,)),
        MemOp("b", 1.0, (), (1,)),
        MemOp("c", 1.0, (0,), (2,)),
        MemOp("d", 1.0, (1,), (3,)),
        MemOp("e", 1.0, (2, 3), (4,)),
    )
    tensors = tuple(MemTensor(size, index, kept=index == 4) for index, size in enumerate((10, 10, 1, 1, 1)))
    problem = MemoryProblem(ops, tensors, tiers=(Tier("host", 100, 0.01, 0.01),))
    found = MEMORY["swapadvisor"](problem, 13, LIMITS)
    assert found.evaluation.step_s == 5.0 and found.evaluation.moved_bytes == 0
    assert listed(problem, (5.0, 3.0, 4.0, 2.0, 1.0)) == (0, 2, 1, 3, 4)
    again = MEMORY["swapadvisor"](problem, 13, Limits(time_s=60, seed=0))
    assert again.actions == found.actions


def test_pofo_is_rotor_where_copies_are_slow_and_free_where_they_are_fast() -> None:
    for budget in (6, 8, 10):
        rotor = MEMORY["rotor"](chain(12), budget, LIMITS).evaluation.step_s
        slow = MEMORY["pofo"](with_tier(chain(12), 100.0), budget, LIMITS).evaluation
        fast = MEMORY["pofo"](with_tier(chain(12), 0.05), budget, LIMITS).evaluation
        assert slow.step_s == rotor and slow.moved_bytes == 0
        assert rotor > fast.step_s and fast.step_s <= 1.02 * chain(12).compute_s
        between = MEMORY["pofo"](with_tier(chain(12), 1.0), budget, LIMITS).evaluation
        assert between.step_s <= rotor
