"""What each rank of the pipeline tests runs (through `spawn_local`): `pipeline_worker.py <folder> <plan> ...`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parents[2]))

from paraplan.api import Plan
from paraplan.codegen import build_modules
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.jobs.checking.check import max_error
from paraplan.runtime.in_process import InProcessTrainer
from paraplan.runtime.trainer import Trainer
from paraplan.runtime.transport.launch import init_distributed, leave_job
from tests.runtime.web import batch, web


def trained(plan: Plan) -> Trainer:
    """Some steps beside the in-process transport: equal to the bit or nearly, and as predicted."""
    data = plan.data
    trainer = plan.executable(web().double())
    modules = [build_modules(each) for each in plan.programs]
    local = InProcessTrainer(data, plan.programs, modules, web().double(), build=build_modules)
    optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(3):
        trainer.record = step == 1
        loss, wanted = trainer.step(batch()), local.step(batch())
        assert torch.allclose(loss, wanted, rtol=1e-12)
        assert all(torch.allclose(trainer.metrics[name], x, rtol=1e-12) for name, x in local.metrics.items())
        assert torch.allclose(trainer.clip_grad_norm_(0.1), local.clip_grad_norm_(0.1), rtol=1e-12)
        if trainer.record:
            tracker = trainer.transport.tracker
            with tracker, tracker.booking(trainer.state.executor.account.ledger):
                optimizer.step()
            program = plan.programs[data.schedule.rank_class[trainer.rank]]
            assert [each.key for each in trainer.entries] == [each.key for each in entries(program)]
            peak = data.prediction.peak_bytes[data.schedule.rank_class[trainer.rank]]
            assert 0.98 * peak <= trainer.peak_bytes <= peak, (trainer.peak_bytes, peak)
        else:
            optimizer.step()
        optimizer.zero_grad()
        local.apply_optimizer(torch.optim.AdamW, lr=1e-2)
    trainer.record = False
    full = trainer.full_state_dict()
    assert max_error(full, {**local.params(), "seen": local.buffers()["seen"]})[0] <= 1e-9
    assert torch.allclose(trainer.eval_step(batch()).loss, local.eval_step(batch()).loss, rtol=1e-12)
    return trainer


def main() -> None:
    folder, *paths = map(Path, sys.argv[1:])
    rank, _ = init_distributed("gloo", timeout_s=60)
    torch.set_num_threads(1)
    plans = [Plan.load(path) for path in paths]
    trainers = [trained(plan) for plan in plans]
    dcp.save({"model": trainers[0].state_dict()}, checkpoint_id=folder / "c")
    other = plans[-1].executable(web().double())
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder / "c")
    other.load_state_dict(state["model"])
    wanted, found = trainers[0].full_state_dict(), other.full_state_dict()
    assert all(torch.equal(found[name], x) for name, x in wanted.items())
    (folder / f"done{rank}").touch()
    leave_job()


if __name__ == "__main__":
    main()
