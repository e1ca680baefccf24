"""Frozen parameters and adapters: no gradient, no state, a shorter backward; what is trained equals plain training."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import paraplan as pp
from benchmarks.zoo.adapters import adapted_gpt2
from benchmarks.zoo.language import transformer
from benchmarks.zoo.small import Small
from paraplan.codegen import build_modules
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.execution.name import Role
from paraplan.ir.execution.rank_program import StepKind
from paraplan.ir.model.graph import Phase
from paraplan.ir.model.program import trained_params
from paraplan.runtime.in_process import InProcessTrainer
from tests.captures import compiled


@pytest.fixture(scope="module")
def small() -> Small:
    return adapted_gpt2(0.0)


@functools.cache
def whole() -> tuple[Small, pp.Plan]:
    """Nothing frozen, and its data-parallel plan."""
    made = transformer("gpt2", 0.0)
    return made, planned(made, dp=2, zero=0)


def planned(small: Small, **pins: object) -> pp.Plan:
    return compiled(small.model, "local:2", alike=False, example_inputs=small.batch, precision="fp64", **pins)


def test_the_backward_stops_at_the_lowest_adapter(small: Small) -> None:
    plan = planned(small, dp=2, zero=0)
    program, (rank,) = plan.data.program, plan.programs
    trained = trained_params(program)
    assert trained
    assert all("lora_" in name for name in trained)
    assert set(rank.grads) == set(trained) == {v.source for v in rank.outer.values() if v.role is Role.STATE}
    assert rank.optimizer_bytes == sum(2 * program.params[name].spec.nbytes + 4 for name in trained)
    first = next(index for index, s in enumerate(program.segments) if any("h.1." in name for name in s.params))
    below = set(range(first))
    called = {step.segment for step in rank.steps if step.kind is StepKind.CALL and "B" in step.action}
    assert len(below) >= 2
    assert not below & called
    full = whole()[1].data.program
    last, last_full = program.kinds[program.segments[-1].kind], full.kinds[full.segments[-1].kind]

    def backward_products(kind: object) -> int:
        ops = kind.graph.ops  # type: ignore[attr-defined]
        return sum("linear" in op.target or "mm" in op.target for op in ops if op.phase is Phase.BACKWARD)

    assert backward_products(last) == backward_products(last_full) - 1  # the head's weight gradient


def test_frozen_weights_cost_what_they_weigh(small: Small) -> None:
    frozen, (trained, full) = planned(small, dp=2, zero=0), whole()
    params = sum(p.numel() * 8 for p in trained.model.parameters())
    saved = max(full.prediction.peak_bytes) - max(frozen.prediction.peak_bytes)
    assert saved > 2 * params  # Adam's two states of the trunk, at the least


@pytest.mark.parametrize("pins", [{"dp": 2, "zero": 3}, {"tp": 2, "microbatches": 2}])
def test_training_equals_plain_training(small: Small, pins: dict[str, object]) -> None:
    plan = planned(small, **pins)
    modules = [build_modules(p) for p in plan.programs]
    trainer = InProcessTrainer(plan.data, plan.programs, modules, small.model)
    model = copy.deepcopy(small.model)
    chosen = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(chosen, lr=1e-2)
    before = {name: value.clone() for name, value in trainer.params().items()}
    for _ in range(2):
        wanted = model(**small.batch).loss
        wanted.backward()
        assert float(trainer.step(small.batch)) == pytest.approx(wanted.item(), rel=1e-6)  # its loss is float32
        trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2)
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(2):
            assert [e.key for e in trainer.entries(rank)] == [e.key for e in entries(plan.programs[0])]
    assert all("lora_" in name for name in trainer.ranks[0].params)
    assert sum(len(g["params"]) for g in trainer.optimizers[0].param_groups) == len(chosen)
    after, named = trainer.params(), dict(model.named_parameters())
    for name, value in after.items():
        if "lora_" in name:
            assert not torch.equal(value, before[name])
            torch.testing.assert_close(value, named[name].detach(), rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(value, before[name])
