"""`searched` against every order there is on tiny pipelines, against every named schedule on random ones."""

from __future__ import annotations

import itertools
import random

import pytest

from paraplan.ir.errors import ConstraintError, InfeasibleError, InvalidPlanError
from paraplan.ir.execution.schedule import Action, ActionKind
from paraplan.lowering.verification.verify_schedule import verify_schedule
from paraplan.planner.schedules.event_simulation import Noise, evaluate
from paraplan.planner.schedules.named import NAMED, applicable
from paraplan.planner.schedules.schedule_problem import PipelineProblem, StageCosts, stages_of
from paraplan.planner.schedules.searching.dispatch import dispatch, rules
from paraplan.planner.schedules.searching.exact_schedule import solve_exactly
from paraplan.planner.schedules.searching.job_shop import StagePositions, build_shop, placements
from paraplan.planner.schedules.searching.schedule_search import Effort, search
from paraplan.planner.schedules.searching.shop_bound import machine_bound, preemptive
from paraplan.planner.schedules.searching.timing import timing

SMALL = Effort(dispatched=20_000, improved=60_000, exact=100, work=0.02)


def stages(rng: random.Random, count: int, send: bool = True) -> tuple[StageCosts, ...]:
    found = []
    for _ in range(count):
        forward_s, input_grad_s, weight_grad_s = (rng.choice((0.5, 1.0, 1.5, 2.25)) for _ in range(3))
        found.append(
            StageCosts(
                forward_s=forward_s,
                backward_s=input_grad_s + weight_grad_s,
                input_grad_s=input_grad_s,
                weight_grad_s=weight_grad_s,
                send_forward_s=rng.choice((0.0, 0.25, 1.0)) if send else 0.0,
                send_backward_s=rng.choice((0.0, 0.25, 1.0)) if send else 0.0,
                activation_bytes=rng.randint(3, 6),
                weight_grad_bytes=rng.randint(1, 3),
                fixed_bytes=rng.randint(0, 4),
            )
        )
    return tuple(found)


def interleavings(chains: list[list[Action]]) -> list[tuple[Action, ...]]:
    """Every merge of some chains."""
    if not any(chains):
        return [()]
    found = []
    for index, chain in enumerate(chains):
        if chain:
            rest = [each[1:] if other == index else each for other, each in enumerate(chains)]
            found += [(chain[0], *tail) for tail in interleavings(rest)]
    return found


def shortest(problem: PipelineProblem, placed: StagePositions, split: bool) -> float:
    """The least step over all orders in which each microbatch's own computations are in a possible order."""
    kinds = (ActionKind.I, ActionKind.W) if split else (ActionKind.B,)
    every = []
    for position in range(problem.num_positions):
        chains = []
        for micro in range(problem.num_microbatches):
            held = [s for s in range(len(problem.stages)) if placed.of(s, micro) == position]
            chain = [Action(stage=s, kind=ActionKind.F, microbatch=micro) for s in held]
            for s in reversed(held):
                chain += [Action(stage=s, kind=kind, microbatch=micro) for kind in kinds]
            chains.append(chain)
        every.append(interleavings(chains))
    best = float("inf")
    limits = problem.memory_bytes or (10**9,) * problem.num_positions
    for orders in itertools.product(*every):
        try:
            found = evaluate(orders, problem.stages)
        except InvalidPlanError:
            continue
        if all(peak <= limit for peak, limit in zip(found.peak_bytes, limits, strict=True)):
            best = min(best, found.step_s)
    return best


TINY = [(2, 1, 2, True), (2, 1, 2, False), (2, 1, 3, False), (3, 1, 2, False), (2, 2, 2, False)]


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize(("p", "v", "m", "split"), TINY)
@pytest.mark.parametrize("seed", range(2))
def test_the_best_of_all_orders(p: int, v: int, m: int, split: bool, limited: bool, seed: int) -> None:
    rng = random.Random(f"{p} {v} {m} {split} {limited} {seed}")
    costs = stages(rng, p * v)
    memory = ()
    if limited:
        whole = [sum(costs[s].fixed_bytes + costs[s].activation_bytes for s in range(i, p * v, p)) for i in range(p)]
        memory = tuple(least + rng.randint(0, 5) for least in whole)
    turns = tuple(stage % p for stage in range(p * v))
    problem = PipelineProblem(
        stages=costs, num_positions=p, num_microbatches=m, memory_bytes=memory, placement=turns, split_backward=split
    )
    placed = placements(problem)[0]
    least = min(shortest(problem, placed, each) for each in ((False, True) if split else (False,)))
    found = search(problem)
    assert found.evaluation.step_s == pytest.approx(least, rel=1e-4) and found.evaluation.step_s >= least - 1e-9
    assert found.bound_s <= least * (1 + 1e-9)
    assert all(peak <= limit for peak, limit in zip(found.evaluation.peak_bytes, memory, strict=False))


def test_two_ways_is_the_best_of_all_orders() -> None:
    costs = stages(random.Random(7), 2, send=False)
    problem = PipelineProblem(stages=costs, num_positions=2, num_microbatches=2, replicas=True, split_backward=False)
    least = min(shortest(problem, placed, False) for placed in placements(problem))
    assert search(problem).evaluation.step_s == pytest.approx(least, rel=1e-4)


@pytest.mark.parametrize("seed", range(12))
def test_never_longer_than_a_named_schedule_that_fits(seed: int) -> None:
    rng = random.Random(seed)
    p, v = rng.choice([(2, 1), (3, 1), (4, 1), (2, 2), (3, 2)])
    m = p * rng.choice((1, 2))
    costs = stages(rng, p * v)
    free = PipelineProblem(stages=costs, num_positions=p, num_microbatches=m, replicas=rng.random() < 0.5)
    peaks = [evaluate(orders, costs).peak_bytes for orders in applicable(p * v, p, m).values()]
    memory = tuple(rng.choice(peaks)) if rng.random() < 0.6 else ()
    problem = PipelineProblem(
        **{name: getattr(free, name) for name in free.__struct_fields__} | {"memory_bytes": memory}
    )
    found = search(problem, SMALL)
    step_s = found.evaluation.step_s
    fitting = 0
    for name, orders in applicable(p * v, p, m).items():
        if NAMED[name].num_replicas == 1 or problem.replicas:
            named = evaluate(orders, costs)
            if not memory or all(a <= b for a, b in zip(named.peak_bytes, memory, strict=True)):
                fitting += 1
                assert step_s <= named.step_s * (1 + 1e-9), name
    assert found.bound_s <= step_s * (1 + 1e-12) and found.gap == pytest.approx(1 - found.bound_s / step_s)
    assert not memory or all(a <= b for a, b in zip(found.evaluation.peak_bytes, memory, strict=True))
    assert verify_schedule(found.schedule(problem), p * v, m, stages_of(found.orders))
    assert search(problem, SMALL).orders == found.orders


@pytest.mark.parametrize("seed", range(8))
def test_both_simulations_agree_and_nothing_is_below_the_bounds(seed: int) -> None:
    """`timing` against `evaluate`, memory too; the machine bound and CP-SAT's below every rule's step."""
    rng = random.Random(seed)
    p, v, m, split = rng.randint(1, 4), rng.randint(1, 2), rng.randint(1, 5), rng.random() < 0.5
    problem = PipelineProblem(stages=stages(rng, p * v), num_positions=p, num_microbatches=m, replicas=True)
    for placed in placements(problem):
        shop = build_shop(problem, placed, split)
        bound_s, _ = machine_bound(shop)
        steps = []
        for rule in list(rules(shop, p))[::7]:
            sequences = dispatch(shop, rule)
            if sequences is None:
                continue
            known, found = timing(shop, sequences), evaluate(shop.orders(sequences), problem.stages)
            assert known is not None and known.step_s == pytest.approx(found.step_s)
            starts = {event.action: event.start_s for event in found.events}
            assert all(starts[a] == pytest.approx(s) for a, s in zip(shop.actions, known.start_s, strict=True))
            for position, (sequence, peak) in enumerate(zip(sequences, found.peak_bytes, strict=True)):
                for limit, fits in ((peak, True), (peak - 1, False)):
                    tight = build_shop(
                        PipelineProblem(
                            stages=problem.stages, num_positions=p, num_microbatches=m, memory_bytes=(limit,) * p
                        ),
                        placed,
                        split,
                    )
                    assert tight.fits(position, sequence) is fits
            steps.append((known.step_s, sequences))
        assert bound_s <= min(steps)[0] * (1 + 1e-12)
        best_s, best = min(steps)
        solved = solve_exactly(shop, best, best_s, bound_s, effort=0.2, time_limit_s=60)
        assert solved.bound_s <= best_s * (1 + 1e-12)
        if solved.sequences is not None:
            again = timing(shop, solved.sequences)
            assert again is None or solved.bound_s <= again.step_s * (1 + 1e-12)


def test_the_bound_is_the_work_between_fill_and_drain() -> None:
    """Equal stages: 1F1B's step is M (F + B) on the last position, and P - 1 forwards and backwards around it."""
    problem = PipelineProblem(stages=(StageCosts(),) * 4, num_positions=4, num_microbatches=6, split_backward=False)
    found = search(problem)
    assert found.status == "optimal" and found.gap == 0 and found.evaluation.step_s == 6 * 3 + 3 * 3 == found.bound_s
    assert "its work between fill and drain" in found.bound_scope
    assert preemptive([(0, 2, 5), (1, 3, 9)]) == 13 and preemptive([(0, 4, 0), (1, 1, 8), (9, 1, 1)]) == 11
    assert preemptive([(0, 4, 1), (1, 2, 6)]) == 9 and preemptive([]) == 0


def test_zero_bubble_is_found() -> None:
    """With F = I = W, two stages a position and enough memory, nothing is shorter than ZB-V."""
    problem = PipelineProblem(stages=(StageCosts(),) * 6, num_positions=3, num_microbatches=6)
    found = search(problem, SMALL)
    assert found.status == "optimal" and found.evaluation.step_s <= 6 * 6 + 2


def test_memory_that_cannot_do() -> None:
    def problem(memory: tuple[int, ...]) -> PipelineProblem:
        costs = (StageCosts(activation_bytes=5, fixed_bytes=10),) * 4
        return PipelineProblem(stages=costs, num_positions=2, num_microbatches=3, memory_bytes=memory)

    assert max(search(problem((30, 30)), SMALL).evaluation.peak_bytes) == 30  # one microbatch at a time
    whole = PipelineProblem(
        stages=(StageCosts(activation_bytes=5, fixed_bytes=10),) * 4,
        num_positions=2,
        num_microbatches=3,
        memory_bytes=(30, 30),
        split_backward=False,
        placement=(0, 1, 0, 1),
    )
    found = search(whole, Effort(exact=0))
    # stage 0's activation stays for 12 s, stage 2's for 6, 5 bytes each of 10, three times: 27 s
    assert found.bound_s == pytest.approx(27) and "position 0: its memory between fill and drain" in found.bound_scope
    with pytest.raises(InfeasibleError, match="in turns: position 1 needs 30 bytes of 29; in waves: position 1"):
        search(problem((30, 29)), SMALL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": (StageCosts(),) * 3}, "3 stages on 2 positions; give a multiple of 2, or a placement"),
        ({"stages": ()}, "at least one stage"),
        ({"placement": (0, 0)}, r"placement \(0, 0\) of 2 stages on 2 positions"),
        ({"memory_bytes": (1,)}, "1 memory limits for 2 positions"),
        ({"num_microbatches": 0}, "2 positions and 0 microbatches"),
        ({"stages": (StageCosts(), StageCosts(forward_s=-1.0))}, "stage 1: forward_s is -1.0"),
        ({"stages": (StageCosts(), StageCosts(backward_s=float("inf")))}, "stage 1: backward_s is inf"),
    ],
)
def test_problems_that_mean_nothing(changes: dict[str, object], message: str) -> None:
    base: dict[str, object] = {"stages": (StageCosts(),) * 2, "num_positions": 2, "num_microbatches": 2}
    with pytest.raises(ConstraintError, match=message):
        search(PipelineProblem(**(base | changes)))  # type: ignore[arg-type]


def test_uneven_stages_and_a_placement_of_ones_own() -> None:
    problem = PipelineProblem(
        stages=stages(random.Random(3), 3), num_positions=2, num_microbatches=3, placement=(0, 1, 1)
    )
    found = search(problem, SMALL)
    assert stages_of(found.orders) == ((0,), (1, 2))
    assert verify_schedule(found.schedule(problem), 3, 3, stages_of(found.orders))


def test_out_of_time_the_best_so_far() -> None:
    problem = PipelineProblem(stages=stages(random.Random(5), 6), num_positions=3, num_microbatches=6)
    hurried, longer = search(problem, time_limit_s=0.0), search(problem, SMALL)
    assert hurried.found_by in NAMED and hurried.evaluation.step_s >= longer.evaluation.step_s
    assert longer.bound_s >= hurried.bound_s * (1 - 1e-12)


def test_noise_is_of_the_seed_alone() -> None:
    costs = (StageCosts(),) * 3
    orders = applicable(3, 3, 4)["1f1b"]
    even = evaluate(orders, costs)
    noisy = evaluate(orders, costs, Noise(seed=1, jitter=0.2))
    assert (
        noisy
        == evaluate(orders, costs, Noise(seed=1, jitter=0.2))
        != evaluate(orders, costs, Noise(seed=2, jitter=0.2))
    )
    assert evaluate(orders, costs, Noise(seed=5)) == even
    slow = evaluate(orders, costs, Noise(slowdown=(1.0, 2.0, 1.0)))
    assert slow.busy_s == (12.0, 24.0, 12.0) and slow.step_s > even.step_s
