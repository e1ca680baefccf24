"""Other planners' choices by name, as constraints on ours: what they pin is pinned, the rest is planned as ever.

A named planner is the sequence of constraints that its users or its heuristic would try, and which of them is its
answer: the first that fits, or the fastest. Its plans are ours in all else, so they are priced by one simulator, run,
and can be set side by side. What a system decides that these types have no place for (stages replicated unequally, a
sharding per layer) is not in its entry here.

Sources: Li et al. 2020 (DDP); Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (FSDP); Huang et al. 2019 (GPipe);
Narayanan et al. 2021, section 3.4 (Megatron-LM: tensor parallelism up to a node, then a pipeline, as little of both as
fits, the rest data parallelism); Korthikanti et al. 2022 (sequence parallelism, selective recomputation).
"""

from __future__ import annotations

import difflib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from paraplan.ir.errors import ConstraintError, NoPlanError, SolverLimitError
from paraplan.ir.plan import Plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import planning_time_s
from paraplan.planner.deadline import Deadline
from paraplan.planner.fits import search_room
from paraplan.planner.schedules.named import NAMED
from paraplan.planner.search import BestPlan, Progress
from paraplan.rules.time_axis import splittable

OURS = "paraplan"
MICROBATCHES = (1, 2, 4, 8)
"""Samples of a microbatch on a rank."""
CHUNKS = (1, 2, 3, 4, 6, 8)
"""Stages a position."""

Tries = Callable[[Job], Iterator[Constraints]]


@dataclass(frozen=True)
class NamedPlanner:
    """How a plan is chosen elsewhere.

    Attributes:
        tries: constraints, in the order in which they are tried.
        says: what it does, in one line.
        fastest: of tries that are alike in `degrees`, all are planned and the fastest taken; else the first that fits.
        degrees: the first tries alike in these that fit are the answer; () for all tries.
    """

    tries: Tries
    says: str
    fastest: bool = False
    degrees: tuple[str, ...] = ()


def _data_parallel(zero: int) -> Tries:
    """All devices data-parallel at a ZeRO level: the fewest microbatches that fit, all layers recomputed if none do."""

    def tries(job: Job) -> Iterator[Constraints]:
        n = job.cluster.num_devices
        for recompute in ("none", "full"):
            for count in _counts(job, n):
                yield Constraints(pp=1, dp=n, zero=zero, microbatches=count, recompute=recompute)

    return tries


def _counts(job: Job, ranks: int) -> list[int]:
    """Powers of two that a rank's samples divide into; 1 where they do not divide, to be told so."""
    rows, left = divmod(job.program.batch_size, ranks)
    counts = [2**power for power in range(rows.bit_length()) if rows and rows % 2**power == 0]
    return [1] if left else [count for count in counts if splittable(job.program, count)] or [1]


def _gpipe(job: Job) -> Iterator[Constraints]:
    """As many stages as devices or layers allow, four microbatches each and more, every layer recomputed."""
    n, segments = job.cluster.num_devices, len(job.program.segments)
    for pp in (d for d in range(min(n, segments), 1, -1) if n % d == 0):
        counts = _counts(job, n // pp)
        for count in [each for each in counts if each >= 4 * pp] or counts[-1:]:
            yield Constraints(pp=pp, dp=n // pp, zero=0, microbatches=count, recompute="full", schedule="gpipe")


def _megatron(job: Job) -> Iterator[Constraints]:
    """Tensor parallelism up to a node, then stages, least first; of each all microbatches, chunks and recomputation."""
    n, per_node = job.cluster.num_devices, min(group.devices_per_node for group in job.cluster.groups)
    tensor = [d for d in range(1, min(n, per_node) + 1) if per_node % d == 0 and n % d == 0]
    degrees = [(t, 1) for t in tensor] + [(tensor[-1], p) for p in range(2, n // tensor[-1] + 1)]
    for tp, pp in degrees:
        if n % (tp * pp) == 0:
            yield from _with_degrees(job, tp, pp)


def _megatron_grid(job: Job) -> Iterator[Constraints]:
    """Every degree of tensor parallelism inside a node and of a pipeline, with all else; most likely degrees first."""
    n, per_node = job.cluster.num_devices, min(group.devices_per_node for group in job.cluster.groups)
    every = [
        (tp * pp, tp, pp)
        for tp in range(1, min(n, per_node) + 1)
        for pp in range(1, n // tp + 1)
        if per_node % tp == 0 and n % (tp * pp) == 0
    ]
    for _, tp, pp in sorted(every):
        yield from _with_degrees(job, tp, pp)


def _with_degrees(job: Job, tp: int, pp: int) -> Iterator[Constraints]:
    """Degrees with every microbatch, number of stages a position and way to recompute; the optimizer sharded."""
    n, segments = job.cluster.num_devices, len(job.program.segments)
    dp = n // (tp * pp)
    rows, left = divmod(job.program.batch_size, dp)
    pins = Constraints(pp=pp, dp=dp, tp=tp, sp=tp > 1, zero=1 if dp > 1 else 0)
    for recompute in ("none", "selective", "full"):
        for samples in MICROBATCHES:
            count, rest = divmod(rows, samples)
            if left or rest or not count or not splittable(job.program, count):
                continue
            made = msgspec.structs.replace(pins, microbatches=count, recompute=recompute)
            if pp == 1:
                yield made
                continue
            for each in CHUNKS:
                if pp * each > segments or (each > 1 and count % pp):
                    continue
                name = "1f1b" if each == 1 else "interleaved"
                stages = _even(segments, pp * each) if each > NAMED[name].stages else None
                yield msgspec.structs.replace(made, schedule=name, stages=stages)


def _even(segments: int, count: int) -> tuple[tuple[int, int], ...]:
    """Stages of as many segments each as can be."""
    ends = [segments * at // count for at in range(count + 1)]
    return tuple(itertools.pairwise(ends))


PLANNERS: dict[str, NamedPlanner] = {
    "ddp": NamedPlanner(_data_parallel(0), "data parallel, everything replicated"),
    "zero1": NamedPlanner(_data_parallel(1), "data parallel, optimizer states sharded"),
    "zero2": NamedPlanner(_data_parallel(2), "data parallel, states and gradients sharded"),
    "fsdp": NamedPlanner(_data_parallel(3), "data parallel, parameters sharded too"),
    "gpipe": NamedPlanner(_gpipe, "a pipeline over all devices, every layer recomputed"),
    "megatron": NamedPlanner(
        _megatron, "tensor parallel up to a node, then stages, least first", fastest=True, degrees=("tp", "pp")
    ),
    "megatron-grid": NamedPlanner(_megatron_grid, "the fastest of every point of Megatron's grid", fastest=True),
}
"""By name; `paraplan` is the search itself."""
NAMES = (OURS, *PLANNERS)


def check_planner(name: str) -> None:
    """Refuse a name that no planner has.

    Raises:
        ConstraintError: so it is; says which are alike.
    """
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 2) or NAMES
        raise ConstraintError(f"strategy {name!r} is unknown; there are {', '.join(near)}")


def plan_by(
    name: str,
    job: Job,
    constraints: Constraints,
    time_limit_s: float,
    progress: Progress = lambda text: None,
    certify: bool = True,
) -> BestPlan:
    """What a named planner chooses.

    Args:
        name: of `NAMES`.
        job: what is planned.
        constraints: what the user pins; a planner's tries that pin something else are left out.
        time_limit_s: for all tries.
        progress: told what is being tried.
        certify: whether our own search bounds the step of every plan in scope; the others prove nothing.
    Raises:
        ConstraintError: there is no such planner, or what is pinned leaves none of its tries.
        InfeasibleError, SolverLimitError: none of them fits; says what the last came to.
    """
    check_planner(name)
    time_limit_s = planning_time_s(time_limit_s)
    if name == OURS:
        return search_room(job, constraints, time_limit_s, progress, certify)
    planner, deadline = PLANNERS[name], Deadline(time_limit_s)
    tries = [made for pins in planner.tries(job) if (made := _merged(pins, constraints)) is not None]
    if not tries:
        raise ConstraintError(f"strategy {name!r} has no plan with what is pinned; pin less, or choose {OURS!r}")
    found: list[BestPlan] = []
    faults: list[NoPlanError | ConstraintError] = []
    done, began = 0, time.perf_counter()
    for number, pins in enumerate(tries):
        if found and (_differ(planner, tries[number - 1], pins) or deadline.is_over):
            break
        progress(f"{name}: {_words(pins)}")
        done += 1
        try:
            found.append(search_room(job, pins, deadline.share_s(), progress, certify=False))
        except (NoPlanError, ConstraintError) as fault:
            faults.append(fault)
            continue
        if not planner.fastest:
            break
    if not found:
        raise _nothing(name, faults, done)
    best = min(found, key=lambda each: _step_s(each.plan))
    note = f"chosen as {name} does ({planner.says}): {done} of {len(tries)} tries planned"
    plan = msgspec.structs.replace(best.plan, notes=(*best.plan.notes, note))
    return replace(best, plan=plan, total_s=time.perf_counter() - began)


def _nothing(name: str, faults: Sequence[NoPlanError | ConstraintError], done: int) -> NoPlanError | ConstraintError:
    said = [each for each in faults if isinstance(each, NoPlanError)]
    if not said:
        return faults[-1]
    last = said[-1]
    return SolverLimitError(f"strategy {name!r}: none of {done} tries fits; the last: {last}")


def _differ(planner: NamedPlanner, before: Constraints, after: Constraints) -> bool:
    return any(getattr(before, name) != getattr(after, name) for name in planner.degrees)


def _merged(pins: Constraints, given: Constraints) -> Constraints | None:
    """A planner's constraints with the user's; None where both pin something, and differ."""
    plain, made = Constraints(), {}
    for field in pins.__struct_fields__:
        mine, theirs, default = getattr(pins, field), getattr(given, field), getattr(plain, field)
        if mine != default and theirs not in (default, mine):
            return None
        made[field] = theirs if mine == default else mine
    return Constraints(**made)


def _words(pins: Constraints) -> str:
    named = ("pp", "dp", "tp", "zero", "microbatches", "schedule", "recompute")
    return " ".join(f"{name}={getattr(pins, name)}" for name in named if getattr(pins, name) is not None)


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


@dataclass(frozen=True)
class ComparedPlan:
    """What one planner chose.

    Attributes:
        strategy: its name.
        plan: None where it found nothing.
        why: then, why.
        solve_s: seconds it took.
    """

    strategy: str
    plan: Plan | None
    why: str
    solve_s: float


def compare_planners(
    job: Job, constraints: Constraints, names: Sequence[str], time_limit_s: float, progress: Progress
) -> list[ComparedPlan]:
    """What named planners choose, side by side.

    Args:
        job, constraints: what is planned, and what is pinned for all.
        names: of `NAMES`.
        time_limit_s: for each.
        progress: told what is being tried.
    """
    found = []
    for name in names:
        began, plan, why = time.perf_counter(), None, ""
        try:
            plan = plan_by(name, job, constraints, time_limit_s, progress).plan
        except (NoPlanError, ConstraintError) as fault:
            why = str(fault)
        found.append(ComparedPlan(name, plan, why, time.perf_counter() - began))
    return found
