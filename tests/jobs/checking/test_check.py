"""The check against one device: blind to what Adam makes of rounding noise, to nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paraplan.capture import capture
from paraplan.codegen import build_modules
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.jobs.checking.check import Captured, LargestErrors, SingleDevice, max_error
from paraplan.jobs.models import Made
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer

STEPS, LIMIT = 3, 1e-9
Spoil = Callable[[dict[str, Tensor]], None]


class Shifted(nn.Module):
    """A classifier whose last parameter shifts all logits alike, so that its true gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.out = nn.Linear(8, 16), nn.Linear(16, 6)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean cross-entropy."""
        return nn.functional.cross_entropy(self.out(torch.tanh(self.hidden(x))) + self.shift, y)


def batch(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, 8, generator=draw, dtype=torch.float64), "y": torch.randint(6, (8,), generator=draw)}


@pytest.fixture(scope="module")
def plan() -> Plan:
    program = capture(Shifted().double(), batch(0), precision="fp64")
    job = Job(program, ClusterSpec.local(2), OPTIMIZERS["adam"], ModelRef(display="shifted"), {})
    return search(job, Constraints(dp=2), certify=False).plan


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2)


def checked(
    plan: Plan, spoil_grads: Spoil | None = None, spoil_params: Spoil | None = None
) -> tuple[LargestErrors, float]:
    """A plan's errors, and how far its parameters end from one device that updates with its own gradients.

    Spoilers change the second step's gradients or parameters in place, before the run goes on with them.
    """
    programs = verify_plan(plan)
    trainer = InProcessTrainer(plan, programs, [build_modules(each) for each in programs], Shifted().double())
    single = SingleDevice(plan, Made(Shifted().double()), adam, 0)
    free = Captured(plan, Shifted().double(), adam, 0)
    for step in range(STEPS):
        loss = float(trainer.step(batch(step)))
        if step == 1 and spoil_grads is not None:
            for rank in trainer.ranks:
                spoil_grads({name: rank.executor.outer[outer] for name, outer in rank.program.grads.items()})
        grads = trainer.grads()
        trainer.apply_optimizer(torch.optim.Adam, lr=1e-2)
        if step == 1 and spoil_params is not None:
            for rank in trainer.ranks:
                spoil_params({name: param.detach() for name, param in rank.params.items()})
        single.compare(batch(step), None, loss, grads, trainer.params(), trainer.buffers())
        free.step(batch(step), None)
    return single.errors, max_error(trainer.params(), {name: free.masters[name] for name in free.trained})[0]


def test_rounding_noise_under_adam_is_no_error(plan: Plan) -> None:
    errors, drift = checked(plan)
    assert errors.loss <= LIMIT and errors.grad <= LIMIT and errors.param <= 1e-13
    assert errors.eager is not None and errors.eager <= LIMIT
    assert drift > LIMIT  # what a comparison of two trajectories would have said


def test_a_wrong_gradient_fails(plan: Plan) -> None:
    def spoil(grads: dict[str, Tensor]) -> None:
        grads["hidden.weight"].mul_(1 + 1e-7)

    errors, _ = checked(plan, spoil_grads=spoil)
    assert errors.grad > LIMIT and errors.param <= 1e-13
    assert errors.worst == "gradient of hidden.weight"


def test_a_gradient_that_should_be_nothing_fails(plan: Plan) -> None:
    def spoil(grads: dict[str, Tensor]) -> None:
        grads["shift"].fill_(1e-12)

    assert checked(plan, spoil_grads=spoil)[0].grad > LIMIT


def test_a_wrong_update_fails(plan: Plan) -> None:
    def spoil(params: dict[str, Tensor]) -> None:
        params["out.bias"].mul_(1 + 1e-7)

    errors, _ = checked(plan, spoil_params=spoil)
    assert errors.param > LIMIT and errors.worst.endswith("out.bias")
