"""The memory strategies of the literature on steps of several shapes, at shrinking budgets.

    python -m benchmarks.strategies [--graphs FOLDER] [--seconds S] [--ours S] [--only PATTERN] [--json FILE]

Without a folder: synthetic steps. With one: the training graphs of Checkmate in it too (`formats/checkmate.py`).
Budgets are shares of the peak with every op once and each result freed after its last reader. The tier, for the
strategies that copy, takes half the step to copy all results one way. A case is a step, a budget and a strategy, and
has ten seconds of wall time unless `--seconds` says otherwise.

Columns: `overhead` is step / (every op once) − 1; `peak` and `budget` shares of that peak; `bound` what is proved of
the overhead; `solve_s` processor seconds; `status` "optimal" or "feasible", or why there is no schedule: "infeasible"
(proved of every schedule: an op alone needs more), "none" (none found within the budget), "n/a" (the graph lacks what
it needs). With `--ours S`, `ours` is the overhead of `plan_memory` within the peak the strategy reached, given S
seconds (and the tier where the strategy had it); a row in which it is higher counts as failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.formats.checkmate import read_folder
from benchmarks.table import Row, main
from paraplan.baselines import MEMORY, OFFLOADING, Limits
from paraplan.ir.errors import ConstraintError, InfeasibleError, SolverLimitError
from paraplan.planner.memory.memory_schedule import evaluate, freeing
from paraplan.planner.memory.plan_memory import MemoryLimits, plan_memory
from paraplan.planner.memory.problem import MemOp, MemoryProblem, MemTensor, Tier

TIME_S = 10.0
BUDGETS = (0.8, 0.6, 0.5, 0.4, 0.3)
COLUMNS = ("case", "overhead", "ours", "bound", "peak", "solve_s", "status")


def uniform(layers: int) -> MemoryProblem:
    """A chain of equal layers, each backward twice its forward and reading its input and output."""
    return _chain([(1.0, 100)] * layers)


def uneven(layers: int, seed: int = 0) -> MemoryProblem:
    """A chain of convolutions and cheap ops between them, results shrinking with depth."""
    draw = random.Random(seed)
    found = []
    for index in range(layers):
        heavy = index % 3 == 0
        nbytes = int(1000 * 2 ** (-3 * index / layers) * draw.uniform(0.7, 1.3))
        found.append((draw.uniform(5, 9) if heavy else draw.uniform(0.3, 1.0), nbytes))
    return _chain(found)


def _chain(layers: list[tuple[float, int]]) -> MemoryProblem:
    ops: list[MemOp] = []
    tensors: list[MemTensor] = [MemTensor(layers[0][1], -1)]
    for index, (time_s, nbytes) in enumerate(layers):
        ops.append(MemOp(("conv", "norm", "relu")[index % 3] + str(index), time_s, (index,), (index + 1,)))
        tensors.append(MemTensor(nbytes, index))
    gradient = len(layers)
    for index in reversed(range(len(layers))):
        reads = tuple(dict.fromkeys((index, index + 1, gradient)))
        ops.append(MemOp(f"{ops[index].name}_backward", 2 * ops[index].time_s, reads, (len(tensors),), backward=True))
        gradient = len(tensors)
        tensors.append(MemTensor(tensors[index].nbytes, len(ops) - 1, kept=index == 0))
    return MemoryProblem(tuple(ops), tuple(tensors))


def row(problem: MemoryProblem, strategy: str, share: float, time_s: float, ours_s: float) -> Row:
    """One strategy on one step at one budget."""
    whole = evaluate(problem, freeing(problem, tuple(range(len(problem.ops)))))
    budget_bytes = int(share * whole.peak_bytes)
    if strategy in OFFLOADING:
        rate = sum(tensor.nbytes for tensor in problem.tensors) / (0.5 * problem.compute_s)
        problem = replace(problem, tiers=(Tier("host", 2**62, rate, rate),))
    begun = time.process_time()
    found: Row = {"strategy": strategy, "budget": share}
    try:
        answer = MEMORY[strategy](problem, budget_bytes, Limits(time_s=time_s))
    except InfeasibleError:
        found["status"] = "infeasible"
    except SolverLimitError:
        found["status"] = "none"
    except ConstraintError:
        found["status"] = "n/a"
    else:
        over = answer.evaluation.peak_bytes > budget_bytes
        found |= {
            "overhead": answer.evaluation.step_s / whole.step_s - 1,
            "bound": None if answer.bound_s is None else answer.bound_s / whole.step_s - 1,
            "peak": answer.evaluation.peak_bytes / whole.peak_bytes,
            "status": "over budget" if over else answer.status.value,
            "notes": "; ".join(answer.notes),
        }
    found["solve_s"] = time.process_time() - begun
    if ours_s and "peak" in found:
        found |= ours(problem, answer.evaluation.peak_bytes, answer.evaluation.step_s, whole.step_s, ours_s)
    return found


def ours(problem: MemoryProblem, peak_bytes: int, step_s: float, whole_s: float, time_s: float) -> Row:
    """Our overhead within a strategy's own peak."""
    try:
        mine = plan_memory(problem, peak_bytes, MemoryLimits(time_s=time_s)).evaluation.step_s
    except SolverLimitError:
        return {"ours": None, "failures": ["nothing found within the strategy's peak"]}
    found: Row = {"ours": mine / whole_s - 1}
    return found | ({"failures": ["more than the strategy takes"]} if mine > step_s * (1 + 1e-9) else {})


def cases(folder: Path | None, time_s: float, ours_s: float) -> dict[str, Callable[[], Row]]:
    """A case per step, budget and strategy."""
    problems = {"chain 32": uniform(32), "uneven chain 60": uneven(60)}
    if folder is not None:
        problems |= read_folder(folder)
    return {
        f"{name} {share:.0%} {strategy}": lambda p=problem, n=strategy, s=share: row(p, n, s, time_s, ours_s)
        for name, problem in problems.items()
        for share in BUDGETS
        for strategy in MEMORY
    }


def run(arguments: list[str]) -> int:
    """The command line: a folder of graphs, seconds, then what every benchmark takes."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--graphs", type=Path)
    parser.add_argument("--seconds", type=float, default=TIME_S)
    parser.add_argument("--ours", type=float, default=0.0)
    own, rest = parser.parse_known_args(arguments)
    try:
        chosen = cases(own.graphs, own.seconds, own.ours)
    except (FileNotFoundError, ValueError) as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    return main("strategies", chosen, COLUMNS, rest)


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
