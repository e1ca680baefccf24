"""What a rank computes and waits for at least is never more than its simulated step, whatever the plan."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.graph import Phase
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.evaluate_plan import realise
from paraplan.planner.passes.overlap_products import in_pieces
from paraplan.planner.pipeline.meshes import candidate_meshes
from paraplan.planner.schedules.full_rounds import as_a_whole
from paraplan.planner.search import search
from paraplan.planner.sharding.formulate import formulate
from paraplan.planner.sharding.network.cost_network import Network
from paraplan.planner.sharding.network.optimise import optimise
from paraplan.planner.sharding.proof.exposed import with_serial
from paraplan.planner.sharding.solve import decisions_of, problem_of
from tests.captures import program_of

PINS = (Constraints(mesh=(2, 2)), Constraints(tp=4), Constraints(tp=4, sp=True))
SLOW = 64.0
"""Times faster than the links, computation is taken to be on the GPUs below: waits are most of a step."""


def job_on(name: str, cluster: ClusterSpec) -> Job:
    return Job(program_of(name, 0.0, "fp32"), cluster, OPTIMIZERS["adamw"], ModelRef(display=name), {})


def gpus(slow: float = SLOW) -> ClusterSpec:
    """Four GPUs of a node, without what a launch takes: small ops cost what they compute."""
    cluster = parse_cluster("4xH100:1")
    (group,) = cluster.groups
    link = msgspec.structs.replace(group.in_node, bytes_per_s=group.in_node.bytes_per_s / slow)
    return msgspec.structs.replace(cluster, groups=(msgspec.structs.replace(group, in_node=link),))


@pytest.mark.parametrize(("name", "where"), [("gpt2", "local"), ("llama", "gpus"), ("mixtral", "gpus")])
def test_no_step_is_shorter_than_what_its_rank_computes_and_waits_for(name: str, where: str) -> None:
    job = job_on(name, ClusterSpec.local(4) if where == "local" else gpus())
    rng, shares = np.random.default_rng(0), []
    for number, pins in enumerate(PINS):
        count = 1 + number % 2
        mesh = candidate_meshes(job, pins)[0]
        space = problem_of(job, mesh, count, msgspec.structs.replace(pins, microbatches=count))
        problem = formulate(space)
        network = with_serial(job, space, problem)
        for noise in (0.0, 1.0):
            tried = [p * rng.uniform(1, 1 + noise, (len(p), 1)) for p in problem.network.prices]
            found = optimise(Network(tuple(tried), problem.network.factors), 5.0, 0.1, "mathopt-highs")
            assert found.choices is not None
            choices = found.choices[: len(space.deciders)]
            made = realise(job, decisions_of(job, space, mesh, count, choices, fixed=False), float(1 << 60))
            *streams, serial = network.work(found.choices)
            assert serial <= made.simulation.step_s * (1 + 1e-9)
            shares.append((serial / made.simulation.step_s, serial - streams[0]))
    assert max(waits for _, waits in shares) > 0.0
    assert max(share for share, _ in shares) > 0.5  # near enough to steps to tell one that is too much


def test_what_is_waited_for_raises_the_bound_of_pinned_tensor_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_on("llama", gpus())
    pins = Constraints(tp=4, microbatches=1, overlap=1)
    with_waits = search(job, pins).plan
    monkeypatch.setattr(
        "paraplan.planner.sharding.solve.proof_network", lambda job, space, problem, pins: problem.network
    )
    without = search(job, pins).plan
    assert with_waits.certificate is not None and without.certificate is not None and with_waits.prediction is not None
    assert without.certificate.bound_s * 1.1 < with_waits.certificate.bound_s <= with_waits.prediction.step_s


@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_that_wait_for_other_microbatches_are_reduced_once(zero: int) -> None:
    job = job_on("llama", gpus(64 * SLOW))
    plan = search(job, Constraints(dp=4, pp=1, zero=zero, microbatches=2)).plan
    assert plan.certificate is not None and plan.prediction is not None and plan.reduce_every == 2
    assert 0.5 * plan.prediction.step_s < plan.certificate.bound_s <= plan.prediction.step_s
    assert not any("fault" in note for note in plan.notes)


class _Blocks(nn.Module):
    """Whose sums are segments of their own: their backward has no op."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_a_segment_without_backward_ops_hands_its_gradient_on() -> None:
    program = capture(_Blocks(), {"x": torch.zeros(8, 16)}, loss_fn=lambda out, _: out.square().mean())
    phases = [{op.phase for op in kind.graph.ops} for kind in program.kinds]
    assert any(Phase.BACKWARD not in each for each in phases)
    job = Job(program, gpus(), OPTIMIZERS["adamw"], ModelRef(display="sums"), {})
    plan = search(job, Constraints(pp=1, microbatches=2)).plan
    assert plan.certificate is not None and not any("fault" in note for note in plan.notes)


def test_of_products_in_pieces_as_much_is_waited_for_as_pieces_leave() -> None:
    job, bounds = job_on("llama", gpus()), list[float]()
    for most in (1, 4, 1024):
        plan = search(job, Constraints(tp=4, sp=True, microbatches=1, overlap=most)).plan
        assert plan.certificate is not None and plan.prediction is not None
        assert 0.0 < plan.certificate.bound_s <= plan.prediction.step_s
        assert not any("fault" in note for note in plan.notes)
        bounds.append(plan.certificate.bound_s)
    whole, quarters, none = bounds
    assert none < 0.95 * quarters < quarters < 0.95 * whole


def test_no_step_in_pieces_is_shorter_than_what_its_rank_computes_and_waits_for() -> None:
    job, pins, num_pieced = job_on("llama", gpus()), Constraints(tp=4, sp=True, microbatches=1), 0
    mesh = candidate_meshes(job, pins)[0]
    space = problem_of(job, mesh, 1, pins)
    problem = formulate(space)
    rng = np.random.default_rng(1)
    for _ in range(4):
        tried = [p * rng.uniform(1, 2, (len(p), 1)) for p in problem.network.prices]
        found = optimise(Network(tuple(tried), problem.network.factors), 5.0, 0.1, "mathopt-highs")
        assert found.choices is not None
        decisions = decisions_of(job, space, mesh, 1, found.choices[: len(space.deciders)], fixed=False)
        plain = realise(job, decisions, float(1 << 60))
        for count in (2, 4, 8):
            pieced = in_pieces(plain.plan, count)
            num_pieced += pieced is not plain.plan
            serial = with_serial(job, space, problem, count).work(found.choices)[-1]
            assert serial <= as_a_whole(pieced).simulation.step_s * (1 + 1e-9)
    assert num_pieced
