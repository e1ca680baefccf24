"""Plans drawn for a model: pins a user may give, the planner's choice, random legal plans, pipelines."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import msgspec

from paraplan.ir.execution.schedule import Schedule
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.options.values import PRESETS
from paraplan.planner.pipeline.pipeline import pipelined
from paraplan.planner.sampling import random_plan
from paraplan.planner.schedules.complete import complete
from paraplan.planner.schedules.named import NAMED, named_orders
from paraplan.planner.schedules.schedule_problem import holders_of
from paraplan.planner.search import search
from paraplan.rules.time_axis import program_micro

SOLVE_S = 2.0
STATES = ("host", "all", "disk", "fetched", "all-fetched", "disk-fetched", "disk-grads")
"""Of `Constraints.offload_states`."""

Make = Callable[[], Plan]


def job_of(program: Program, ranks: int) -> Job:
    """What plans are made for, on local processes."""
    return Job(program, ClusterSpec.local(ranks), OPTIMIZERS["momentum"], ModelRef(display=program.name), {})


def plans(program: Program, seed: int, count: int) -> Iterator[tuple[str, Make]]:
    """Names of plans and what makes them: one of each family in turn, so that six have two pipelines."""
    rng = random.Random(f"plans {seed}")
    families = [_pinned, _pipeline, _random, _pinned, _random_pipeline, _memory]
    for index in range(count):
        yield families[index % len(families)](program, random.Random(rng.randrange(1 << 30)))


def _searched(program: Program, ranks: int, **pins: object) -> tuple[str, Make]:
    """The planner's choice under pins."""
    text = " ".join(f"{name}={value}" for name, value in pins.items())

    def make() -> Plan:
        return search(job_of(program, ranks), Constraints(**pins), SOLVE_S, certify=False).plan  # type: ignore[arg-type]

    return f"{ranks} ranks {text}".strip(), make


def _pinned(program: Program, rng: random.Random) -> tuple[str, Make]:
    ranks = rng.choice((2, 2, 4))
    most = program.batch_size // ranks  # samples a data-parallel rank has
    micro = {"microbatches": rng.choice([m for m in (1, 2, 4) if m <= most])} if rng.random() < 0.3 else {}
    family = rng.choice(("one", "dp", "dp", "zero", "zero", "tp", "tp", "sp", "mixed", "own"))
    if family == "one":
        return _searched(program, 1, **micro)
    if family == "dp":
        return _searched(program, ranks, dp=ranks, zero=0, **micro)
    if family == "zero":
        return _searched(program, ranks, dp=ranks, zero=rng.choice((1, 2, 3)), **micro)
    if family in ("tp", "sp"):
        return _searched(program, 2, tp=2, sp=family == "sp", **micro)
    if family == "mixed":
        return _searched(program, 4, dp=2, tp=2, zero=rng.choice((0, 1, 3)), **micro)
    return _searched(program, ranks, **micro)


def _pipeline(program: Program, rng: random.Random) -> tuple[str, Make]:
    schedule = rng.choice(list(NAMED))
    micro = rng.choice((1, 2, 4)) if schedule in ("gpipe", "1f1b") else rng.choice((2, 4))
    inner = rng.choice(({}, {}, {"dp": 2, "zero": rng.choice((0, 1, 3))}, {"tp": 2}))
    if "dp" in inner:
        micro = min(micro, program.batch_size // 2)
    if len(program.segments) < 2 * NAMED[schedule].stages:
        schedule = "1f1b"
    ranks = 2 * (2 if inner else 1)
    return _searched(program, ranks, pp=2, schedule=schedule, microbatches=micro, **inner)


def _memory(program: Program, rng: random.Random) -> tuple[str, Make]:
    recompute = rng.choice(({"recompute": rng.choice(PRESETS[1:])}, {}))
    states = {} if recompute and rng.random() < 0.5 else {"offload_states": rng.choice(STATES), "offload": "disk"}
    ranks = rng.choice((1, 2, 2))
    zeros = (0, 3) if "all" in str(states) else (0, 1, 3)
    pins = {"dp": 2, "zero": rng.choice(zeros)} if ranks == 2 and rng.random() < 0.6 else {}
    return _searched(program, ranks, **recompute, **states, **pins)


def _random(program: Program, rng: random.Random) -> tuple[str, Make]:
    ranks, seed = rng.choice((1, 2, 2, 4)), rng.randrange(1 << 30)

    def make() -> Plan:
        plan = random_plan(job_of(program, ranks), seed, 4 if ranks < 4 else 2, states_leave=True)
        return msgspec.structs.replace(plan, delayed_update=None)  # late updates are not what eager does

    return f"random {seed} on {ranks}", make


def _random_pipeline(program: Program, rng: random.Random) -> tuple[str, Make]:
    inner, seed, schedule = rng.choice((1, 1, 2)), rng.randrange(1 << 30), rng.choice(list(NAMED))
    positions, point = rng.choice((2, 2, 3) if schedule not in ("gems", "chimera") else (2,)), rng.random()

    def make() -> Plan:
        one = random_plan(job_of(program, inner), seed, 4)
        one = msgspec.structs.replace(one, delayed_update=None)
        last, stages = len(program.segments), positions * NAMED[schedule].stages
        tail = program_micro(program, one.num_microbatches).tail  # the last stage's, after all forwards
        cuts = range(1, min(last, tail + 1))
        points = [0, *sorted(random.Random(point).sample(cuts, min(stages - 1, len(cuts)))), last]
        few = len(points) < stages + 1 or (NAMED[schedule].num_replicas > 1 and one.num_microbatches < 2)
        name = "gpipe" if tail < last else "1f1b" if few else schedule
        stages = len(points) - 1
        at = positions if name == schedule and stages == positions * NAMED[name].stages else stages
        bounds = list(itertools.pairwise(points))
        orders = named_orders(name, at, one.num_microbatches, stages // at)
        whole: Schedule = complete(name, orders, num_replicas=NAMED[name].num_replicas)
        return pipelined(one, ClusterSpec.local(at * inner), bounds, whole, holders_of(orders))

    return f"random {seed} on {inner} in {positions} {schedule}", make
