"""The searched pipeline schedule beside the named ones, on random pipelines.

    python -m benchmarks.schedules --json out/bench/schedules.json

Three families, all from fixed seeds: *equal* (every stage the same, messages free), *uneven* (every stage's F, I and
W of its own, messages that take up to 30 % of a forward), *tight* (uneven, with the memory of one of the named
schedules). Two to four positions with one or two stages each, one to three microbatches a position; in every third,
stages may have a second replica. A row says how much shorter than the best named schedule that fits the searched one
is, what its bubble, its peak of activations (over the memory of the named one) and its gap to the bound are, and the
process' seconds. A searched schedule that is longer, does not fit or does not verify is a failure.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable

from benchmarks.table import Row, main
from paraplan.ir.errors import InvalidPlanError
from paraplan.lowering.verification.verify_schedule import verify_schedule
from paraplan.planner.schedules.event_simulation import ScheduleTimes, evaluate
from paraplan.planner.schedules.named import NAMED, applicable
from paraplan.planner.schedules.schedule_problem import PipelineProblem, StageCosts, stages_of
from paraplan.planner.schedules.searching.schedule_search import Effort, Searched, search

COUNTS = {"equal": 40, "uneven": 100, "tight": 60}
COLUMNS = (
    "case",
    "positions",
    "stages",
    "microbatches",
    "best named",
    "named bubble",
    "bubble",
    "shorter",
    "peak",
    "gap",
    "found by",
    "solve_s",
)


def problem_of(family: str, seed: int) -> PipelineProblem:
    """One random pipeline."""
    rng = random.Random(f"{family} {seed}")
    positions, per, rounds = rng.randint(2, 4), rng.randint(1, 2), rng.randint(1, 3)
    if family == "equal":
        ratio = rng.choice((1.0, 2.0))
        stages = (StageCosts(backward_s=ratio, input_grad_s=ratio / 2, weight_grad_s=ratio / 2),) * (positions * per)
    else:
        stages = tuple(_uneven(rng) for _ in range(positions * per))
    problem = PipelineProblem(
        stages=stages, num_positions=positions, num_microbatches=positions * rounds, replicas=seed % 3 == 0
    )
    if family != "tight":
        return problem
    peaks = [named.peak_bytes for named in fitting(problem).values()]
    return PipelineProblem(
        stages=stages,
        num_positions=positions,
        num_microbatches=positions * rounds,
        replicas=problem.replicas,
        memory_bytes=rng.choice(peaks),
    )


def _uneven(rng: random.Random) -> StageCosts:
    forward_s = rng.uniform(0.5, 1.5)
    input_grad_s, weight_grad_s = forward_s * rng.uniform(0.8, 1.3), forward_s * rng.uniform(0.5, 1.1)
    return StageCosts(
        forward_s=forward_s,
        backward_s=input_grad_s + weight_grad_s,
        input_grad_s=input_grad_s,
        weight_grad_s=weight_grad_s,
        send_forward_s=rng.uniform(0, 0.3),
        send_backward_s=rng.uniform(0, 0.3),
        activation_bytes=rng.randint(6, 12),
        weight_grad_bytes=rng.randint(2, 6),
        fixed_bytes=rng.randint(0, 10),
    )


def fitting(problem: PipelineProblem) -> dict[str, ScheduleTimes]:
    """The named schedules a pipeline can take within its memory."""
    found = {}
    for name, orders in applicable(len(problem.stages), problem.num_positions, problem.num_microbatches).items():
        if NAMED[name].num_replicas == 1 or problem.replicas:
            evaluated = evaluate(orders, problem.stages)
            if fits(problem, evaluated):
                found[name] = evaluated
    return found


def fits(problem: PipelineProblem, evaluated: ScheduleTimes) -> bool:
    """Whether peaks keep within the memory."""
    limits = problem.memory_bytes or evaluated.peak_bytes
    return all(peak <= limit for peak, limit in zip(evaluated.peak_bytes, limits, strict=True))


def row(family: str, seed: int, effort: Effort) -> Row:
    """Search one pipeline and check what comes out."""
    problem = problem_of(family, seed)
    named = fitting(problem)
    best = min(named, key=lambda name: named[name].step_s)
    begun = time.process_time()
    found = search(problem, effort)
    solve_s = time.process_time() - begun
    shorter = 1 - found.evaluation.step_s / named[best].step_s
    return {
        "positions": problem.num_positions,
        "stages": len(problem.stages),
        "microbatches": problem.num_microbatches,
        "family": family,
        "best named": best,
        "named bubble": named[best].bubble,
        "bubble": found.evaluation.bubble,
        "shorter": shorter,
        "peak": max(found.evaluation.peak_bytes) / max(named[best].peak_bytes),
        "gap": max(0.0, found.gap),
        "found by": found.found_by,
        "status": found.status,
        "solve_s": solve_s,
        "failures": _failures(problem, found, shorter),
    }


def _failures(problem: PipelineProblem, found: Searched, shorter: float) -> list[str]:
    failures = []
    if shorter < -1e-9:
        failures.append("longer than the best named schedule")
    if not fits(problem, found.evaluation):
        failures.append("does not fit")
    try:
        verify_schedule(found.schedule(problem), len(problem.stages), problem.num_microbatches, stages_of(found.orders))
    except InvalidPlanError as fault:
        failures.append(str(fault))
    return failures


def cases(effort: Effort) -> dict[str, Callable[[], Row]]:
    """A case per pipeline."""
    return {
        f"{family} {seed:03}": lambda f=family, s=seed: row(f, s, effort)
        for family, count in COUNTS.items()
        for seed in range(count)
    }


def run(arguments: list[str]) -> int:
    """The command line: how much to search, then what every benchmark takes."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--improved", type=int, default=Effort().improved)
    parser.add_argument("--work", type=float, default=Effort().work)
    own, rest = parser.parse_known_args(arguments)
    return main("schedules", cases(Effort(improved=own.improved, work=own.work)), COLUMNS, rest)


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
