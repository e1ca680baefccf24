"""The largest batch of VGG-19 in 16 GB: Checkmate's table (Jain et al. 2020, figure 6), with ours.

    python -m benchmarks.batches [--only PATTERN] [--json FILE] [--seconds S]

VGG-19 at 224 x 224 in float32 under SGD, in 16 GiB: parameters, gradients and workspaces as the rank program has them.
As in the paper a batch counts where the step takes at most one forward more than with every op once (`most_overhead`,
%). A step's bytes and seconds are taken as linear in the batch between two captures, and the plan of the largest batch
is priced again on a capture at that batch (`checked`: its peak in GiB). S: seconds per plan of ours, 20 without the
option. `paper`: the paper's own figures, of a V100 and its own graph, whose keep-all holds fewer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from benchmarks.table import Row, main
from benchmarks.zoo.sized import flattened, vgg19
from paraplan.baselines import MEMORY, Limits
from paraplan.baselines.common import keep_all
from paraplan.ir.errors import NoPlanError
from paraplan.planner.memory.answer import MemoryAnswer
from paraplan.planner.memory.memory_schedule import evaluate
from paraplan.planner.memory.plan_memory import MemoryLimits, plan_memory
from paraplan.planner.memory.problem import MemOp, MemoryProblem, MemTensor

BUDGET_BYTES = 16 * 2**30
MOST = 2048
TIME_S = 20.0
GAP = 0.005
PAPER = {"keep-all": 167, "chen-sqrt": 197, "chen-greedy": 266, "ours": 289}
"""The last is Checkmate's integer program."""
COLUMNS = ("case", "batch", "paper", "overhead", "most_overhead", "checked")


@cache
def captured(batch: int) -> MemoryProblem:
    """The step at a batch."""
    return flattened(vgg19(batch), "vgg19", "sgd").problem


def at(batch: int) -> MemoryProblem:
    """The step at a batch, on the line through two captures."""
    low, high = captured(64), captured(192)
    share = (batch - 64) / 128
    ops = tuple(_op(a, b, share) for a, b in zip(low.ops, high.ops, strict=True))
    tensors = tuple(
        MemTensor(_between(a.nbytes, b.nbytes, share), a.maker, a.kept)
        for a, b in zip(low.tensors, high.tensors, strict=True)
    )
    return MemoryProblem(ops, tensors, _between(low.base_bytes, high.base_bytes, share))


def _op(low: MemOp, high: MemOp, share: float) -> MemOp:
    workspace = _between(low.workspace_bytes, high.workspace_bytes, share)
    return replace(low, time_s=max(0.0, low.time_s + share * (high.time_s - low.time_s)), workspace_bytes=workspace)


def _between(low: int, high: int, share: float) -> int:
    return max(0, round(low + share * (high - low)))


def most_s(problem: MemoryProblem) -> float:
    """Every op once, and the forward once more."""
    return problem.compute_s + sum(op.time_s for op in problem.ops if not op.backward)


def planned(method: str, problem: MemoryProblem, time_s: float) -> MemoryAnswer | None:
    """A method's schedule, where it has one that counts."""
    try:
        if method == "ours":
            found = plan_memory(problem, BUDGET_BYTES, MemoryLimits(time_s=time_s, gap=GAP))
        elif method == "keep-all":
            found = keep_all(problem)
        else:
            found = MEMORY[method](problem, BUDGET_BYTES, Limits(time_s=time_s))
    except NoPlanError:
        return None
    fits = found.evaluation.peak_bytes <= BUDGET_BYTES and found.evaluation.step_s <= most_s(problem)
    return found if fits else None


def largest(method: str, time_s: float) -> Row:
    """By bisection."""
    least, above = 0, MOST
    best: MemoryAnswer | None = None
    while above - least > 1:
        batch = (least + above) // 2
        found = planned(method, at(batch), time_s)
        if found is None:
            above = batch
        else:
            least, best = batch, found
    if best is None:
        return {"paper": PAPER.get(method)}
    there, problem = evaluate(captured(least), best.actions), at(least)
    row: Row = {
        "batch": least,
        "paper": PAPER.get(method),
        "overhead": 100 * (best.evaluation.step_s / problem.compute_s - 1),
        "most_overhead": 100 * (most_s(problem) / problem.compute_s - 1),
        "checked": there.peak_bytes / 2**30,
    }
    return row | ({"failures": ["over 16 GiB as captured"]} if there.peak_bytes > BUDGET_BYTES else {})


def run(arguments: list[str]) -> int:
    """The command line: seconds, then what every benchmark takes."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--seconds", type=float, default=TIME_S)
    own, rest = parser.parse_known_args(arguments)
    methods = ("keep-all", "chen-sqrt", "chen-greedy", "rotor", "ours")
    cases: dict[str, Callable[[], Row]] = {name: partial(largest, name, own.seconds) for name in methods}
    return main("batches", cases, COLUMNS, rest)


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
