"""Where transfers are hidden, plans are looked for that move more and compute less."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints, device_budget
from paraplan.planner.deadline import SolveLimits
from paraplan.planner.fits import search_room
from paraplan.planner.one_stage.hidden import NEAR, _weighed, hiding
from paraplan.planner.pipeline.meshes import candidate_meshes
from paraplan.planner.sharding.formulate import network_of
from paraplan.planner.sharding.solve import Candidate, problem_of, solve_mesh

PINS = Constraints(pp=1, mesh=(3, 2), microbatches=1)


class Convolutions(nn.Module):
    """Of more and more channels of smaller and smaller images: neither samples nor channels are best divided
    throughout."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 96, 96, 192, 192, 384, 384)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.relu(layer(x))
            x = nn.functional.max_pool2d(x, 2) if index % 2 else x
        return x.square().mean()


@pytest.fixture(scope="module")
def job() -> Job:
    with torch.device("meta"):
        program = capture(Convolutions(), {"x": torch.zeros(10, 3, 96, 96)}, precision="fp32")
    return Job(program, parse_cluster("2xA100-80:3"), OPTIMIZERS["adamw"], ModelRef(display="convolutions"), {})


def limits_of(job: Job) -> SolveLimits:
    return SolveLimits(time_s=10.0, memory_bytes=device_budget(job.cluster, PINS), certify=False)


def solved(job: Job) -> Candidate:
    found = solve_mesh(job, candidate_meshes(job, PINS)[0], 1, PINS, limits_of(job))
    assert isinstance(found, Candidate)
    return found


def test_a_faster_plan_of_no_less_work_is_found(job: Job) -> None:
    (mesh,), base = candidate_meshes(job, PINS), solved(job)
    found = hiding(job, mesh, PINS, limits_of(job), [base])
    steps = [each.simulation.step_s for each in (base, *found)]
    assert found and steps == sorted(steps, reverse=True) and len(set(steps)) == len(steps)
    assert found[-1].objective_s >= base.objective_s * (1 - 2e-3), "of work it takes no less"
    assert search_room(job, PINS, certify=False).plan.prediction.step_s <= steps[-1] * (1 + 1e-9)  # type: ignore[union-attr]


def test_it_is_looked_for_only_where_it_may_matter(job: Job) -> None:
    (mesh,), base = candidate_meshes(job, PINS), solved(job)
    given = job, mesh, PINS
    assert not hiding(*given, limits_of(job), [])
    assert not hiding(*given, limits_of(job), [replace(base, memory_binds=True)])
    assert not hiding(*given, replace(limits_of(job), known_s=base.simulation.step_s / NEAR / 1.01), [base])
    moved_s = sum(base.simulation.comm_s.values())
    waits = tuple(msgspec.structs.replace(trace, exposed_comm_s=moved_s) for trace in base.simulation.traces)
    all_waited_for = replace(base, simulation=msgspec.structs.replace(base.simulation, traces=waits))
    assert not hiding(*given, limits_of(job), [all_waited_for])


def test_a_weighed_network_prices_each_stream_so(job: Job) -> None:
    space = problem_of(job, candidate_meshes(job, PINS)[0], 1, PINS)
    network = network_of(space, None)
    weights = np.linspace(1.0, 0.2, network.num_streams)
    choices = [0] * len(network.prices)
    np.testing.assert_allclose(_weighed(network, weights).work(choices), network.work(choices) * weights)
