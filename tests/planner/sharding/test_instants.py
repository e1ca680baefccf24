"""Memory at an instant, as the sharding problem counts it, against the simulation of the same plan."""

from __future__ import annotations

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
