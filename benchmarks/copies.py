"""Recomputation, copies to a host, and both together, within a byte budget.

    python -m benchmarks.copies [--only PATTERN] [--json FILE] [--seconds S]

Steps and costs are those of `benchmarks.memory`; the budget is 30 % of the peak without recomputation, the link has the
rate named each way and 10 us a copy. Overheads in % of the step with every op once: `again` with recomputation alone,
`copies` with copies alone (no op may run twice), `both`; behind each what is proved of any such schedule. `moved` is
what both together copy out, as a share of the peak. A row where both together are slower than the better alone fails.
S: seconds for each of the three, 60 without the option.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial

from benchmarks.table import Row, main
from benchmarks.zoo.sized import memory_problem
from paraplan.planner.memory.memory_schedule import evaluate, freeing
from paraplan.planner.memory.plan_memory import MemoryAnswer, MemoryLimits, plan_memory
from paraplan.planner.memory.problem import MemoryProblem, Tier

SHARE = 0.3
TIME_S = 60.0
LATENCY_S = 10e-6
RATES = (16, 50)
MODELS = ("gpt2-12", "resnet50")
COLUMNS = ("case", "again", "again_bound", "copies", "copies_bound", "both", "both_bound", "moved")


def row(name: str, gigabytes_per_s: int, time_s: float) -> Row:
    """One model with one link."""
    plain = memory_problem(name).problem
    host = Tier("host", 2**62, gigabytes_per_s * 1e9, gigabytes_per_s * 1e9, LATENCY_S)
    both = replace(plain, tiers=(host,))
    once = replace(both, ops=tuple(replace(op, repeatable=False) for op in both.ops))
    most = evaluate(plain, freeing(plain, tuple(range(len(plain.ops))))).peak_bytes - plain.base_bytes
    found: Row = {"budget": SHARE}
    steps: dict[str, MemoryAnswer] = {}
    for what, problem in (("again", plain), ("copies", once), ("both", both)):
        steps[what] = plan_memory(problem, plain.base_bytes + int(SHARE * most), MemoryLimits(time_s=time_s))
        found[what] = _overhead(plain, steps[what].evaluation.step_s)
        found[f"{what}_bound"] = _overhead(plain, steps[what].bound_s or 0.0)
    found["moved"] = steps["both"].evaluation.moved_bytes / most
    if found["both"] > min(found["again"], found["copies"]):
        found["failures"] = ["both together are slower than the better alone"]
    return found


def _overhead(problem: MemoryProblem, step_s: float) -> float:
    return 100 * (step_s / problem.compute_s - 1)


def run(arguments: list[str]) -> int:
    """The command line: seconds, then what every benchmark takes."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--seconds", type=float, default=TIME_S)
    own, rest = parser.parse_known_args(arguments)
    chosen = {f"{name} {rate} GB/s": partial(row, name, rate, own.seconds) for name in MODELS for rate in RATES}
    return main("copies", chosen, COLUMNS, rest)


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
