"""Which kinds of kernels a step's predicted compute consists of: published rows' plans, and steps measured on an H200.

    python -m benchmarks.compute_shares --plans FOLDER [--only PATTERN] [--json FILE]
    python -m benchmarks.compute_shares --h200 [--only PATTERN] [--json FILE]

FOLDER is what `benchmarks.published --plans` wrote. A row has seconds of compute of the rank that ends last, by kind:
products, attention, norms, sums over rows, casts, embeddings, loss, chains that are compiled to one kernel, all other
kernels that move bytes, sums of gradients, the optimizer's update. With --h200 the plans of `docs/benchmarks/gpu.md`
are made anew (no GPU needed) and stand beside the sums of kernels' times that an H200 took; "idle known" is the same
prediction at the clock that the idle time of the measured step leaves the board (`cost_models.clocks`), which no plan
knows before it has run.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import paraplan as pp
from benchmarks.gpu.place import Place
from benchmarks.gpu.training import Make, full_sizes, text
from paraplan.cost_models.clocks import clock_share, step_work
from paraplan.cost_models.costs import Costs
from paraplan.cost_models.ops.fusion import fused_kernels
from paraplan.cost_models.ops.product_shapes import PRODUCTS
from paraplan.cost_models.ops.roofline import op_name
from paraplan.cost_models.predict import plan_costs, simulate_plan
from paraplan.ir.execution.rank_program import Block, InstrKind, RankProgram, StepKind, is_compiled
from paraplan.ir.plan import Plan
from paraplan.jobs.files import read_with_programs

KINDS = (
    "products",
    "attention",
    "norms",
    "row sums",
    "casts",
    "embeddings",
    "loss",
    "chains",
    "elementwise",
    "gradient sums",
    "update",
)
SHOWN = (*KINDS, "collectives' share")
"""With what collectives take of the multiprocessors."""
_PREFIXES = (
    ("norms", ("paraplan.layer_norm", "paraplan.rms_norm")),
    ("row sums", ("aten.sum",)),
    ("casts", ("aten._to_copy",)),
    ("embeddings", ("paraplan.embedding",)),
    ("loss", ("paraplan.ce_", "aten._log_softmax", "aten.nll_loss")),
)
_OUTSIDE = {"update": "update", "accumulate": "gradient sums"}


Seconds = dict[str, float]
"""By kind; and of the step, and of what was measured of it."""


def kind_of(target: str) -> str:
    """Which of `KINDS` an op is of."""
    name = op_name(target)
    if name in PRODUCTS:
        return "attention" if PRODUCTS[name][0] == "attention" else "products"
    return next((kind for kind, prefixes in _PREFIXES if name.startswith(prefixes)), "elementwise")


def block_seconds(block: Block, costs: Costs) -> Seconds:
    """Seconds of a block's ops by kind, as the simulator prices them."""
    found: Seconds = defaultdict(float)
    taken: set[int] = set()
    if costs.compiled and is_compiled(block):
        for kernel in fused_kernels(block):
            apart = sum(costs.instr_s(block, block.instrs[index]) for index in kernel.members)
            seconds = costs.memory_s(kernel.read_bytes, kernel.write_bytes)
            if seconds < apart:
                taken |= {*kernel.members}
                found["chains"] += seconds
    for index, instr in enumerate(block.instrs):
        if instr.kind is InstrKind.OP and index not in taken:
            found[kind_of(instr.target)] += costs.instr_s(block, instr)
        elif instr.kind is InstrKind.COLLECTIVE:
            found["collectives' share"] += costs.instr_taken_s(block, instr)
    return found


def compute_seconds(plan: Plan, programs: Sequence[RankProgram]) -> Seconds:
    """Seconds of compute by kind of the rank that ends last."""
    simulation = simulate_plan(plan, programs)
    busiest = simulation.busiest
    program, costs = programs[busiest], plan_costs(plan)[busiest]
    calls = Counter(step.block for step in program.steps if step.kind is StepKind.CALL)
    found: Seconds = dict.fromkeys(SHOWN, 0.0)
    for name, count in calls.items():
        for kind, seconds in block_seconds(program.blocks[name], costs).items():
            found[kind] += count * seconds
    for span in simulation.traces[busiest].spans:
        if span.label in _OUTSIDE:
            found[_OUTSIDE[span.label]] += span.busy_s
    found["step"] = simulation.step_s
    return found


class Measured(NamedTuple):
    """A step of `docs/benchmarks/gpu.md`.

    Attributes:
        make: of the model and a batch.
        precision: of the plan.
        device_ms: sum over kernels that an H200 took.
        step_ms: its step, the host's waits included.
    """

    make: Make
    precision: str
    device_ms: float
    step_ms: float


def h200_steps(place: Place) -> dict[str, Measured]:
    """The steps whose kernels' sums are in `docs/benchmarks/gpu.md` ("Time")."""
    gpt2 = partial(text, "gpt2", place, 24, 1024, 16, (4, 1024))
    sizes = full_sizes(place)
    return {
        "gpt2 medium bf16": Measured(partial(gpt2, 0.0), "bf16", 24.2, 31.2),
        "gpt2 medium bf16 dropout": Measured(partial(gpt2, 0.1), "bf16", 28.1, 40.1),
        "gpt2 medium fp32": Measured(partial(gpt2, 0.0), "fp32", 203.9, 207.2),
        "llama 1.1B bf16": Measured(sizes["llama 1b"], "bf16", 31.6, 37.4),
        "vit l bf16": Measured(sizes["vit l"], "bf16", 33.7, 45.7),
    }


def _meta(made: tuple[nn.Module, dict[str, torch.Tensor]]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return made[0].train().to("meta"), made[1]


def h200_rows(pattern: str) -> Iterator[tuple[str, Seconds]]:
    """Name and seconds of every such step, with what the device took as "measured"."""
    for name, each in h200_steps(Place("cpu", small=False)).items():
        if re.search(pattern, name):
            model, batch = _meta(each.make())
            plan = pp.compile(
                model, "1xH200", example_inputs=batch, precision=each.precision, mesh=(1,), microbatches=1
            )
            found = compute_seconds(plan.data, plan.programs)
            yield name, found | {"measured": each.device_ms / 1e3, "idle known": _with_idle_s(plan.data, found, each)}


def _with_idle_s(plan: Plan, found: Seconds, measured: Measured) -> float:
    """Seconds of compute at the clock of a board that is idle as long as was measured."""
    device = plan.cluster.groups[0].device
    work = step_work(device, plan.program, plan.optimizer)
    idle_s = (measured.step_ms - measured.device_ms) / 1e3
    clock = clock_share(device, work._replace(rest_s=work.rest_s + idle_s))
    limited_s = found["products"] + found["attention"] if work.products_s else 0.0
    return _compute_s(found) - limited_s * (1 - device.clock_share / clock)


def plan_rows(folder: Path, pattern: str) -> Iterator[tuple[str, Seconds]]:
    """Name and seconds of every plan of a folder."""
    for path in sorted(folder.glob("*.json")):
        if re.search(pattern, path.stem):
            yield path.stem, compute_seconds(*read_with_programs(path))


def _compute_s(found: Seconds) -> float:
    return sum(found.get(kind, 0.0) for kind in SHOWN)


def show(rows: Sequence[tuple[str, Seconds]]) -> None:
    """Shares of the predicted compute in percent, and its seconds."""
    others = ("measured", "idle known") if any("measured" in found for _, found in rows) else ("step",)
    table = Table("step", *SHOWN, "compute ms", *(f"{other} ms" for other in others))
    for name, found in rows:
        shares = [f"{100 * found.get(kind, 0.0) / _compute_s(found):.1f}" for kind in SHOWN]
        times = [f"{1e3 * seconds:.1f}" for seconds in (_compute_s(found), *(found[other] for other in others))]
        table.add_row(name, *shares, *times)
    Console(width=220).print(table)


def run(argv: Sequence[str] | None = None) -> int:
    """Predict, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compute_shares")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--plans", type=Path, metavar="FOLDER")
    what.add_argument("--h200", action="store_true")
    parser.add_argument("--only", default="", metavar="PATTERN")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    found = h200_rows(options.only) if options.h200 else plan_rows(options.plans, options.only)
    rows = list(found)
    if options.json is not None:
        options.json.write_text(json.dumps([{"name": name, **seconds} for name, seconds in rows], indent=1) + "\n")
    show(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(run())
