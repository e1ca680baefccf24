"""Solving the sharding problem of one mesh: choices, their plan, its price, and what was proved."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from paraplan.cost_models.costs import Costs
from paraplan.cost_models.realised_plan import Realised
from paraplan.cost_models.simulator.rank_trace import Simulation
from paraplan.ir.errors import InfeasibleError, NoPlanError, SolverLimitError
from paraplan.ir.machine.mesh import Mesh, layout_text
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.plan import Plan
from paraplan.ir.process.memo import SESSION, Lately, Same
from paraplan.ir.sizes import say_size
from paraplan.planner.assemble import Decisions, Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import SolveLimits
from paraplan.planner.decision_classes import grad_classes, largest_param
from paraplan.planner.evaluate_plan import gave_up, realise
from paraplan.planner.sharding.build_space import build_space
from paraplan.planner.sharding.formulate import (
    Formulation,
    formulate,
    has_room_for_all,
    memory_rows,
    tier_room_bytes,
    tier_rows,
    with_rows,
)
from paraplan.planner.sharding.network.optimise import Optimum, least_activity, optimise
from paraplan.planner.sharding.objective import work_of_choices
from paraplan.planner.sharding.pins import make_pins
from paraplan.planner.sharding.prices import MeshPrices
from paraplan.planner.sharding.proof.exposed import proof_network
from paraplan.planner.sharding.proof.step_bound import step_bound
from paraplan.planner.sharding.space import Space
from paraplan.planner.sharding.tightened_rows import MemoryRows
from paraplan.planner.solvers.milp import Status

ROUNDS = 12
"""Plans tried before giving up on memory between the loss and the update."""

_SPACES: Lately[Space] = SESSION.lately("sharding.spaces", 2)
"""The last two."""

SCOPE = "one sharding per segment kind, this mesh and microbatch count, captured op order"


@dataclass(frozen=True)
class Candidate:
    """A plan with its price and proof.

    Attributes:
        plan, simulation: the plan and what the simulator says of it.
        objective_s: the solver's objective: total work over streams.
        bound_s: no plan in scope has a faster step.
        status: "optimal" or "feasible".
        solve_s: seconds the solver took.
        memory_binds: whether more memory might have given a faster plan.
        choices: those of the network without memory that the plan was made of; () where it was made otherwise.
    """

    plan: Plan
    simulation: Simulation
    objective_s: float
    bound_s: float
    status: str
    solve_s: float
    memory_binds: bool = False
    choices: tuple[int, ...] = ()


@dataclass(frozen=True)
class Skipped:
    """A mesh not solved, since the work of every plan there is above a cutoff.

    Attributes:
        mesh: which.
        work_s: no plan's total work over streams is less.
    """

    mesh: Mesh
    work_s: float


def problem_of(
    job: Job, mesh: Mesh, num_microbatches: int, constraints: Constraints, divides_samples: bool = False
) -> Space:
    """The option space of a mesh under constraints, built once for those who ask for it one after another.

    Args:
        job: what is planned.
        mesh: of the devices.
        num_microbatches: of a step.
        constraints: what is pinned.
        divides_samples: as of `make_pins`.
    Raises:
        InfeasibleError: what is pinned to a tier does not fit there.
    """
    key = Same(job), msgspec.json.encode((mesh, num_microbatches, constraints, divides_samples))
    return _SPACES.get(key, lambda: _problem_of(job, mesh, num_microbatches, constraints, divides_samples))


def _problem_of(job: Job, mesh: Mesh, num_microbatches: int, constraints: Constraints, divides_samples: bool) -> Space:
    costs = Costs(job.cluster, mesh, job.profile, job.optimizer.timed_as)
    prices = MeshPrices(costs, (job.program.shares(num_microbatches), *mesh.shape), constraints.every_place)
    pins = make_pins(job.program, constraints, mesh.axes, mesh.shape, num_microbatches, divides_samples)
    space = build_space(job, prices, num_microbatches, pins)
    for tier, held in space.away.items():
        need = sum(min(nbytes) for _, nbytes in held)
        need += max(min(nbytes) for _, nbytes in space.away_workspace[tier])
        room = tier_room_bytes(space, tier)
        if need > room:
            raise InfeasibleError(
                f"what is pinned to {TIERS[tier].noun} takes at least {say_size(need)} per device there on mesh "
                f"{mesh.shape}, where {job.cluster.name} has room for {say_size(room)}: {say_size(need - room)} are "
                f"missing; shard them further (zero), keep some elsewhere, or describe more {TIERS[tier].room}"
            )
    return space


def solve_mesh(
    job: Job, mesh: Mesh, num_microbatches: int, constraints: Constraints, limits: SolveLimits, cutoff_s: float = np.inf
) -> Candidate | Skipped:
    """The best plan on a mesh; nothing where all its plans take more work than the cutoff.

    The problem counts memory at the loss and at the update; where a plan peaks elsewhere, that instant becomes a row
    and the problem is solved again (`instants.py`).

    Args:
        job, mesh, num_microbatches, constraints: as of `problem_of`.
        limits: of the solver.
        cutoff_s: of work.
    Raises:
        InfeasibleError: proved: nothing in scope fits; says how much is missing and what is largest.
        SolverLimitError: the time limit passed first.
    """
    began = time.perf_counter()
    space = problem_of(job, mesh, num_microbatches, constraints)
    problem = formulate(space)
    memory = MemoryRows(job, space, problem, limits.memory_bytes)
    solve_s = 0.0
    closest: Realised | None = None
    for tries in range(ROUNDS):
        left_s = limits.left_s(time.perf_counter() - began)
        if tries and limits.until(began).is_over(False):
            raise _out_of_tries(space, mesh, limits, closest, tries)
        network = with_rows(problem.network, memory.rows)
        found = optimise(network, left_s, limits.relative_gap, limits.backend, cutoff=cutoff_s)
        solve_s += found.solve_s
        if found.choices is None and cutoff_s <= found.bound < np.inf:
            return Skipped(mesh, found.bound)
        if found.choices is None:
            proved = not memory.is_tightened and _none_fits(space, problem, limits, solve_s)
            raise failure_of(job, space, found, limits, proved, closest)
        choices = found.choices[: len(space.deciders)]
        check_objective(space, choices, found)
        decided = decisions_of(job, space, mesh, num_microbatches, choices, bool(constraints.params))
        made = realise(job, decided, limits.memory_bytes)
        closest = made if closest is None or made.peak_bytes < closest.peak_bytes else closest
        if made.peak_bytes <= limits.memory_bytes and not made.over_bytes:
            break
        memory.tighten(made, found.choices)
    else:
        raise _out_of_tries(space, mesh, limits, closest, ROUNDS)
    work = network.work(found.choices)
    started = time.perf_counter()
    bound_s = 0.0
    if limits.certify:
        left_s = limits.left_s(started - began)
        proof = memory_rows(space, limits.memory_bytes, proof=True)
        bounded = with_rows(proof_network(job, space, problem, constraints), proof)
        bound_s = step_bound(bounded, bounded.work(found.choices), found.multipliers[: len(memory.base)], left_s)
    solve_s += time.perf_counter() - started
    status = "optimal" if found.status is Status.OPTIMAL else "feasible"
    binds = memory.is_lowered or gave_up(made.plan, decided) or any(price > 0 for price in found.multipliers)
    if not binds and found.via == "milp":  # which tells no multipliers
        left_s = limits.left_s(time.perf_counter() - began)
        loose = optimise(problem.network, left_s, limits.relative_gap, limits.backend)
        binds = loose.objective < found.objective * (1 - limits.relative_gap)
    return Candidate(made.plan, made.simulation, float(work.sum()), bound_s, status, solve_s, binds, found.choices)


def _none_fits(space: Space, problem: Formulation, limits: SolveLimits, taken_s: float) -> bool:
    """Whether what does not fit with activations saved as they are made would not fit as they are read either."""
    if not space.saved_less:
        return True
    rows = (*memory_rows(space, limits.memory_bytes, proof=True), *tier_rows(space))
    network = with_rows(problem.network, rows)
    found = optimise(network, limits.left_s(taken_s), limits.relative_gap, limits.backend)
    return found.status is Status.INFEASIBLE


def choose(
    job: Job,
    mesh: Mesh,
    num_microbatches: int,
    constraints: Constraints,
    limits: SolveLimits,
    kept_bytes: float | None = None,
) -> Decisions:
    """The sharding of least work on a mesh, memory of activations left out; nothing is lowered or simulated, so depth
    costs nothing.

    Args:
        job, mesh, num_microbatches, constraints, limits: as for `solve_mesh`.
        kept_bytes: what parameters, gradients and states may take; None for no limit.
    Raises:
        InfeasibleError: proved: the constraints leave no sharding.
        SolverLimitError: the time limit passed first.
    """
    space = problem_of(job, mesh, num_microbatches, constraints)
    rows = () if kept_bytes is None else memory_rows(space, kept_bytes, activations=False)
    network = with_rows(formulate(space).network, (*rows, *tier_rows(space)))
    found = optimise(network, limits.time_s, limits.relative_gap, limits.backend)
    if found.choices is None:
        raise failure_of(job, space, found, limits, proved=True)
    choices = found.choices[: len(space.deciders)]
    check_objective(space, choices, found)
    return decisions_of(job, space, mesh, num_microbatches, choices, bool(constraints.params))


def check_objective(space: Space, choices: Sequence[int], found: Optimum) -> None:
    """The objective a solver reports equals the plan's cost evaluated afresh, always.

    Args:
        space: the options.
        choices: [decider] of them.
        found: what the solver says.
    """
    afresh = sum(work_of_choices(space, choices))
    assert abs(afresh - found.objective) <= 1e-6 * max(afresh, 1e-9), (afresh, found.objective)


def decisions_of(
    job: Job, space: Space, mesh: Mesh, num_microbatches: int, choices: Sequence[int], fixed: bool
) -> Decisions:
    """Choices by decider as choices by kind and class.

    Args:
        job: what is planned.
        space: whose options were chosen among.
        mesh, num_microbatches, fixed: as in `Decisions`.
        choices: per decider, the number of its option.
    """
    program = job.program
    ops = tuple(
        tuple(space.strategies[k, i][choices[space.op_decider[k, i]]].key for i in range(len(kind.graph.ops)))
        for k, kind in enumerate(program.kinds)
    )
    grads: list[list[str | None]] = [[None] * len(kind.inputs) for kind in program.kinds]
    for cls, decider, options in zip(grad_classes(program), space.grad_decider, space.grad_options, strict=True):
        for kind_index, slot in cls.readers:
            grads[kind_index][slot] = layout_text(options[choices[decider]])
    params = tuple(
        options[choices[decider]].layouts()
        for decider, options in zip(space.param_decider, space.param_options, strict=True)
    )
    batch = {name: layout_text(space.batch_options[name][choices[d]]) for name, d in space.batch_decider.items()}
    return Decisions(
        mesh=mesh,
        num_microbatches=num_microbatches,
        ops=ops,
        input_grads=tuple(map(tuple, grads)),
        params=params,
        batch=batch,
        fixed=fixed,
    )


def _closest(made: Realised | None) -> str:
    """Where a plan that does not fit peaks."""
    if made is None:
        return ""
    peaks = made.simulation.peak_bytes
    of = peaks.index(max(peaks))
    at = made.simulation.traces[of].peak_step
    step = made.programs[of].steps[at] if at >= 0 else None
    where = "" if step is None else f", as it calls {step.block}" if step.block else f", at its {step.kind.value}"
    return f"{say_size(made.peak_bytes)} ({made.peak_bytes} bytes){where}"


def _ways_out(space: Space) -> str:
    """What makes plans leaner than any in scope."""
    leaves = any(place.states or place.params for place in space.prices.places)
    leave = "" if leaves else "let states and parameters leave the device (offload='host'), "
    return f"{leave}use smaller microbatches, an optimizer of fewer states, or more devices"


def _out_of_tries(
    space: Space, mesh: Mesh, limits: SolveLimits, closest: Realised | None, tries: int
) -> SolverLimitError:
    return SolverLimitError(
        f"no plan under {say_size(limits.memory_bytes)} was found on mesh {mesh.shape} after {tries} tries; "
        f"the closest peaks at {_closest(closest)}; {_ways_out(space)}"
    )


def failure_of(
    job: Job, space: Space, found: Optimum, limits: SolveLimits, proved: bool, closest: Realised | None = None
) -> NoPlanError:
    """Why there is no choice; what would do is solved for where it is explained.

    Args:
        job, space: what was to be planned, and its options.
        found: what the solver says.
        limits: of the solver.
        proved: whether nothing in scope fits.
        closest: the plan that came closest.
    """
    on_mesh = f"{say_size(limits.memory_bytes)} per device on mesh {space.prices.extended[1:]}"
    if found.status is not Status.INFEASIBLE:
        return SolverLimitError(
            f"no plan under {on_mesh} was found in the time there was; raise the time limit or pin more"
        )
    if not proved:  # rows were lowered for what one plan held in passing; another plan's may be less
        said = f"no plan under {on_mesh} was found"
        return SolverLimitError(said, partial(_too_much_in_passing, job, space, limits, closest))
    return InfeasibleError(f"no sharding fits {on_mesh}", partial(_too_much, job, space, limits))


def _too_much_in_passing(job: Job, space: Space, limits: SolveLimits, closest: Realised | None) -> str:
    need = least_memory(space, limits)
    seen = "" if closest is None else f", but of those tried here the leanest peaks at {_closest(closest)}"
    return _only_without_room(space, limits, need) or (
        f"no plan under {say_size(limits.memory_bytes)} per device was found on mesh {space.prices.extended[1:]}: "
        f"{say_size(need)} would do at the loss and the update{seen}; "
        f"{largest_param(job.program)}; {_ways_out(space)}"
    )


def _too_much(job: Job, space: Space, limits: SolveLimits) -> str:
    need = least_memory(space, limits)
    missing = max(need - limits.memory_bytes, 0.0)
    return _only_without_room(space, limits, need) or (
        f"no sharding fits {say_size(limits.memory_bytes)} per device on mesh {space.prices.extended[1:]}: at least "
        f"{say_size(need)} are needed, {say_size(missing)} are missing; {largest_param(job.program)}; use more "
        "devices, smaller microbatches, or devices with more memory"
    )


def _only_without_room(space: Space, limits: SolveLimits, need: float) -> str:
    """What is said where only tiers lack room; empty where the device does too."""
    return without_room(space, limits, need) if need <= limits.memory_bytes and space.away else ""


def without_room(space: Space, limits: SolveLimits, need: float) -> str:
    """What is said where the device would have memory enough, were there more room elsewhere.

    Args:
        space: the options.
        limits, need: of the solver, and bytes that would do on the device.
    """
    tiers = dict.fromkeys(tier for place in space.prices.places if place.states for tier in TIERS[place.states].way)
    said = " and ".join(f"{say_size(tier_room_bytes(space, tier))} on {tier}" for tier in sorted(tiers))
    found = (
        f"no plan under {say_size(limits.memory_bytes)} per device was found on mesh {space.prices.extended[1:]} with"
    )
    would = f"room for {said}; {say_size(need)} would do at the loss and the update if"
    if all(has_room_for_all(space, tier) for tier in tiers):
        return f"{found} {would} copies took none; {_ways_out(space)}"
    rooms = " or ".join(TIERS[tier].room for tier in tiers if TIERS[tier].is_memory)
    others = [name for name, kind in TIERS.items() if name not in tiers and kind.through in tiers]
    more = "".join(f", allow the {name} too (offload='{name}')" for name in others)
    return (
        f"{found} {would} what leaves the device had room and copies took none; describe more {rooms}{more}, or use "
        "more devices"
    )


def least_memory(space: Space, limits: SolveLimits, activations: bool = True) -> float:
    """What any plan in scope holds at least at the loss, or at the update (each row alone: a lower bound).

    Args:
        space: the options.
        limits: of the solver.
        activations: whether what is saved for the backward counts.
    """
    network = with_rows(formulate(space).network, memory_rows(space, limits.memory_bytes, activations, proof=True))
    stop = time.perf_counter() + limits.time_s
    return limits.memory_bytes * max(least_activity(network, row, stop).bound for row in range(len(network.rows)))
