"""Memory at an instant, as the sharding problem counts it, against the simulation of the same plan."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.realised_plan import Realised
from paraplan.ir.machine.mesh import make_mesh
from paraplan.lowering import lower
from paraplan.planner.assemble import assemble
from paraplan.planner.constraints import Constraints
from paraplan.planner.sharding.formulate import formulate, with_rows
from paraplan.planner.sharding.instants import instant_row, peak_instant
from paraplan.planner.sharding.network.optimise import optimise
from paraplan.planner.sharding.solve import decisions_of, problem_of


@pytest.mark.parametrize("m", [1, 2])
def test_the_peak_is_counted(tiny_gpt2, m: int) -> None:  # type: ignore[no-untyped-def]
    """Most of the peak is in the row of its instant; what is not is workspace and what passes between blocks."""
    job, mesh = tiny_gpt2.job(2), make_mesh((2,), ("axis0",))
    seen = 0
    for constraints in (Constraints(), Constraints(dp=2, zero=3), Constraints(tp=2)):
        space = problem_of(job, mesh, m, constraints)
        problem = formulate(space)
        found = optimise(problem.network)
        assert found.choices is not None
        plan = assemble(job, decisions_of(job, space, mesh, m, found.choices[: len(space.deciders)], False))
        programs = lower(plan)
        simulation = simulate_plan(plan, programs)
        at = peak_instant(Realised(plan, programs, simulation))
        if at is None:  # at the update
            continue
        seen += 1
        peak = float(max(simulation.peak_bytes))
        row = instant_row(space, job.program, problem, at, peak)
        counted = float(with_rows(problem.network, (row,)).activity(found.choices)[0])
        assert 0.6 <= counted <= 1.1, (constraints, at, counted)
    assert seen


@pytest.mark.parametrize("pins", [{}, {"dp": 2, "zero": 3}, {"dp": 2, "zero": 1}], ids=str)
def test_gradients_that_stay_are_counted(tiny_gpt2, pins) -> None:  # type: ignore[no-untyped-def]
    """At the peak, what the problem counts more where gradients are added up is what the plan holds more."""
    plain, mesh, counted, held = tiny_gpt2.job(2), make_mesh((2,), ("axis0",)), [], []
    at = choices = None
    for accumulates in (False, True):
        optimizer = msgspec.structs.replace(plain.optimizer, accumulates=accumulates)
        job = replace(plain, optimizer=optimizer)
        space = problem_of(job, mesh, 2, Constraints(**pins))
        problem = formulate(space)
        choices = choices or optimise(problem.network).choices
        assert choices is not None
        plan = assemble(job, decisions_of(job, space, mesh, 2, choices[: len(space.deciders)], False))
        programs = lower(plan)
        at = at or peak_instant(Realised(plan, programs, simulate_plan(plan, programs)))
        assert at is not None
        row = instant_row(space, job.program, problem, at, 1.0)
        counted.append(float(with_rows(problem.network, (row,)).activity(choices)[0]))
        held.append(programs[0].optimizer_bytes)
    assert counted[1] - counted[0] == pytest.approx(held[1] - held[0], rel=1e-6) and held[1] > held[0]
