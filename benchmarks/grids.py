"""The free joint search held against every point of the full Megatron grid, and against planners by name.

A job (`benchmarks.grid_jobs`) is planned with nothing pinned, as `paraplan.compile` does, with its bound on all
pipelines. Then the grid's points (`benchmarks.grid_points`) are ranked by estimates, and the best POINTS of
Megatron-LM's schedules and half as many of all other schedules are planned and simulated, pinned, within the same
limit each; PLANNERS are asked for their plans. Every part of a job is a process of its own.

`step_s` is simulated, `points` how many there are in the grid and how many were planned, `cpu_s` processor seconds of
all processes but imports and capture, `rss_gib` the most that one held, `plan_mb` the plan's file. The last row has, of
every job, how much longer the fastest other plan takes than ours: `lost` are those where ours is slower.

    python -m benchmarks.grids [--only 405B] [--json FILE [--resume]]
        LIMIT=60 seconds, POINTS=8, PLANNERS=zero2,fsdp,galvatron,mist (environment)
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

from benchmarks.grid_jobs import JOBS
from benchmarks.grid_points import Grid, Planned, Point
from benchmarks.table import Row, in_fresh_process, main
from paraplan.baselines.planners import plan_by
from paraplan.ir.errors import ConstraintError, NoPlanError
from paraplan.ir.plan import Plan
from paraplan.ir.plan_words import plan_words
from paraplan.ir.struct import to_json
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.fits import search_room

LIMIT = float(os.environ.get("LIMIT", "60"))
POINTS = int(os.environ.get("POINTS", "8"))
PLANNERS = tuple(filter(None, os.environ.get("PLANNERS", "zero2,fsdp,galvatron,mist").split(",")))
PARTS = ("ours", "grid", "named")
COLUMNS = ("case", "step_s", "mfu", "what", "gap", "cpu_s", "s", "rss_gib", "plan_mb", "points")


def ours(name: str, job: Job) -> Row:
    """Nothing pinned."""
    plan = search_room(job, Constraints(), LIMIT, _said).plan
    assert plan.certificate is not None
    return {**_of(plan), "gap": plan.certificate.gap, "plan_mb": len(to_json(plan)) / 1e6, "notes": list(plan.notes)}


def grid(name: str, job: Job) -> Row:
    """The fastest of the points planned."""
    points = Grid(job, JOBS[name].has_experts)
    megatron, others = points.ranked()
    _said(f"{points.num_points} points, of which {len(megatron)} and {len(others)} were simulated over stages")
    made, rows = [], []
    for point in [*megatron[:POINTS], *others[: (POINTS + 1) // 2]]:
        found = points.planned(point, LIMIT)
        rows.append(_point_row(point, found))
        _said(str(rows[-1]))
        if found is not None:
            made.append(found)
    best = min((each for each in made), key=lambda each: _step_s(each.plan), default=None)
    counted = {"points": f"{points.num_points}, {len(rows)} planned", "planned": rows}
    if best is None:
        return {"what": "nothing fits", **counted}
    return {**_of(best.plan), "what": f"{best.point.text} recompute={best.recompute}", **counted}


def _point_row(point: Point, found: Planned | None) -> Row:
    step_s = None if found is None else _step_s(found.plan)
    recompute = None if found is None else found.recompute
    return {"point": point.text, "recompute": recompute, "estimated_s": point.step_s, "step_s": step_s}


def named(name: str, job: Job) -> Row:
    """The fastest plan of other planners."""
    rows, best = [], None
    for planner in PLANNERS:
        try:
            plan = plan_by(planner, job, Constraints(), LIMIT, certify=False).plan
        except (NoPlanError, ConstraintError) as fault:
            rows.append({"planner": planner, "why": str(fault)[:200]})
            continue
        rows.append({"planner": planner, "step_s": _step_s(plan), "what": plan_words(plan)})
        _said(str(rows[-1]))
        if best is None or _step_s(plan) < _step_s(best[1]):
            best = planner, plan
    if best is None:
        return {"what": "nothing fits", "planned": rows}
    return {**_of(best[1]), "what": f"{best[0]}: {plan_words(best[1])}", "planned": rows}


def _of(plan: Plan) -> Row:
    assert plan.prediction is not None
    return {
        "step_s": plan.prediction.step_s,
        "mfu": plan.prediction.mfu,
        "what": plan_words(plan),
        "peak_gib": max(plan.prediction.peak_bytes) / 2**30,
    }


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


def _said(text: str) -> None:
    print(f"  {text[:230]}", file=sys.stderr, flush=True)


MADE: dict[str, Callable[[str, Job], Row]] = {"ours": ours, "grid": grid, "named": named}


def measure(name: str, part: str) -> Row:
    """A part of a job, here."""
    job = JOBS[name].job()
    usages = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    before, started = sum(map(_cpu_s, usages)), time.perf_counter()
    try:
        row = MADE[part](name, job)
    except NoPlanError as fault:
        row = {"what": f"no plan: {fault}"[:300], "failures": [str(fault)]}
    return {
        **row,
        "s": time.perf_counter() - started,
        "cpu_s": sum(map(_cpu_s, usages)) - before,
        "rss_gib": max(resource.getrusage(usage).ru_maxrss for usage in usages) / 2**20,
    }


def _cpu_s(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def summary(rows: Sequence[Row]) -> Row:
    """How much longer than ours the fastest other plan of every job takes."""
    steps = {row["case"]: row.get("step_s") for row in rows}
    over = {}
    for name in JOBS:
        mine, grid_s, named_s = (steps.get(f"{name}: {part}") for part in PARTS)
        others = [each for each in (grid_s, named_s) if each is not None]
        if mine is not None and others:
            over[name] = min(others) / mine - 1
    lost = [name for name, more in over.items() if more < 0]
    middle = median(over.values()) if over else 0.0
    return {"what": f"{middle:+.1%} in the median; lost: {', '.join(lost) or 'none'}", "over": over, "lost": lost}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        print(json.dumps(measure(sys.argv[2], sys.argv[3])))
        raise SystemExit(0)
    cases = {f"{name}: {part}": partial(in_fresh_process, "grids", name, part) for name in JOBS for part in PARTS}
    raise SystemExit(main("grids", cases, COLUMNS, summary=summary))
