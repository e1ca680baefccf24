"""Evaluations: the forward alone, of the same plan: values, memory, what is left alone, and outputs."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.zoo.language import transformer
from benchmarks.zoo.small import Small
from paraplan.capture import capture
from paraplan.cost_models.simulator.live_bytes import MemoryWalk, entries
from paraplan.ir.errors import ConstraintError, PlanMismatchError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.graph import Phase
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering import lower, lower_evaluation
from paraplan.planner.assemble import Job
from paraplan.planner.sampling import random_plan
from tests.runtime.dropout_net import Net, batch, net, program, trainer_of


@functools.cache
def gpt2() -> tuple[Small, Program]:
    small = transformer("gpt2", 0.1)
    return small, capture(small.model, small.batch, precision="fp64")


def plan_of(captured: Program, seed: int, ranks: int = 2) -> Plan:
    job = Job(captured, ClusterSpec.local(ranks), OPTIMIZERS["adamw"], ModelRef(display="net"), {})
    return random_plan(job, seed, max_microbatches=4)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("seed", range(3))
def test_loss_and_outputs_equal_the_eager_model_in_evaluation(seed: int) -> None:
    plan = plan_of(program(), seed, (2, 4)[seed % 2])
    trainer, model = trainer_of(plan, net()), net().eval()
    before = {name: value.clone() for name, value in trainer.params().items()}
    with torch.no_grad():
        wanted = model(**batch())
    assert set(plan.program.outputs) == {"logits", "hidden.0", "hidden.1", "best", "odds", "right", "spread"}
    names = list(plan.program.outputs)
    found = trainer.eval_step(batch(), outputs="global", names=names)
    close(found.loss, wanted["loss"])
    for name in names:
        value = wanted["hidden"][int(name[-1])] if name.startswith("hidden") else wanted[name]
        close(found.outputs[name], value)
    assert all(torch.equal(value, before[name]) for name, value in trainer.params().items())
    local = trainer.eval_step(batch(), outputs="local", names=["logits"])
    part = found.outputs["logits"].numel() // local.outputs["logits"].numel()
    assert part >= 1
    assert trainer.eval_step(batch()).outputs == {}


class Namespaced(Net):
    """Returns an object of a class of its own."""

    def forward(self, **inputs: Tensor) -> SimpleNamespace:
        return SimpleNamespace(**super().forward(**inputs))


def test_outputs_of_an_object_are_its_attributes() -> None:
    torch.manual_seed(0)
    model = Namespaced().double()
    plan = plan_of(capture(model, batch(), precision="fp64"), 1)
    trainer = trainer_of(plan, model)
    with torch.no_grad():
        wanted = model.eval()(**batch())
    found = trainer.eval_step(batch(), outputs="global")
    assert {"logits", "hidden.0", "hidden.1"} <= set(found.outputs)
    close(found.loss, wanted.loss)
    close(found.outputs["logits"], wanted.logits)
    close(found.outputs["hidden.1"], wanted.hidden[1])


class Parted(nn.Module):
    """Returns all of what a call gives several of; the loss reads one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h, steps = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = torch.tanh(self.linear(x[:, t]) + self.inner(h))
            steps.append(h)
        kept, left = steps[-1].chunk(2, -1)
        most = kept.topk(2)
        return {"loss": most.values.pow(2).mean(), "steps": steps, "left": left, "indices": most.indices}


def test_parts_that_the_loss_does_not_read_are_outputs() -> None:
    torch.manual_seed(0)
    model, inputs = Parted().double(), {"x": torch.randn(8, 10, 8, dtype=torch.float64)}
    captured = capture(model, inputs, precision="fp64", loss="loss")
    with torch.no_grad():
        wanted = model.eval()(**inputs)
    for seed in range(2):
        found = trainer_of(plan_of(captured, seed), model).eval_step(inputs, outputs="global")
        close(found.loss, wanted["loss"])
        assert torch.equal(found.outputs["indices"], wanted["indices"])
        close(found.outputs["left"], wanted["left"])
        for t, step in enumerate(wanted["steps"]):
            close(found.outputs[f"steps.{t}"], step)


@pytest.mark.parametrize("seed", [3])
def test_what_runs_is_what_was_predicted(seed: int) -> None:
    small, captured = gpt2()
    plan = plan_of(captured, seed)
    trainer = trainer_of(plan, small.model)
    trainer.step(small.batch)
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)
    found = trainer.eval_step(small.batch, outputs="global")
    (predicted,) = lower_evaluation(plan, ("logits",))
    walk = MemoryWalk(predicted)
    peak = max(walk.advance(step).peak for step in predicted.steps)
    for executor in trainer.evaluators:
        assert [e.key for e in executor.account.entries] == [e.key for e in entries(predicted)]
        assert 1.0 <= peak / executor.account.ledger.peak_bytes <= 1.02
    training = lower(plan)[0]
    walk = MemoryWalk(training)
    assert peak < max(walk.advance(step).peak for step in training.steps)
    model = copy.deepcopy(small.model).eval()
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in trainer.params().items():
            named[name].copy_(value)
        wanted = model(**small.batch)
    assert float(found.loss) == pytest.approx(float(wanted.loss), rel=1e-6)  # its loss is float32
    torch.testing.assert_close(found.outputs["logits"], wanted.logits, rtol=1e-10, atol=1e-12)


def test_a_training_step_does_not_pay_for_outputs() -> None:
    class Bare(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, y)["loss"]  # type: ignore[return-value]

    torch.manual_seed(3)
    inputs = {"x": torch.zeros(8, 8), "y": torch.zeros(8, dtype=torch.int64)}
    bare = capture(Bare().train(), inputs, precision="fp64")
    mine = program()
    assert [kind.graph for kind in mine.kinds] == [kind.graph for kind in bare.kinds]
    assert lower(plan_of(mine, 1))[0].steps == lower(plan_of(bare, 1))[0].steps


def test_nothing_backward_or_random_is_in_an_evaluation() -> None:
    plan = plan_of(program(), 3)
    (lowered,) = lower_evaluation(plan, ("logits",))
    blocks = [block for name, block in lowered.blocks.items() if name.endswith(".E")]
    targets = {instr.target for block in blocks for instr in block.instrs}
    backward = {op.target for kind in plan.program.kinds for op in kind.graph.ops if op.phase is Phase.BACKWARD}
    forward = {op.target for kind in plan.program.kinds for op in kind.graph.ops if op.phase is Phase.FORWARD}
    assert not targets & (backward - forward)
    assert "paraplan.dropout" not in targets
    assert not any(block.saved for block in lowered.blocks.values())
    assert lowered.grads == {}


def test_outputs_that_cannot_be_are_refused() -> None:
    plan = next(plan for plan in (plan_of(program(), seed) for seed in range(20)) if plan.num_microbatches > 1)
    trainer = trainer_of(plan, net())
    with pytest.raises(
        ConstraintError, match=r"returns no probe .*it returns hidden|returns no probe .*it returns logits"
    ):
        trainer.eval_step(batch(), outputs="global", names=["probe"])
    with pytest.raises(PlanMismatchError, match="say 'global', 'local' or None"):
        trainer.eval_step(batch(), outputs="all")  # type: ignore[arg-type]
