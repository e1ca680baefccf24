"""Solving the sharding problem of one mesh: choices, their plan, its price, and what was proved."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paraplan.cost_models.costs import Costs
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulate import Simulation
from paraplan.ir.errors import InfeasibleError, SolverLimitError
from paraplan.ir.lower import lower
from paraplan.ir.mesh import Mesh, layout_text
from paraplan.ir.plan import Plan
from paraplan.planner.assemble import Decisions, Job, assemble
from paraplan.planner.classes import grad_classes
from paraplan.planner.constraints import Constraints
from paraplan.planner.milp import Solution, Status, solve
from paraplan.planner.sharding.bound import step_bound
from paraplan.planner.sharding.evaluate import held_bytes, work_of_choices
from paraplan.planner.sharding.ilp import build_ilp, step_problem
from paraplan.planner.sharding.pins import make_pins
from paraplan.planner.sharding.prices import Prices
from paraplan.planner.sharding.space import Space, build_space

SCOPE = "one choice per segment kind, this mesh and microbatch count, captured op order"


@dataclass(frozen=True)
class Limits:
    """Bounds on the search: seconds of solver time, bytes per device, and which solver."""

    time_s: float
    memory_bytes: float
    backend: str = "mathopt-highs"


@dataclass(frozen=True)
class Candidate:
    """A plan with its price and proof.

    Attributes:
        plan, simulation: the plan and what the simulator says of it.
        objective_s: the solver's objective: total work over streams.
        bound_s: no plan in scope has a faster step.
        status: "optimal" or "feasible".
        solve_s: seconds the solver took.
    """

    plan: Plan
    simulation: Simulation
    objective_s: float
    bound_s: float
    status: str
    solve_s: float


def problem_of(job: Job, mesh: Mesh, num_microbatches: int, constraints: Constraints) -> Space:
    """The option space of a mesh under constraints."""
    prices = Prices(Costs(job.cluster, mesh), (num_microbatches, *mesh.shape))
    pins = make_pins(job.program, constraints, mesh.axes, mesh.shape, num_microbatches)
    return build_space(job, prices, num_microbatches, pins.op, pins.param, pins.batch)


def solve_mesh(job: Job, mesh: Mesh, num_microbatches: int, constraints: Constraints, limits: Limits) -> Candidate:
    """The best plan on a mesh.

    The ILP counts memory at two instants; where the simulated peak is higher still, the limit is lowered by the
    difference and the problem solved again.

    Raises:
        InfeasibleError: proved: nothing in scope fits; says how much is missing and what is largest.
        SolverLimitError: the time limit passed first.
    """
    space = problem_of(job, mesh, num_microbatches, constraints)
    limit = limits.memory_bytes
    solve_s = 0.0
    for _ in range(6):
        ilp = build_ilp(space, limit)
        found = solve(step_problem(ilp), backend=limits.backend, time_limit_s=limits.time_s)
        solve_s += found.solve_s
        if found.values is None:
            _fail(job, space, found, limits, limit)
        assert found.values is not None
        choices = ilp.choices(found.values, space)
        _check_objective(space, choices, found)
        plan = assemble(job, decisions_of(job, space, mesh, num_microbatches, choices))
        simulation = simulate_plan(plan, lower(plan))
        peak = max(simulation.peak_bytes)
        if peak <= limits.memory_bytes:
            break
        limit = max(min(limit, max(held_bytes(space, choices))) - (peak - limits.memory_bytes), 1.0)
    else:
        raise SolverLimitError(
            f"no plan under {_size(limits.memory_bytes)} was found on mesh {mesh.shape} after 6 tries; "
            f"the closest peaks at {_size(peak)}"
        )
    work = work_of_choices(space, choices)
    started = time.perf_counter()
    bound_s = step_bound(space, build_ilp(space, limits.memory_bytes), work, limits.backend, limits.time_s)
    solve_s += time.perf_counter() - started
    status = "optimal" if found.status is Status.OPTIMAL else "feasible"
    return Candidate(plan, simulation, sum(work), bound_s, status, solve_s)


def _check_objective(space: Space, choices: Sequence[int], found: Solution) -> None:
    """The objective a solver reports equals the plan's cost evaluated afresh, always."""
    afresh = sum(work_of_choices(space, choices))
    assert abs(afresh - found.objective) <= 1e-6 * max(afresh, 1e-9), (afresh, found.objective)


def decisions_of(job: Job, space: Space, mesh: Mesh, num_microbatches: int, choices: Sequence[int]) -> Decisions:
    """Choices by decider as choices by kind and class."""
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
    )


def _fail(job: Job, space: Space, found: Solution, limits: Limits, limit: float) -> None:
    if found.status is not Status.INFEASIBLE:
        raise SolverLimitError(
            f"the solver found no plan within {limits.time_s:.0f} s; raise the time limit or pin more"
        )
    need = least_memory(space, limits)
    name, spec = max(((n, p.spec) for n, p in job.program.params.items()), key=lambda item: item[1].nbytes)
    missing = need - limits.memory_bytes
    if limit < limits.memory_bytes:  # lowered for one plan's passing values; another plan's may be smaller
        raise SolverLimitError(
            f"no plan under {_size(limits.memory_bytes)} per device was found on mesh {space.prices.extended[1:]}: "
            f"{_size(need)} would do at the loss and the update, but passing values in between took "
            f"{_size(limits.memory_bytes - limit)} more; the largest tensor is {name} {spec} "
            f"({_size(spec.nbytes)}); use smaller microbatches or more devices"
        )
    raise InfeasibleError(
        f"no sharding fits {_size(limits.memory_bytes)} per device on mesh {space.prices.extended[1:]}: at least "
        f"{_size(need)} are needed, {_size(max(missing, 0.0))} are missing; the largest tensor is {name} {spec} "
        f"({_size(spec.nbytes)}); use more devices, smaller microbatches, or devices with more memory"
    )


def least_memory(space: Space, limits: Limits) -> float:
    """The least bytes any plan in scope holds at the loss and the update (a lower bound: the LP relaxation)."""
    unit = 2.0**30
    ilp = build_ilp(space, None)
    peak = ilp.column(space.prices.zero)
    for held in (space.at_loss, space.at_update):
        merged: dict[int, float] = {}
        for decider, options in held:
            for index, nbytes in enumerate(options):
                column = ilp.first[decider] + index
                merged[column] = merged.get(column, 0.0) - nbytes / unit
        ilp.row([peak, *merged], [1.0, *merged.values()], 0.0, np.inf)
    objective = np.zeros(len(ilp.prices))
    objective[peak] = 1.0
    found = solve(ilp.problem(objective), backend=limits.backend, time_limit_s=limits.time_s, relax=True)
    return found.bound * unit


def _size(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.2f} MiB"
