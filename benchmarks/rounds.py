"""Plans of many microbatches from their first rounds, held against all microbatches lowered and simulated.

Problem: `planner.schedules.full_rounds` prices a plan without lowering most of it. Each case draws pipelines of a
small Llama at random: positions, schedule, mesh, microbatches, memory, ZeRO, recomputation; `of one stage` draws plans
of it, any legal or searched for, whose states and parameters may be on the host or on disk. `differ` counts the numbers
of the carried simulation (times of every stream of every rank class, stalls, bubbles, peaks) that are not the whole
one's to the last bit; `reserve_mib` is the most that allocators reserve beyond what the first rounds say. `carried_s`
and `whole_s` are processor seconds from the plan on, lowering included, together; `left` plans are lowered whole in any
case.

    python -m benchmarks.rounds [--only 3] [--json FILE [--resume]]      PLANS=12 a case, or thrice (environment)
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch

from benchmarks.joint import llama
from benchmarks.table import Row, main
from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.predict import reserved_of
from paraplan.cost_models.realised_plan import realised
from paraplan.cost_models.simulator.rank_trace import RankTrace
from paraplan.ir.errors import ParaplanError
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.ir.process.memo import SESSION
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.sampling import random_plan
from paraplan.planner.schedules.full_rounds import carried
from paraplan.planner.search import search

PLANS = int(os.environ.get("PLANS", "12"))
COLUMNS = ("case", "plans", "refused", "left", "numbers", "differ", "reserve_mib", "carried_s", "whole_s")
CLUSTERS = ("1xH100:8", "4xH100:2", "1xA100-40:8")
SCHEDULES = ("1f1b", "1f1b-zb", "interleaved", "interleaved-zb", "zb-h1", "zb-v", "zb-v-lean", "hanayo")


@cache
def _program(batch: int, layers: int = 8) -> Program:
    tokens = torch.zeros(batch, 256, dtype=torch.long, device="meta")
    model = llama(layers, 512, 1024, 8, vocabulary=4096)
    return capture(model, {"input_ids": tokens, "labels": tokens}, precision="bf16")


def _drawn(draw: random.Random) -> Plan | None:
    """A pipeline planned as was drawn; None where nothing fits."""
    positions = draw.choice((2, 4))
    size, count = 8 // positions, draw.choice((16, 24, 32, 48))
    pins: dict[str, Any] = {"pp": positions, "schedule": draw.choice(SCHEDULES), "microbatches": count}
    pins |= {"zero": draw.choice((1, 2, 3)), "dp": size} if draw.random() < 0.4 else {"mesh": (size,)}
    pins |= {"memory_bytes": int(draw.uniform(0.7, 1.3) * 2**30)} if draw.random() < 0.6 else {}
    pins |= {"recompute": draw.choice(("full", "selective"))} if draw.random() < 0.3 else {}
    program, cluster = _program(count * size * draw.choice((1, 2))), parse_cluster(draw.choice(CLUSTERS))
    job = Job(program, cluster, OPTIMIZERS["adamw"], ModelRef(display="Llama"), {})
    try:
        return search(job, Constraints(**pins), 20, certify=False).plan
    except ParaplanError:
        return None


def _away(draw: random.Random) -> Plan | None:
    """A plan of one stage of which something may leave the device, any legal one or planned."""
    ranks, count, layers = draw.choice((1, 2)), draw.choice((8, 12, 16)), draw.randint(2, 12)
    cluster = parse_cluster(f"{ranks}xA100-40")
    job = Job(_program(count * ranks, layers), cluster, OPTIMIZERS["adamw"], ModelRef(display="Llama"), {})
    pins: dict[str, Any] = {"pp": 1, "microbatches": count, "offload": "host"}
    pins |= {name: "host" for name in ("place_states", "place_params", "place_grads") if draw.random() < 0.7}
    with suppress(ParaplanError):
        if draw.random() < 0.5:
            return search(job, Constraints(**pins), 20, certify=False).plan
        return random_plan(job, draw.randrange(1 << 30), max_microbatches=count, states_leave=True)
    return None


def _numbers(trace: RankTrace) -> dict[object, float]:
    plain = ("step_s", "compute_s", "exposed_comm_s", "exposed_copy_s", "bubble_s", "exposed_update_s", "peak_bytes")
    found: dict[object, float] = {name: getattr(trace, name) for name in plain}
    for name in ("comm_s", "copy_s", "update_s", "stalled_s", "tier_peak_bytes"):
        found |= {(name, stream): number for stream, number in getattr(trace, name).items()}
    return found


def held_against(seed: int, drawn: Callable[[random.Random], Plan | None], count: int) -> Row:
    """So many plans drawn from a seed."""
    draw, row = random.Random(seed), Row.fromkeys(COLUMNS[1:], 0)
    for _ in range(count):
        plan = drawn(draw)
        if plan is None:
            row["refused"] += 1
            continue
        row["plans"] += 1
        SESSION.release()
        started = time.process_time()
        found = carried(plan)
        if found is None:
            row["left"] += 1
            continue
        row["carried_s"] += time.process_time() - started
        SESSION.release()
        started = time.process_time()
        whole = realised(plan)
        row["whole_s"] += time.process_time() - started
        for mine, other in zip(found.simulation.traces, whole.simulation.traces, strict=True):
            these, those = _numbers(mine), _numbers(other)
            row["numbers"] += len(those)
            row["differ"] += sum(these.get(name) != number for name, number in those.items())
        first, all_of_them = (reserved_of(plan, each) for each in (found.sample.programs, whole.programs))
        more = max(b - a for a, b in zip(first, all_of_them, strict=True))
        row["reserve_mib"] = max(row["reserve_mib"], more / 2**20)
    return row | {"failures": [f"{row['differ']} numbers differ"] if row["differ"] else []}


CASES = {f"seed {seed}": partial(held_against, seed, _drawn, PLANS) for seed in range(1, 9)}
CASES |= {f"of one stage, seed {seed}": partial(held_against, seed, _away, 3 * PLANS) for seed in range(1, 5)}

if __name__ == "__main__":
    raise SystemExit(main("rounds", CASES, COLUMNS))
