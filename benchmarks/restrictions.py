"""The free joint search held against itself under restrictions that it may choose anyway.

Degrees that a person would pin (data parallelism alone at every ZeRO level, tensor parallelism inside nodes, two to
eight stages) leave sharding, recomputation, microbatches and schedules open, so that a restricted search looks longer
at what it may still choose. Nothing pinned must find what is as fast. Every search is a process of its own.

`more` is how much longer the restricted plan takes than the free one: a row that is below zero by more than solvers
leave open (`MARGIN`) has it under `failures`.

    python -m benchmarks.restrictions [--only 70B] [--json FILE [--resume]]
        LIMIT=60 seconds (environment)
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial

import msgspec

from benchmarks.grid_jobs import BINDING_JOBS, JOBS, TIGHT_JOBS
from benchmarks.table import Row, in_fresh_process, main
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.errors import ConstraintError, NoPlanError
from paraplan.ir.plan_words import plan_words
from paraplan.planner.constraints import Constraints
from paraplan.planner.fits import search_room

LIMIT = float(os.environ.get("LIMIT", "60"))
MARGIN = 2e-3
ALL_JOBS = {**JOBS, **BINDING_JOBS, **TIGHT_JOBS}
RESTRICTIONS = ("free", "zero 1", "zero 2", "zero 3", "inner 8", "pp 2", "pp 4")
FEW, OF_FEW = 16, ("free", "zero 1", "zero 3", "inner 4", "inner 8", "pp 2", "pp 4", "pp 8")
"""Devices up to which others are tried, and which."""
COLUMNS = ("case", "step_s", "more", "what", "gap", "s")


def constraints(restriction: str, devices: int) -> Constraints | None:
    """What a restriction pins on so many devices; None where they are too few."""
    what, _, number = restriction.partition(" ")
    count = int(number or 1)
    if what == "zero":
        return Constraints(dp=devices, zero=count, pp=1)
    if count > devices:
        return None
    if what == "inner":
        return Constraints(mesh=(devices // count, count), pp=1) if devices > count else Constraints(tp=count, pp=1)
    return Constraints(pp=count) if what == "pp" else Constraints()


def measure(name: str, restriction: str) -> Row:
    """A search, here."""
    job, of = ALL_JOBS[name].job(), ALL_JOBS[name]
    pins = constraints(restriction, job.cluster.num_devices)
    if pins is None:
        return {"what": "too few devices"}
    started = time.perf_counter()
    try:
        pins = msgspec.structs.replace(pins, memory_bytes=of.memory_bytes)
        plan = search_room(job, pins, LIMIT, certify=restriction == "free").plan
    except (NoPlanError, ConstraintError) as fault:
        return {"what": f"no plan: {fault}"[:120], "s": time.perf_counter() - started}
    assert plan.prediction is not None
    gap = plan.certificate.gap if restriction == "free" and plan.certificate else None
    step_s, s = plan.prediction.step_s, time.perf_counter() - started
    return {"step_s": step_s, "what": plan_words(plan), "gap": gap, "s": s}


def held(name: str) -> list[Row]:
    """The free search of a job, then each restriction beside it."""
    rows: list[Row] = []
    few = parse_cluster(ALL_JOBS[name].cluster).num_devices <= FEW
    for restriction in OF_FEW if few else RESTRICTIONS:
        row = {"case": f"{name}: {restriction}", **in_fresh_process("restrictions", name, restriction)}
        free_s, step_s = rows[0].get("step_s") if rows else None, row.get("step_s")
        if free_s is not None and step_s is not None:
            row["more"] = step_s / free_s - 1
            if row["more"] < -MARGIN:
                row["failures"] = [f"{restriction} takes {step_s:.4g} s a step, nothing pinned {free_s:.4g} s"]
        rows.append(row)
        print(f"  {row['case']}: {row.get('step_s')} {row.get('more')} {row['what']}", file=sys.stderr, flush=True)
    return rows


def summary(rows: Sequence[Row]) -> Row:
    """How many restricted plans there are, and which are faster than the free one."""
    more = {str(row["case"]): row["more"] for row in rows if row.get("more") is not None}
    lost = [f"{case} ({over:+.1%})" for case, over in more.items() if over < -MARGIN]
    return {"what": f"{len(more)} plans; faster than the free one: {', '.join(lost) or 'none'}"}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        print(json.dumps(measure(sys.argv[2], sys.argv[3])))
        raise SystemExit(0)
    raise SystemExit(main("restrictions", {name: partial(held, name) for name in ALL_JOBS}, COLUMNS, summary=summary))
