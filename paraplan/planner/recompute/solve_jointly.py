"""Layouts and recomputation together: shard more or recompute more, whichever costs least.

Layouts are chosen as if activations took no memory, for any of them may be recomputed; then the segments recompute as
little as makes the plan fit (`stage.fit`). Where recomputing everything inside segments is not enough, layouts get that
much less memory, and no more than some of what they kept, and are chosen again. Layouts that keep less leave more room
for activations, so as long as something is made again, ever leaner ones are chosen and fitted too, until two of them in
a row are no faster. The search puts the outcome beside the best plan that keeps every activation, so a plan is never
worse for having been offered recomputation.

What is proved: activations left out, the sharding problem is a relaxation of the joint one, so its bound on the step
holds for every plan that keeps or recomputes. The layouts chosen for free activations need not be the best for those
kept in part: that is a heuristic, whose distance from the bound the certificate's gap includes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from paraplan.ir.errors import InfeasibleError, SolverLimitError
from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.machine.tiers import NEAREST, TIERS
from paraplan.ir.sizes import say_size
from paraplan.planner.assemble import Decisions, Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import SolveLimits, Until
from paraplan.planner.decision_classes import largest_param
from paraplan.planner.evaluate_plan import realise
from paraplan.planner.recompute.presets import preset_activations
from paraplan.planner.recompute.split import fit_split, what_splitting_gives, work_s
from paraplan.planner.recompute.stage_recompute import Fitted, Unfit, fit
from paraplan.planner.sharding.formulate import formulate, memory_rows, tier_rows, with_rows
from paraplan.planner.sharding.instants import peak_instant
from paraplan.planner.sharding.network.cost_network import Network, Row
from paraplan.planner.sharding.network.optimise import Optimum, optimise
from paraplan.planner.sharding.proof.exposed import proof_network
from paraplan.planner.sharding.proof.step_bound import step_bound
from paraplan.planner.sharding.solve import (
    Candidate,
    check_objective,
    decisions_of,
    least_memory,
    problem_of,
    without_room,
)
from paraplan.planner.sharding.space import Space
from paraplan.planner.solvers.milp import Status

ROUNDS = 6
"""Layouts tried with less and less memory."""
LEANER, IN_VAIN = 0.7, 2
"""Of what layouts keep, what the next leaner ones may; how many in a row may be no faster, or hold too much though they
kept nothing, until no others are tried."""


Fits = dict[Hashable, Fitted | Unfit]
"""What layouts have to recompute, by what they are."""


def solve_with_recomputation(
    job: Job,
    mesh: Mesh,
    num_microbatches: int,
    constraints: Constraints,
    limits: SolveLimits,
    fits: Fits | None = None,
) -> list[Candidate]:
    """Plans found on a mesh that may recompute activations: the best, and slower ones in leaner layouts.

    Args:
        job, mesh, num_microbatches, constraints, limits: as of `solve_mesh`.
        fits: known of the same mesh, microbatches and memory, from other places of parameters and states: added to.
    Raises:
        InfeasibleError: proved: parameters, gradients and states alone do not fit.
        SolverLimitError: nothing was found.
    """
    began = time.perf_counter()
    space = problem_of(job, mesh, num_microbatches, constraints)
    formulation = formulate(space)
    network = formulation.network
    base = memory_rows(space, limits.memory_bytes, activations=False)
    layouts = _Layouts(
        job, mesh, num_microbatches, constraints, limits, space, network, began, {} if fits is None else fits
    )
    found, fitted, solve_s = layouts.first(base)
    made = sorted(layouts.leaner(base, found, fitted), key=lambda each: each[1].simulation.step_s)
    found, choices = made[0][0], made[0][0].choices
    assert choices is not None
    started = time.perf_counter()
    bound_s = 0.0
    if limits.certify:
        left_s = limits.left_s(started - began)
        bounded = with_rows(proof_network(job, space, formulation, constraints), base)
        bound_s = step_bound(bounded, bounded.work(choices), found.multipliers[: len(base)], left_s)
    solve_s += time.perf_counter() - started

    def candidate(found: Optimum, fitted: Fitted, solve_s: float) -> Candidate:
        assert found.choices is not None
        work_s = float(network.work(found.choices).sum()) + fitted.extra_s
        return Candidate(fitted.plan, fitted.simulation, work_s, bound_s, "feasible", solve_s, True)

    return [candidate(*made[0], solve_s), *(candidate(*each, 0.0) for each in made[1:])]


@dataclass(frozen=True)
class _Layouts:
    """Layouts of a mesh, chosen as if activations took no memory, and what they have to recompute.

    Attributes:
        job, mesh, num_microbatches, constraints, limits: as of `solve_with_recomputation`.
        space, network: the problem.
        began: when (`time.perf_counter`).
        fits: those known.
    """

    job: Job
    mesh: Mesh
    num_microbatches: int
    constraints: Constraints
    limits: SolveLimits
    space: Space
    network: Network
    began: float
    fits: Fits

    def first(self, base: tuple[Row, ...]) -> tuple[Optimum, Fitted, float]:
        """Those of least work that fit with something recomputed, and the seconds it took to solve for them.

        Raises:
            InfeasibleError, SolverLimitError: as of `solve_with_recomputation`.
        """
        rows, solve_s, in_vain, until = base, 0.0, 0, self.limits.until(self.began)
        closest: tuple[Decisions, Unfit] | None = None
        on_mesh = f"{say_size(self.limits.memory_bytes)} per device on mesh {self.mesh.shape}"
        given = self.job, self.mesh, self.constraints, self.limits
        for attempt in range(ROUNDS):
            if in_vain == IN_VAIN or (attempt and until.is_over(False)):
                break
            found = self.chosen(rows)
            solve_s += found.solve_s
            if found.choices is None and found.status is Status.INFEASIBLE and attempt == 0:
                said = partial(_too_small, self.job, self.space, self.mesh, self.limits)
                raise InfeasibleError(f"no sharding fits {on_mesh}", said)
            if found.choices is None:
                break
            decisions = self.decisions(found)
            fitted = self.fitted(decisions)
            if isinstance(fitted, Fitted):
                return found, fitted, solve_s
            if fitted.is_slow:
                raise SolverLimitError(f"no plan on mesh {self.mesh.shape} is faster than those found")
            if closest is None or fitted.peak_bytes < closest[1].peak_bytes:
                closest = decisions, fitted
            over, kept = fitted.peak_bytes / self.limits.memory_bytes - 1, self.kept(base, found)
            in_vain += over > kept
            rows = tuple(replace(row, limit=max(min(row.limit - over, LEANER * kept), 1e-9)) for row in rows)
        raise SolverLimitError(f"no plan under {on_mesh} was found", partial(_not_found, *given, closest))

    def chosen(self, rows: Sequence[Row]) -> Optimum:
        """Of least work under some rows of memory."""
        problem = with_rows(self.network, (*rows, *tier_rows(self.space)))
        left_s = self.limits.left_s(time.perf_counter() - self.began)
        return optimise(problem, left_s, self.limits.relative_gap, self.limits.backend)

    def decisions(self, found: Optimum) -> Decisions:
        """What was chosen."""
        assert found.choices is not None
        choices = found.choices[: len(self.space.deciders)]
        check_objective(self.space, choices, found)
        fixed = bool(self.constraints.params)
        return decisions_of(self.job, self.space, self.mesh, self.num_microbatches, choices, fixed)

    def fitted(self, decisions: Decisions, below_s: float = math.inf) -> Fitted | Unfit:
        """With as little recomputed as fits, where that may be faster than so many seconds."""
        if decisions.key not in self.fits:
            until, room = self.limits.until(self.began), self.limits.memory_bytes
            until = replace(until, below_s=min(until.below_s, below_s))
            self.fits[decisions.key] = _recomputing(self.job, decisions, self.constraints, room, until)
        return self.fits[decisions.key]

    def kept(self, base: Sequence[Row], found: Optimum) -> float:
        """What layouts keep, of what a device may hold."""
        assert found.choices is not None
        return float(with_rows(self.network, tuple(base)).activity(found.choices).max())

    def leaner(self, base: Sequence[Row], found: Optimum, fitted: Fitted) -> list[tuple[Optimum, Fitted]]:
        """What was found, and layouts that keep less and less, until they are no faster."""
        made, best, in_vain, last = [(found, fitted)], fitted, 0, found
        if self.constraints.recompute is not None and not self.constraints.tiers:  # the same, whatever room there is
            return made
        while in_vain < IN_VAIN and best.extra_s > 0 and not self.limits.until(self.began).is_over(True):
            kept = LEANER * self.kept(base, last)
            last = self.chosen([replace(row, limit=min(row.limit, kept)) for row in base])
            if last.choices is None:
                break
            below_s = math.inf if self.limits.certify else best.simulation.step_s  # what is proved is of all
            other = self.fitted(self.decisions(last), below_s)
            in_vain += 1
            if isinstance(other, Fitted):
                made.append((last, other))
                if other.simulation.step_s < best.simulation.step_s:
                    best, in_vain = other, 0
        return made


def _recomputing(
    job: Job, decisions: Decisions, constraints: Constraints, limit_bytes: float, until: Until
) -> Fitted | Unfit:
    """As little recomputed, copied away and run in chunks as fits, or what is pinned; else what comes closest."""
    pinned = constraints.recompute
    if pinned is None:
        return fit_split(job, decisions, limit_bytes, constraints.tiers, until)
    if constraints.tiers:
        return fit(job, decisions, limit_bytes, pinned, constraints.tiers, until)
    made = realise(job, replace(decisions, activations=preset_activations(job.program, pinned)), limit_bytes)
    if made.peak_bytes > limit_bytes:
        return Unfit(made.plan, float(made.peak_bytes), peak_instant(made))
    kept = realise(
        job, replace(decisions, options=decisions.options.but(bundle_bytes=made.plan.bundle_bytes))
    ).simulation
    return Fitted(made.plan, made.simulation, work_s(made.simulation) - work_s(kept), peak_instant(made))


def _too_small(job: Job, space: Space, mesh: Mesh, limits: SolveLimits) -> str:
    need = least_memory(space, limits, activations=False)
    if need <= limits.memory_bytes:
        return without_room(space, limits, need)
    leave = "" if len(space.prices.places) > 1 else "let states and parameters leave the device (offload='host'), "
    return (
        f"no sharding fits {say_size(limits.memory_bytes)} per device on mesh {mesh.shape}: parameters, gradients and "
        f"optimizer states alone take at least {say_size(need)}, {say_size(need - limits.memory_bytes)} are missing "
        f"whatever is recomputed; {largest_param(job.program)}; {leave}use more devices, or devices with more memory"
    )


def _not_found(
    job: Job, mesh: Mesh, constraints: Constraints, limits: SolveLimits, closest: tuple[Decisions, Unfit] | None
) -> str:
    seen = "" if closest is None else _closest_words(job, *closest)
    rooms = [
        f"{say_size(job.cluster.room_bytes(tier, mesh.devices))} per device on {tier}" for tier in constraints.tiers
    ]
    ways = {None: ["recomputed"], "none": []}.get(
        constraints.recompute, [f"recomputed as pinned ({constraints.recompute})"]
    )
    ways += [f"offloaded (room: {', '.join(rooms)})"] if rooms else []
    more = "" if rooms else f"allow offload ({_host_words(job, mesh)}), "
    how = " or ".join(ways) or "kept"
    return (
        f"no plan under {say_size(limits.memory_bytes)} per device was found on mesh {mesh.shape} even with every "
        f"activation inside segments {how}{seen}; {more}use smaller microbatches or more devices"
    )


def _closest_words(job: Job, decisions: Decisions, found: Unfit) -> str:
    """Where the closest plan peaks, and what chunks would give."""
    text = f"; the closest peaks at {say_size(found.peak_bytes)}"
    if found.peak is not None:
        kind = job.program.kinds[job.program.segments[found.peak.segment].kind]
        op = kind.graph.ops[found.peak.position]
        text += f", in {op.target} of segment {found.peak.segment} ({kind.graph.source_of(op)})"
    gives = what_splitting_gives(job, decisions, found)
    if gives is not None:
        text += f"; in {gives[0]} chunks it would be {say_size(gives[1])}, which plans with recompute unpinned try"
    return text


def _host_words(job: Job, mesh: Mesh) -> str:
    room = job.cluster.room_bytes(NEAREST, mesh.devices)
    return f"{TIERS[NEAREST].noun} has room for {say_size(room)} per device"
