"""The bound relaxes what lowering does: no simulated step is shorter, no stream does less than it was priced at."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.execution.streams import COMPUTE
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.planner.assemble import Job
from paraplan.planner.certificate import FAULT, OPTIMAL_GAP, certified, certified_as, with_pins
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import SolveLimits
from paraplan.planner.evaluate_plan import realise
from paraplan.planner.pipeline.meshes import candidate_meshes
from paraplan.planner.search import search
from paraplan.planner.sharding.formulate import network_of
from paraplan.planner.sharding.network.optimise import optimise
from paraplan.planner.sharding.objective import work_of_choices
from paraplan.planner.sharding.solve import Skipped, decisions_of, problem_of, solve_mesh
from tests.captures import zoo_job

PINS = [
    Constraints(cp=4, cp_mode="alltoall"),
    Constraints(cp=4, cp_mode="gather"),
    Constraints(cp=4, cp_mode="ring"),
    Constraints(cp=2, tp=2, cp_mode="alltoall"),
    Constraints(tp=4),
    Constraints(tp=4, sp=True),
    Constraints(tp=2, sp=True, dp=2),
    Constraints(dp=4, zero=3),
]


class Layer(nn.Module):
    """Attention as torch's op or written out, and an MLP."""

    def __init__(self, fused: bool, d: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.fused, self.heads = fused, heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.norms = nn.ModuleList([nn.LayerNorm(d), nn.LayerNorm(d)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (f(y).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self, fused: bool, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(fused) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@cache
def program(fused: bool, layers: int) -> Program:
    return capture(Model(fused, layers).double(), {"x": torch.randn(4, 16, 16).double()}, precision="fp64")


def job(fused: bool = True, layers: int = 2, cluster: str = "local:4") -> Job:
    return Job(program(fused, layers), parse_cluster(cluster), OPTIMIZERS["sgd"], ModelRef(display="model"), {})


WRITTEN_OUT = [Constraints(cp=4), Constraints(tp=4, sp=True)]


@pytest.mark.parametrize(
    ("pins", "fused"), [*((pins, True) for pins in PINS), *((pins, False) for pins in WRITTEN_OUT)], ids=str
)
def test_no_step_is_below_its_bound(pins: Constraints, fused: bool) -> None:
    plan = search(job(fused), pins).plan
    assert plan.certificate is not None and plan.prediction is not None
    assert 0.0 < plan.certificate.bound_s < plan.prediction.step_s
    assert not any(FAULT in note for note in plan.notes)


@pytest.mark.parametrize("pins", PINS, ids=str)
def test_streams_do_what_they_are_priced_at(pins: Constraints) -> None:
    """The choices' price, stream by stream, is no more than the plan of these choices takes."""
    for stream, priced_s, busy_s in _priced_and_busy(job(cluster="4xH100"), pins):
        assert priced_s <= busy_s * (1 + 1e-6), stream


@pytest.mark.parametrize("name", ["lstm", "mamba"])
def test_a_loop_is_priced_with_what_its_steps_launch(name: str) -> None:
    of_two = replace(zoo_job(name, 2), cluster=parse_cluster("2xH100"))
    priced = {
        stream: priced_s / busy_s for stream, priced_s, busy_s in _priced_and_busy(of_two, Constraints(dp=2)) if busy_s
    }
    assert 0.8 <= priced[COMPUTE] <= 1


def _priced_and_busy(made_of: Job, pins: Constraints) -> list[tuple[str, float, float]]:
    """Of the choices of least work, per rank class and stream: seconds that they are priced at, and that their plan
    keeps it busy."""
    (mesh, *_), limits = candidate_meshes(made_of, pins), SolveLimits(time_s=60.0, memory_bytes=float(1 << 40))
    space = problem_of(made_of, mesh, 1, pins)
    solved = optimise(network_of(space, None), limits.time_s, limits.relative_gap)
    assert solved.choices is not None
    choices = solved.choices[: len(space.deciders)]
    made = realise(made_of, decisions_of(made_of, space, mesh, 1, choices, False), limits.memory_bytes)
    found: list[tuple[str, float, float]] = []
    for trace in made.simulation.traces:
        busy: Counter[str] = Counter()
        for span in trace.spans:
            busy[span.stream] += span.end_s - span.start_s
        priced = zip(space.prices.streams, work_of_choices(space, choices), strict=True)
        found += [(stream, seconds, busy[stream]) for stream, seconds in priced]
    return found


def test_a_bound_above_the_step_is_withdrawn_and_told() -> None:
    made_of, pins = job(layers=1), Constraints(dp=4)
    (mesh, *_) = candidate_meshes(made_of, pins)
    best = solve_mesh(made_of, mesh, 1, pins, SolveLimits(time_s=60.0, memory_bytes=float(1 << 40), certify=False))
    plan = certified(best, 2 * best.simulation.step_s, 1)
    assert plan.certificate is not None and plan.certificate.bound_s == 0.0
    assert FAULT in plan.notes[-1]
    sound = certified(best, 0.5 * best.simulation.step_s, 1)
    assert sound.certificate is not None and sound.certificate.bound_s > 0.0
    known = msgspec.structs.replace(sound.certificate, bound_s=2 * best.simulation.step_s)
    plan = certified_as(sound, known)
    assert plan.certificate is not None and plan.certificate.bound_s == 0.0 and plan.certificate.gap == 1.0
    assert FAULT in plan.notes[-1] and certified_as(sound, sound.certificate) == sound


def test_optimal_is_said_of_what_the_bound_proves() -> None:
    """Not of a sharding that the solver proved to be of least work, whose step may be far from the bound."""
    with torch.device("meta"):
        program = capture(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), {"input": torch.randn(64, 64)},
                          loss_fn=lambda x, _: x.square().mean())  # fmt: skip
    job = Job(program, parse_cluster("2xH100"), OPTIMIZERS["adamw"], ModelRef(display="rows"), {})
    mesh = candidate_meshes(job, Constraints(dp=2))[0]
    best = solve_mesh(job, mesh, 1, Constraints(dp=2), SolveLimits(time_s=60.0, memory_bytes=1 << 60))
    assert not isinstance(best, Skipped) and best.status == "optimal"
    step_s = best.simulation.step_s
    for share, status in ((0.62, "feasible"), (1 - 2 * OPTIMAL_GAP, "feasible"), (1 - OPTIMAL_GAP / 2, "optimal")):
        made = certified(best, share * step_s, 1).certificate
        assert made is not None and made.status == status and made.gap == pytest.approx(1 - share)


def test_scopes_name_what_was_pinned() -> None:
    plan = search(job(), Constraints(pp=1, dp=4, zero=2)).plan
    assert plan.certificate is not None and plan.certificate.bound_scope.endswith("; pinned: dp=4, zero=2, pp=1")
    assert with_pins(plan, Constraints(tp=4)) is plan, "they are named once"
    bare = msgspec.structs.replace(plan.certificate, bound_scope="this mesh")
    numerics = with_pins(msgspec.structs.replace(plan, certificate=bare), Constraints(reduce_dtype="fp32", mesh=(2, 2)))
    assert numerics.certificate is not None
    assert numerics.certificate.bound_scope == "this mesh; pinned: mesh=[2,2], reduce_dtype=fp32"
    free = search(job(), Constraints(microbatches=1)).plan.certificate
    assert free is not None and free.bound_scope.endswith("; pinned: microbatches=1")


def test_one_stage_is_no_slower_than_data_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the solver takes another sharding for its work, or finds none in time."""
    job4 = job()
    levels = [search(job4, Constraints(pp=1, dp=4, zero=zero), certify=False).step_s for zero in range(4)]
    assert search(job4, Constraints(pp=1), certify=False).step_s <= min(levels) * (1 + 1e-9)
    monkeypatch.setattr("paraplan.planner.one_stage.solved_meshes.SolvedMeshes.solve", lambda *_: None)
    alone = search(job4, Constraints(pp=1))
    assert alone.step_s == pytest.approx(min(levels)) and alone.plan.certificate is not None
    assert (alone.plan.certificate.status, alone.plan.certificate.bound_s) == ("feasible", 0.0)
