"""Training random plans with all ranks in one process: equal to plain training, and to what was predicted."""

from __future__ import annotations

import pytest
import torch

from paraplan.cost_models.simulator.live_bytes import MemoryWalk, entries
from paraplan.ir.errors import PlanMismatchError
from paraplan.runtime.in_process import InProcessTrainer

from .plans import SEEDS, batch, eager, emitted, net, planned


def trainer_of(seed: int) -> InProcessTrainer:
    plan, programs = planned(seed)
    return InProcessTrainer(plan, programs, emitted(programs), net())


@pytest.mark.parametrize("seed", SEEDS)
def test_training_equals_plain_training(seed: int) -> None:
    trainer = trainer_of(seed)
    model, losses, norms = eager(3, lambda ps: torch.optim.AdamW(ps, lr=1e-2), max_norm=0.5)
    for step in range(3):
        loss = trainer.step(batch(step))
        assert float(loss) == pytest.approx(losses[step], rel=1e-12)
        assert all(torch.equal(loss, other) for other in trainer.losses())
        norm = trainer.clip_grad_norm_(0.5)
        assert float(norm) == pytest.approx(norms[step], rel=1e-12)
        trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2)
    wanted = dict(model.named_parameters())
    found = trainer.params()
    assert set(found) == set(wanted)
    assert all(torch.allclose(found[name], wanted[name], rtol=1e-10, atol=1e-12) for name in wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_rank_does_what_was_predicted(seed: int) -> None:
    trainer = trainer_of(seed)
    _, (program,) = planned(seed)
    for step in range(2):
        trainer.step(batch(step))
        trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2)
        for rank in range(2):
            assert [entry.key for entry in trainer.entries(rank)] == [entry.key for entry in entries(program)]
    walk = MemoryWalk(program)
    predicted = max(walk.advance(step).peak for step in program.steps)
    # what kernels take inside is said by the rules; here only that nothing else is missed
    seen = trainer.ranks[0].executor.account.workspaces
    unsaid = max(
        bytes_ - program.blocks[block].instrs[index].workspace_bytes for (block, index), bytes_ in seen.items()
    )
    predicted += max(unsaid, 0)
    assert max(trainer.peak_bytes(rank) for rank in range(2)) <= predicted


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_that_are_not_recorded_change_nothing(seed: int) -> None:
    always, sometimes = trainer_of(seed), trainer_of(seed)
    for step in range(3):
        sometimes.record = step == 2
        losses = [trainer.step(batch(step)) for trainer in (always, sometimes)]
        assert torch.equal(*losses)
        grads = [trainer.grads() for trainer in (always, sometimes)]
        assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])
        if step == 1:
            assert not sometimes.entries(0)
        for trainer in (always, sometimes):
            trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2)
    for rank in range(2):
        assert [entry.key for entry in sometimes.entries(rank)] == [entry.key for entry in always.entries(rank)]
        assert sometimes.peak_bytes(rank) == always.peak_bytes(rank)


def test_a_batch_of_another_size_is_refused() -> None:
    trainer = trainer_of(SEEDS[0])
    with pytest.raises(PlanMismatchError, match=r"\(8, 8\), the plan was made for the global batch \(4, 8\)"):
        trainer.step({name: torch.cat([value, value]) for name, value in batch().items()})
    with pytest.raises(PlanMismatchError, match="missing: \\['y'\\], unknown: \\['z'\\]"):
        trainer.step({"x": batch()["x"], "z": batch()["y"]})


def test_another_model_is_refused() -> None:
    plan, programs = planned(SEEDS[0])
    with pytest.raises(PlanMismatchError, match=r"layers.0.weight: the plan says \(8, 8\), the model has \(9, 8\)"):
        model = net()
        model.layers[0] = torch.nn.Linear(8, 9)
        InProcessTrainer(plan, programs, emitted(programs), model)


def test_parameter_groups_by_name() -> None:
    trainer = trainer_of(SEEDS[0])
    trainer.step(batch())
    groups = [{"match": r"\.bias$", "weight_decay": 0.0}]
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.5, groups=groups)
    assert [(len(g["params"]), g["weight_decay"]) for g in trainer.optimizers[0].param_groups] == [(2, 0.0), (3, 0.5)]
    with pytest.raises(PlanMismatchError, match="matches no parameter"):
        trainer_of(SEEDS[0]).apply_optimizer(torch.optim.SGD, lr=1.0, groups=[{"match": "nothing", "lr": 2.0}])
