"""What each rank of the two-process test of states on the host runs: `states_worker.py <folder>`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parents[2]))

from paraplan.api import Plan
from paraplan.codegen import build_modules
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.runtime.in_process import InProcessTrainer
from paraplan.runtime.trainer import Trainer
from paraplan.runtime.transport.launch import init_distributed, leave_job
from tests.runtime import plans


def planned(every: int, tiers: tuple[str, ...] = ("host",)) -> Plan:
    """A random plan, every so-manieth parameter's states on tiers, and it too where it lies as they do; 0: none."""
    plan, _ = plans.planned(plans.SEEDS[0])
    (stage,) = plan.stages
    params = dict(stage.params)
    for index, (name, layouts) in enumerate(list(params.items())[::every] if every else ()):
        tier = tiers[index % len(tiers)]
        stored = tier if layouts.stored == layouts.state else ""
        fetched = tier == "disk" and index % 3 == 0
        params[name] = msgspec.structs.replace(
            layouts,
            state_tier=tier,
            stored_tier=stored,
            fetched=fetched,
            ahead=False,
            grad_tier=tier if tier == "disk" and index % 4 != 1 else "",
        )
    made = msgspec.structs.replace(plan, stages=(msgspec.structs.replace(stage, params=params),), bundle_bytes=4096)
    return Plan(made, verify_plan(made))


def step(trainer: Trainer, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    loss = trainer.step(plans.batch(number))
    trainer.clip_grad_norm_(0.1)
    if trainer.record:
        state = trainer.state
        with trainer.transport.tracker.updating(state.executor.account.ledger, state.homes()):
            optimizer.step()
    else:
        optimizer.step()
    optimizer.zero_grad()
    return loss


def updated_late(folder: Path) -> None:
    """Half of the parameters one step late from the second step on, against the same in one process; then a checkpoint
    with gradients held goes on as the run does."""
    whole = planned(2).data
    (stage,) = whole.stages
    params = {name: msgspec.structs.replace(x, stored_tier="") for name, x in stage.params.items()}
    stages = (msgspec.structs.replace(stage, params=params),)
    made = msgspec.structs.replace(whole, stages=stages, delayed_update=1)
    plan = Plan(made, verify_plan(made))

    def new() -> tuple[Trainer, torch.optim.Optimizer]:
        trainer = plan.executable(plans.net())
        return trainer, trainer.optimizer(torch.optim.AdamW, lr=1e-2)

    trainer, optimizer = new()
    local = InProcessTrainer(plan.data, plan.programs, [build_modules(p) for p in plan.programs], plans.net())
    for number in range(5):
        trainer.record = number == 3
        loss, wanted = step(trainer, optimizer, number), local.step(plans.batch(number))
        assert torch.allclose(loss, wanted, rtol=1e-12), (loss, wanted)
        local.clip_grad_norm_(0.1)
        local.apply_optimizer(torch.optim.AdamW, lr=1e-2)
        if trainer.record:
            assert [entry.key for entry in trainer.entries] == [entry.key for entry in entries(plan.programs[0])]
            assert trainer.tier_peak_bytes == local.tier_peak_bytes(trainer.rank)
            assert 1.0 <= plan.simulate().peak_bytes[0] / trainer.peak_bytes <= 1.001
    trainer.record = False
    assert trainer.state.is_due
    saved = {"model": trainer.state_dict(), "optimizer": trainer.optimizer_state_dict(optimizer)}
    assert not trainer.state.is_due
    dcp.save(saved, checkpoint_id=folder / "late")
    local.flush()
    named, held = local.params(), trainer.full_state_dict()
    assert all(torch.allclose(named[name], held[name], rtol=1e-10) for name in named)
    other, theirs = new()
    state = {"model": other.state_dict(), "optimizer": other.optimizer_state_dict(theirs, create=True)}
    dcp.load(state, checkpoint_id=folder / "late")
    other.load_state_dict(state["model"])
    other.load_optimizer_state_dict(theirs, state["optimizer"])
    assert other.steps_done == trainer.steps_done
    for number in range(5, 8):
        for each in ((trainer, optimizer), (other, theirs)):
            step(*each, number)
    wanted_now = trainer.full_state_dict()
    assert all(torch.equal(x, wanted_now[name]) for name, x in other.full_state_dict().items())


def main() -> None:
    folder = Path(sys.argv[1])
    rank, _ = init_distributed("gloo", timeout_s=60)
    torch.set_num_threads(1)
    plan = planned(2, ("host", "disk"))
    every = [planned(1, tiers).data.stages[0].params for tiers in (("host", "disk"), ("disk", "host"))]
    assert {layouts.stored_tier for params in every for layouts in params.values()} == {"", "host", "disk"}
    updated_late(folder)
    trainer = plan.executable(plans.net(), paced=True)
    local = InProcessTrainer(plan.data, plan.programs, [build_modules(p) for p in plan.programs], plans.net())
    optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-2)
    predicted = [entry.key for entry in entries(plan.programs[0])]
    for number in range(4):
        trainer.record = number % 2 == 1
        loss, wanted = step(trainer, optimizer, number), local.step(plans.batch(number))
        assert torch.allclose(loss, wanted, rtol=1e-12), (loss, wanted)
        local.clip_grad_norm_(0.1)
        local.apply_optimizer(torch.optim.AdamW, lr=1e-2)
        if trainer.record:
            assert [entry.key for entry in trainer.entries] == predicted
            assert trainer.tier_peak_bytes == plan.simulate().tier_peak_bytes == local.tier_peak_bytes(rank)
            assert 1.0 <= plan.simulate().peak_bytes[0] / trainer.peak_bytes <= 1.001
    named, held = local.params(), trainer.full_state_dict()
    assert all(torch.allclose(named[name], held[name], rtol=1e-10) for name in named)
    saved = {"model": trainer.state_dict(), "optimizer": trainer.optimizer_state_dict(optimizer)}
    dcp.save(saved, checkpoint_id=folder / "c")
    trainer.record = False
    for every, tier in ((0, "host"), (1, "host"), (1, "disk")):  # all on the device, on the host, on disk
        other = planned(every, (tier,)).executable(plans.net())
        theirs = other.optimizer(torch.optim.AdamW, lr=1e-2)
        state = {"model": other.state_dict(), "optimizer": other.optimizer_state_dict(theirs, create=True)}
        dcp.load(state, checkpoint_id=folder / "c")
        other.load_state_dict(state["model"])
        other.load_optimizer_state_dict(theirs, state["optimizer"])
        same = other.full_state_dict()
        assert all(torch.equal(value, same[name]) for name, value in held.items())
        step(other, theirs, 4)
        if tier == "disk":
            step(trainer, optimizer, 4)
            gone_on = trainer.full_state_dict()
            assert all(torch.allclose(x, other.full_state_dict()[name], rtol=1e-10) for name, x in gone_on.items())
    (folder / f"done{rank}").touch()
    leave_job()


if __name__ == "__main__":
    main()
