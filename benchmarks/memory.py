"""Recomputation within a byte budget: overhead, proved bound and planning time of models at papers' sizes.

    python -m benchmarks.memory [--only PATTERN] [--json FILE] [--graphs FOLDER] [--seconds S]

Models are captured on the meta device, lowered for one device and flattened, with AdamW's states, at the costs
max(flops / 60 T, bytes / 1.2 TB/s) + 3 us per op. FOLDER holds Checkmate's graphs (networkx node-link JSON). A budget
is a share of the peak without recomputation, above what is always there. `overhead` and `bound` are shares of the step
without recomputation in %, `gap` is (step - bound) / step in %, `cpu_s` the processor's seconds (which a busy machine
does not stretch, though it cuts short what S seconds, 60 without the option, allow), `peak` the plan's, as a share like
the budget. The sizes do not run in float64 here, so each row has a `twin`, the same layers narrow on small inputs,
planned at the same share of its own peak and executed: `measured_peak` in bytes, `simulated_peak` as a multiple of it,
and whether its gradients are those of one device. Without `--only`, what takes some minutes together: every model at
`QUICK`. `--only .` runs all, hours.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.formats.checkmate import read_folder
from benchmarks.table import Row, main
from paraplan.ir.errors import InfeasibleError, NoPlanError
from paraplan.planner.memory.memory_schedule import evaluate, freeing
from paraplan.planner.memory.plan_memory import MemoryLimits, plan_memory
from paraplan.planner.memory.problem import MemoryProblem

SHARES = {"models": (0.8, 0.6, 0.5, 0.4, 0.3, 0.2), "graphs": (0.9, 0.8, 0.6, 0.5, 0.4)}
QUICK = 0.5
TIME_S = 60.0
MODELS = (
    "vgg16",
    "resnet50",
    "resnet152",
    "unet",
    "mlp8",
    "mlp32",
    "gpt2-4",
    "gpt2-4-50k",
    "gpt2-12",
    "gpt2-12-50k",
    "gpt2-24",
    "gpt2-48",
    "llama-8",
)
COLUMNS = (
    *("case", "ops", "budget", "overhead", "bound", "gap", "solve_s", "cpu_s", "peak", "status"),
    *("twin", "measured_peak", "simulated_peak", "gradients_equal"),
)
TWIN_S = 10.0
"""For planning a twin; of the seconds given where those are less."""


def planned(problem: MemoryProblem, share: float, time_s: float) -> Row:
    """One budget."""
    base = problem.base_bytes
    most = evaluate(problem, freeing(problem, tuple(range(len(problem.ops))))).peak_bytes - base
    started, cpu = time.perf_counter(), time.process_time()
    row: Row = {"ops": len(problem.ops), "budget": share}
    try:
        found = plan_memory(problem, base + int(most * share), MemoryLimits(time_s=time_s))
    except NoPlanError as fault:
        return {**row, "status": "infeasible" if isinstance(fault, InfeasibleError) else "limit", "why": str(fault)}
    whole = problem.compute_s
    return {
        **row,
        "overhead": 100 * (found.evaluation.step_s / whole - 1),
        "bound": 100 * (found.bound_s / whole - 1),
        "gap": 100 * found.gap,
        "solve_s": time.perf_counter() - started,
        "cpu_s": time.process_time() - cpu,
        "peak": (found.evaluation.peak_bytes - base) / most,
        "status": found.status.value,
    }


def model(name: str, share: float, time_s: float) -> Row:
    """A captured model at one budget, and its twin executed."""
    from benchmarks.executed import executed  # noqa: PLC0415  (imports torch, which graphs need not)
    from benchmarks.zoo.sized import memory_problem  # noqa: PLC0415

    row = planned(memory_problem(name).problem, share, time_s)
    return {**row, **executed(name, share, min(time_s, TWIN_S))}


def cases(folder: Path | None, time_s: float, quick: bool) -> dict[str, Callable[[], Row]]:
    """Models, then the folder's graphs."""
    found: dict[str, Callable[[], Row]] = {
        f"{name} {share:.0%}": lambda n=name, s=share: model(n, s, time_s)
        for name in MODELS
        for share in SHARES["models"]
        if share == QUICK or not quick
    }
    for name, problem in (read_folder(folder) if folder else {}).items():
        for share in SHARES["graphs"]:
            found[f"{name} {share:.0%}"] = lambda p=problem, s=share: planned(p, s, time_s)
    return found


def run(arguments: list[str]) -> int:
    """The command line: a folder of graphs, seconds, then what every benchmark takes."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--graphs", type=Path)
    parser.add_argument("--seconds", type=float, default=TIME_S)
    own, rest = parser.parse_known_args(arguments)
    quick = not any(word.startswith("--only") for word in rest)
    try:
        chosen = cases(own.graphs, own.seconds, quick)
    except (FileNotFoundError, ValueError) as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    return main("memory", chosen, COLUMNS, rest)


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
