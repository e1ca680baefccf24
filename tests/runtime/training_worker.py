"""What each rank of the two-process training test runs (through `spawn_local`): `training_worker.py <folder>`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.replaying import NotedGraphs
from paraplan.api import Buckets, Plan, compile
from paraplan.capture import capture
from paraplan.codegen import build_modules
from paraplan.ir.execution.names import LOSS_SCALE
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.jobs.checking.check import max_error
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.sampling import random_plan
from paraplan.runtime.in_process import InProcessTrainer
from paraplan.runtime.trainer import Trainer
from paraplan.runtime.transport.launch import init_distributed, leave_job
from tests.runtime import dropout_net, reader

SEEDS = (1, 4)


def meta_net() -> torch.nn.Module:
    """Without dropout, so that eager is the same."""
    with torch.device("meta"):
        return dropout_net.Steady().train()


def batch(rows: int = 8) -> dict[str, torch.Tensor]:
    found = dropout_net.batch()
    return {"x": found["x"].half()[:rows], "y": found["y"][:rows]}


def planned(seed: int) -> Plan:
    program = capture(meta_net(), batch(), precision="fp16")
    job = Job(program, ClusterSpec.local(2), OPTIMIZERS["adamw"], ModelRef(display="net"), {})
    plan = random_plan(job, seed, max_microbatches=2)
    return Plan(plan, verify_plan(plan))


def prepared(trainer: Trainer):  # type: ignore[no-untyped-def]
    optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
    return optimizer, schedule, trainer.scaler(init_scale=2.0**20, growth_interval=4)


def half_precision(folder: Path) -> None:
    """fp16 from a model on meta, with a scaler, a schedule, a small batch, outputs; equal to one process."""
    plan = planned(SEEDS[0])
    trainer = plan.executable(meta_net(), seed=5)
    modules = [build_modules(p) for p in plan.programs]
    local = InProcessTrainer(plan.data, plan.programs, modules, meta_net(), 5, build=build_modules)
    optimizer, schedule, scaler = prepared(trainer)
    twin = local.scaler(init_scale=2.0**20, growth_interval=4)
    skipped = 0
    for step in range(8):
        given = batch(5 if step == 6 else 8)
        assert torch.allclose(trainer.step(given), local.step(given), rtol=1e-3)
        before = scaler.get_scale()
        for group in local.optimizers[0].param_groups if local.optimizers else ():
            assert group["lr"] == optimizer.param_groups[0]["lr"]
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        local.apply_optimizer(torch.optim.AdamW, lr=1e-2, scaler=twin)
        for each in local.optimizers:
            each.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        assert scaler.get_scale() == twin.get_scale()
        skipped += scaler.get_scale() < before
    assert 0 < skipped < 8
    assert max_error(trainer.full_state_dict(), local.params())[0] < 2e-2
    for rows in (8, 3):
        found, wanted = (each.eval_step(batch(rows), outputs="global", names=["logits"]) for each in (trainer, local))
        assert found.outputs["logits"].shape == (rows, 6)
        assert torch.allclose(found.outputs["logits"], wanted.outputs["logits"], rtol=5e-2, atol=5e-3)
    resumed(trainer, (optimizer, schedule, scaler), folder)


def resumed(trainer: Trainer, tools: tuple, folder: Path) -> None:  # type: ignore[type-arg]
    """Another plan goes on from the checkpoint as the first would have."""
    optimizer, schedule, scaler = tools
    trainer.save(folder / "c", optimizer, schedule, scaler)
    other = planned(SEEDS[1]).executable(meta_net(), seed=99)
    mine, planner, twin = prepared(other)
    other.resume(folder / "c", mine, planner, twin)
    assert other.steps_done == trainer.steps_done
    assert other.state.tensors[LOSS_SCALE].item() == scaler.get_scale()
    same = other.full_state_dict()
    assert all(torch.equal(value, same[name]) for name, value in trainer.full_state_dict().items())
    for each, parts in ((trainer, tools), (other, (mine, planner, twin))):
        each.step(batch())
        parts[2].step(parts[0])
        parts[2].update()
        parts[1].step()
        parts[0].zero_grad()
    assert parts[0].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert twin.get_scale() == scaler.get_scale()
    assert max_error(other.full_state_dict(), trainer.full_state_dict())[0] < 2e-2


def buckets() -> None:
    """Two sequence lengths, parameters sharded over both ranks."""
    shapes = [{"example_inputs": reader.ids(4, length)} for length in (6, 10)]
    made = Buckets.compile(reader.reader(), "local:2", shapes, dp=2, zero=3, precision="fp64")
    trainer, model = made.executable(reader.reader()), reader.reader()
    optimizer, mine = trainer.optimizer(torch.optim.AdamW, lr=1e-2), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for length in (6, 10, 6):
        wanted = model(**reader.ids(4, length))
        wanted.backward()
        assert torch.allclose(trainer.step(reader.ids(4, length)), wanted.detach(), rtol=1e-10)
        for each in (optimizer, mine):
            each.step()
            each.zero_grad()
    named = dict(model.named_parameters())
    assert max_error(trainer.checkpoint.full_state_dict(), named)[0] < 1e-9


def single() -> dict[str, torch.Tensor]:
    return {name: x.float() if name == "x" else x for name, x in dropout_net.batch().items()}


def replayed(level: int) -> None:
    """Steps as graphs, with collectives in them, are the steps bit for bit."""
    plan = compile(dropout_net.steady().float(), "local:2", example_inputs=single(), dp=2, zero=level, precision="bf16")
    losses = []
    for graphs in (False, True):
        trainer = plan.executable(dropout_net.steady().float(), seed=3)
        if graphs:
            trainer.replay(NotedGraphs(("_local_scalar_dense",)))
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-2)
        losses.append([])
        for step in range(6):
            losses[-1].append(trainer.step({name: x + step * (name == "x") for name, x in single().items()}).item())
            trainer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert losses[0] == losses[1] and len(set(losses[0])) == 6, losses
    assert trainer.replayed is not None and trainer.replayed.replays == {"before": 4, "after": 4}


def main() -> None:
    folder = Path(sys.argv[1])
    rank, _ = init_distributed("gloo", timeout_s=60)
    torch.set_num_threads(1)
    half_precision(folder)
    buckets()
    for level in (1, 3):
        replayed(level)
    (folder / f"done{rank}").touch()
    leave_job()


if __name__ == "__main__":
    main()
