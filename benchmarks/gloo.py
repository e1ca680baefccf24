"""`benchmarks.fuzz` over Gloo: every small model on 2, 4 and 8 processes, a tenth of the plans.

The planner's own choice and two random legal plans on each number of processes (six a model, with `PLANS=6`), five
steps of SGD with momentum each, one job for all of a case. Every step is held against one device as `paraplan run
--check` does it, and, where there is no dropout, against the user's eager model; entries of every rank, and its peak,
against the prediction. `pipeline` cases are models of `benchmarks.pipelines` under every schedule in turn, with
and without tensor parallelism, one plan each.

    python -m benchmarks.gloo [--only "t5 4"] [--json FILE [--resume]]      PLANS=6 plans a model (environment)
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.fuzz import MICROBATCHES, captured, plans, subject
from benchmarks.pipelines import MODELS, SCHEDULES, small
from benchmarks.table import Row, main
from benchmarks.zoo import NAMES
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.ir.struct import to_json
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search
from paraplan.runtime.transport.launch import spawn_local

PLANS = int(os.environ.get("PLANS", "6"))
COLUMNS = (
    *("case", "plans", "worst_loss", "worst_grad", "worst_param", "eager", "entries_equal", "peak_ratio_min"),
    *("peak_ratio_max", "failures"),
)


SHAPES = ((2, 2, 1), (4, 2, 2), (4, 4, 1), (8, 4, 2))
"""Processes, positions of the pipeline and degree of tensor parallelism."""


def fuzzed(name: str, ranks: int) -> Row:
    """A model's own choice and random plans."""
    found = enumerate(plans(subject(name), ranks, PLANS))
    return trained(
        name, ranks, {f"{index} {which}, dropout {dropout}": make() for index, (which, make, dropout, _) in found}
    )


def piped(name: str, ranks: int, positions: int, tp: int, schedule: str) -> Row:
    """A model in a pipeline."""
    model = small(name)
    job = Job(captured(model), ClusterSpec.local(ranks), OPTIMIZERS["momentum"], ModelRef(display=name), {})
    pins = Constraints(pp=positions, tp=tp if tp > 1 else None, schedule=schedule, microbatches=4)
    return trained(f"pipeline {name}", ranks, {f"{schedule}, dropout 0.0": search(job, pins).plan})


def trained(name: str, ranks: int, made: dict[str, Plan]) -> Row:
    """Plans by what they are called, one after another on processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        for what, plan in made.items():
            (Path(folder) / f"{what}.plan").write_bytes(to_json(plan))
        found = Path(folder) / "row.json"
        code = spawn_local(ranks, "benchmarks.gloo_rank", (name, folder, str(found)))
        if code or not found.exists():
            return {"failures": [f"a rank ended with code {code}"]}
        row: Row = json.loads(found.read_text())
        return row


def cases() -> dict[str, Callable[[], Row]]:
    """Every model on every number of processes, then pipelines."""
    found: dict[str, Callable[[], Row]] = {
        f"{name} {ranks}": partial(fuzzed, name, ranks) for name in NAMES for ranks in MICROBATCHES
    }
    schedules = itertools.cycle(SCHEDULES)
    for name, (ranks, positions, tp), schedule in zip(
        itertools.chain.from_iterable([model] * len(SHAPES) for model in MODELS), itertools.cycle(SHAPES), schedules
    ):
        found[f"pipeline {name} {ranks}, {positions} x {tp}, {schedule}"] = partial(
            piped, name, ranks, positions, tp, schedule
        )
    return found


if __name__ == "__main__":
    raise SystemExit(main("gloo", cases(), COLUMNS))
