"""Plans under a budget: they fit, run as predicted, and give the single device's numbers."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo import Small, build
from paraplan.capture import capture
from paraplan.capture.reference import run_step
from paraplan.codegen import build_modules
from paraplan.cost_models.predict import predict
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.errors import ConstraintError, CostModelError, InfeasibleError, SolverLimitError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.mesh import make_mesh
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import SolveLimits
from paraplan.planner.options.values import PRESETS
from paraplan.planner.recompute.solve_jointly import solve_with_recomputation
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer
from tests.captures import program_of
from tests.numerics import relative_error

torch.set_num_threads(1)


class Residual(nn.Module):
    """Layers with dropout that save much beside what they keep."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(8, 32) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(32, 8) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + F.dropout(down(F.gelu(up(x))), 0.1)
        return F.mse_loss(x, y)


def given(small: Small, program: Program):  # type: ignore[no-untyped-def]
    """A model and its program, what a step of it gives, and the plan with nothing pinned."""
    tensors = dict(small.model.named_parameters(remove_duplicate=False))
    params = {key: tensors[key].detach() for key in program.params}
    buffers = {key: b.double() if b.is_floating_point() else b for key, b in small.model.named_buffers()}
    wanted = run_step(program, params, buffers, small.batch, 0)
    free = search(job_of(program, 1), Constraints(mesh=(1,)), certify=False).plan
    return small, program, wanted, free


@pytest.fixture(scope="module")
def gpt2():  # type: ignore[no-untyped-def]
    return given(build("gpt2", 0.1), program_of("gpt2", 0.1))


@pytest.fixture(scope="module")
def residual():  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    x, y = (torch.randn(256, 8, dtype=torch.float64) for _ in range(2))
    small = Small("residual", Residual().double().train(), {"x": x, "y": y})
    return given(small, capture(small.model, small.batch, precision="fp64"))


def job_of(program, ranks: int) -> Job:  # type: ignore[no-untyped-def]
    return Job(program, ClusterSpec.local(ranks), OPTIMIZERS["sgd"], ModelRef(display="gpt2"), {})


def trained(plan: Plan, small: Small, wanted) -> InProcessTrainer:  # type: ignore[no-untyped-def]
    """One step of a plan: the single device's loss and gradients, and everything done as predicted."""
    programs = verify_plan(plan)
    trainer = InProcessTrainer(plan, programs, [build_modules(p) for p in programs], small.model)
    assert float(abs(trainer.step(small.batch) - wanted.loss) / abs(wanted.loss)) <= 1e-9
    assert relative_error(trainer.grads(), wanted.grads) <= 1e-9
    trainer.apply_optimizer(torch.optim.SGD, lr=1e-3)
    assert [entry.key for entry in trainer.entries(0)] == [entry.key for entry in entries(programs[0])]
    return trainer


@pytest.mark.parametrize(("share", "recompute"), [(0.8, None), (0.5, None), *((1.0, name) for name in PRESETS[1:])])
def test_a_budget_is_kept_and_nothing_else_changes(gpt2, share: float, recompute: str | None) -> None:  # type: ignore[no-untyped-def]
    small, program, wanted, free = gpt2
    budget = int(free.prediction.peak_bytes[0] * share)
    pins = Constraints(mesh=(1,), memory_bytes=budget, recompute=recompute)
    plan = search(job_of(program, 1), pins, time_limit_s=4.0).plan
    assert any(choice.activations for choice in plan.stages[0].choices) or plan.memory_actions is not None
    assert free.prediction.step_s < plan.prediction.step_s and plan.certificate.bound_s <= plan.prediction.step_s
    trainer = trained(plan, small, wanted)
    assert trainer.peak_bytes(0) <= plan.prediction.peak_bytes[0] <= 1.02 * trainer.peak_bytes(0)
    assert trainer.peak_bytes(0) <= budget


def test_op_by_op_competes_and_runs(gpt2) -> None:  # type: ignore[no-untyped-def]
    small, program, wanted, free = gpt2
    budget = int(free.prediction.peak_bytes[0] * 0.65)
    constraints = Constraints(mesh=(1,), memory_bytes=budget, microbatches=1)
    job, limits = job_of(program, 1), SolveLimits(time_s=10, memory_bytes=budget)
    by_kinds, *_ = solve_with_recomputation(job, make_mesh((1,), ("d0",)), 1, constraints, limits)
    plan = search(job, constraints).plan
    assert plan.memory_actions is not None and plan.prediction.step_s < by_kinds.simulation.step_s
    assert plan.certificate.bound_s <= plan.prediction.step_s and "op by op" in " ".join(plan.notes)
    programs = verify_plan(plan)
    trainer = InProcessTrainer(plan, programs, [build_modules(p) for p in programs], small.model)
    assert float(abs(trainer.step(small.batch) - wanted.loss)) <= 1e-12
    assert relative_error(trainer.grads(), wanted.grads) <= 1e-9
    trainer.apply_optimizer(torch.optim.SGD, lr=1e-3)
    assert trainer.peak_bytes(0) == plan.prediction.peak_bytes[0] <= budget


def test_recomputing_beats_what_keeps_everything(gpt2) -> None:  # type: ignore[no-untyped-def]
    _, program, _, free = gpt2
    budget = int(free.prediction.peak_bytes[0] * 0.6)
    constraints = Constraints(mesh=(1,), memory_bytes=budget)
    chosen = search(job_of(program, 1), constraints, certify=False).plan.prediction
    kept = search(
        job_of(program, 1), Constraints(mesh=(1,), memory_bytes=budget, recompute="none"), certify=False
    ).plan.prediction
    assert chosen.step_s < kept.step_s


def test_what_cannot_fit_says_what_it_would_take(gpt2) -> None:  # type: ignore[no-untyped-def]
    _, program, _, _ = gpt2
    states = sum(param.spec.nbytes for param in program.params.values())
    with pytest.raises(InfeasibleError, match="whatever is recomputed"):
        search(job_of(program, 1), Constraints(mesh=(1,), memory_bytes=states // 2, recompute="full"), certify=False)
    with pytest.raises(SolverLimitError, match="the closest peaks at"):
        search(
            job_of(program, 1),
            Constraints(mesh=(1,), memory_bytes=states * 5 // 2, microbatches=1),
            time_limit_s=2.0,
            certify=False,
        )


def linked(program, host_bytes_per_s: float, **fields: object) -> Job:  # type: ignore[no-untyped-def]
    """A job on two devices (on one, schedules op by op compete as well) with a host as fast as said."""
    job = job_of(program, 2)
    (group,) = job.cluster.groups
    host = msgspec.structs.replace(group.host, bytes_per_s=host_bytes_per_s, latency_s=0.0)
    group = msgspec.structs.replace(group, host=host, **fields)
    return dataclasses.replace(job, cluster=msgspec.structs.replace(job.cluster, groups=(group,)))


@pytest.fixture(scope="module")
def replicated(residual):  # type: ignore[no-untyped-def]
    """Pins of plain data parallelism, and what it holds with nothing recomputed."""
    pins = Constraints(dp=2, zero=0, microbatches=1)
    return pins, search(job_of(residual[1], 2), pins, certify=False).plan.prediction.peak_bytes[0]


def test_offload_is_never_worse_than_recomputation_and_taken_where_it_is_free(residual, replicated) -> None:  # type: ignore[no-untyped-def]
    small, program, wanted, _ = residual
    budget = int(replicated[1] * 0.85)
    pins = msgspec.structs.replace(replicated[0], memory_bytes=budget)
    again = search(linked(program, 1e12), pins, certify=False).plan.prediction.step_s
    for speed in (1e8, 1e12):
        job = linked(program, speed)
        away = search(job, msgspec.structs.replace(pins, recompute="none", offload="host")).plan.prediction.step_s
        both = search(job, msgspec.structs.replace(pins, offload="host")).plan
        assert both.prediction.step_s <= min(again, away)
        assert both.certificate.bound_s <= both.prediction.step_s
        assert both.prediction.peak_bytes[0] <= budget
    assert both.prediction.tier_peak_bytes["host"] > 0 and both.prediction.step_s < again, "a fast host is used"
    trainer = trained(both, small, wanted)
    assert trainer.tier_peak_bytes(0) == both.prediction.tier_peak_bytes


def test_a_host_with_little_room_takes_little(residual, replicated) -> None:  # type: ignore[no-untyped-def]
    program, memory = residual[1], int(replicated[1] * 0.85)
    pins = msgspec.structs.replace(replicated[0], memory_bytes=memory, recompute="none", offload="host")
    roomy = search(linked(program, 1e12), pins, certify=False).plan
    taken = 2 * roomy.prediction.tier_peak_bytes["host"]
    again = msgspec.structs.replace(pins, recompute=None)
    little = search(linked(program, 1e12, host_memory_bytes=taken // 2), again, certify=False).plan
    assert 2 * little.prediction.tier_peak_bytes.get("host", 0) <= taken // 2
    with pytest.raises(ConstraintError, match="describes no room on host"):
        search(linked(program, 1e12, host_memory_bytes=0), pins, certify=False)
    tight = msgspec.structs.replace(pins, memory_bytes=replicated[1] // 2)
    with pytest.raises(SolverLimitError, match=r"offloaded \(room: 9.77 KiB per device on host\)"):
        search(linked(program, 1e12, host_memory_bytes=20_000), tight, certify=False)
    smaller = linked(program, 1e12, host_memory_bytes=taken - 2).cluster
    with pytest.raises(CostModelError, match=r"wait on host, where local:2 has room for [\d.]+ [KM]iB: \d bytes"):
        predict(msgspec.structs.replace(roomy, cluster=smaller), verify_plan(roomy))
