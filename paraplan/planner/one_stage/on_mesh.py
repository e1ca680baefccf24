"""Plans of one stage on one mesh: in more and more microbatches, with what is kept, recomputed and away."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from paraplan.ir.errors import InfeasibleError, NoPlanError, SolverLimitError
from paraplan.ir.machine.mesh import Mesh
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import FLOOR, Deadline, SolveLimits
from paraplan.planner.interrupts import handing_on
from paraplan.planner.one_stage.candidate_passes import by_places
from paraplan.planner.one_stage.failures import Failure, not_tried
from paraplan.planner.options.placements import ANY, ON_DEVICE
from paraplan.planner.passes.op_by_op import solve_op_by_op
from paraplan.planner.pipeline.microbatches import MOST_ORDERED, most_first, other_counts, usual_counts
from paraplan.planner.recompute.solve_jointly import Fits, solve_with_recomputation
from paraplan.planner.sharding.solve import Candidate, Skipped, solve_mesh

MOST_LATE = 2.0
"""Times the limit, after which nothing more is tried though nothing was found."""
EACH = 0.5
"""Of the time left, for a number of microbatches that others follow."""
MOST_CALLS = 100_000
"""Segments times microbatches that are not begun after the limit: to lower and simulate them takes a minute."""

Progress = Callable[[str], None]


def plans_on_mesh(
    job: Job,
    mesh: Mesh,
    constraints: Constraints,
    limits: SolveLimits,
    failures: list[Failure],
    progress: Progress,
    cutoff_s: float,
) -> list[Candidate] | Skipped:
    """Plans for a mesh, with more and more microbatches as long as memory binds and the step gets faster, and there is
    time.

    Args:
        job, mesh, constraints: what is planned, and where.
        limits: of the solver.
        failures: why some counts have no plan: added to.
        progress: told what is being tried.
        cutoff_s: of work, above which the mesh is skipped.
    """
    found: list[Candidate] = []
    best_s, clock = float("inf"), _Clock(limits)
    counts = usual_counts(job.program, constraints, mesh)
    for count in counts:
        if found and clock.is_over:
            break
        must = counts[:1] if clock.ends_here(found) else (counts[0], counts[-1])  # the most hold least
        if clock.is_over and count not in must:
            failures.append(not_tried(mesh, count))
            continue
        with handing_on(found):
            progress(_tried_words(mesh, count))
            part = _Clock(clock.part(1.0 if count == counts[-1] else EACH))
            here = _solve(job, mesh, count, constraints, part, failures, cutoff_s)
        if isinstance(here, Skipped):
            return found or here
        found += here
        step_s = min((candidate.simulation.step_s for candidate in here), default=float("inf"))
        if here and (step_s >= best_s or not here[0].memory_binds):
            break
        if not here and failures[-1].whatever_count:
            break
        best_s = min(best_s, step_s)
    return found


def with_other_counts(
    job: Job,
    mesh: Mesh,
    constraints: Constraints,
    limits: SolveLimits,
    failures: list[Failure],
    progress: Progress,
    deadline: Deadline,
) -> list[Candidate]:
    """Plans for a mesh that has none in the usual numbers of microbatches, in others.

    Args:
        job, mesh, constraints, limits, failures, progress: as of `plans_on_mesh`.
        deadline: of the whole search.
    """
    if [each for each in failures if each.mesh == mesh][-1].whatever_count:
        return []
    clock, found = _Clock(limits), list[Candidate]()
    counts = other_counts(job.program, constraints, mesh)

    def tried(count: int) -> list[Candidate]:
        is_long = count * len(job.program.segments) > MOST_CALLS
        is_late = deadline.passed_s > MOST_LATE * deadline.limit_s
        if is_late or (clock.is_over and (clock.ends_here(found) or found or count != counts[-1] or is_long)):
            failures.append(not_tried(mesh, count))
            return []
        with handing_on(found):
            progress(_tried_words(mesh, count))
            here = _solve(job, mesh, count, constraints, clock, failures, math.inf)
        found.extend(() if isinstance(here, Skipped) else here)
        return [] if isinstance(here, Skipped) else here

    most_first(counts, usual_counts(job.program, constraints, mesh)[-1], tried)
    return found


def _tried_words(mesh: Mesh, count: int) -> str:
    named = "x".join(f"{axis}={size}" for axis, size in zip(mesh.axes, mesh.shape, strict=True))
    return f"mesh {named}, {count} microbatch{'es' if count > 1 else ''}"


class _Clock:
    """What all tries on one mesh share of the time."""

    def __init__(self, limits: SolveLimits) -> None:
        self._limits, self._started = limits, time.perf_counter()

    @property
    def is_over(self) -> bool:
        """Whether the time has passed."""
        return time.perf_counter() - self._started >= self._limits.time_s

    def ends_here(self, found: Sequence[Candidate]) -> bool:
        """Whether there is a plan and no time; what is to be proved of all plans is asked of all."""
        return self.is_over and not self._limits.certify and (bool(found) or self._limits.has_plan)

    @property
    def left(self) -> SolveLimits:
        """The limits of a try that begins now."""
        return self.part(1.0)

    def part(self, share: float) -> SolveLimits:
        """As `left`, but a part of the time."""
        left_s = self._limits.left_s(time.perf_counter() - self._started)
        return replace(self._limits, time_s=max(share * left_s, FLOOR * self._limits.time_s))


def _solve(
    job: Job,
    mesh: Mesh,
    count: int,
    constraints: Constraints,
    clock: _Clock,
    failures: list[Failure],
    cutoff_s: float,
) -> list[Candidate] | Skipped:
    """Plans for a mesh: one that keeps every activation, and where memory binds what need not: one that does
    so by kinds, and on one device one that does so op by op. Where parameters may leave the device, plans of which they
    do come beside those of which only states do, so that allowing more is never worse; gradients wait elsewhere than
    where they are used only where nothing is found without."""
    rungs = [constraints.placed(choice) for choice in constraints.placing.rungs(constraints.tiers)]
    found, fits = list[Candidate](), Fits()
    with handing_on(found):
        for rung in rungs:
            if found and (rung.place_grads == ANY or clock.ends_here(found)):
                break
            if constraints.recompute in (None, "none"):
                try:
                    solved = solve_mesh(job, mesh, count, rung, clock.left, cutoff_s)
                    if isinstance(solved, Skipped):  # recomputing would only add work
                        return found or solved
                    found.append(solved)
                    if rung is rungs[0] and not solved.memory_binds:
                        return found
                except NoPlanError as fault:
                    failures.append(Failure(fault, mesh, count))
                    if rung.place_params == ANY and isinstance(fault, SolverLimitError):
                        found += by_places(job, mesh, count, rung, clock.left)
            if not _keeps_all(constraints) and not clock.ends_here(found):
                try:
                    found_s = min((each.simulation.step_s for each in found), default=math.inf)
                    limits = clock.left
                    limits = replace(limits, found_s=min(limits.found_s, found_s))
                    found += solve_with_recomputation(job, mesh, count, rung, limits, fits)
                except NoPlanError as fault:
                    # What is kept whatever is recomputed does not get less with smaller microbatches.
                    failures.append(Failure(fault, mesh, count, isinstance(fault, InfeasibleError)))
        op_by_op = mesh.size == 1 and constraints.recompute is None and not constraints.pins_away
        op_by_op &= count <= MOST_ORDERED
        if op_by_op and not _keeps_all(constraints):
            # Its failures are of one order of ops; what the others say is about all.
            with suppress(NoPlanError):
                kept = constraints.placed(ON_DEVICE)
                found.append(solve_op_by_op(job, mesh, count, kept, clock.part(1.0 if found else 0.5)))
    return found


def _keeps_all(constraints: Constraints) -> bool:
    """Whether every activation has to stay on its device."""
    return constraints.recompute == "none" and not constraints.tiers
