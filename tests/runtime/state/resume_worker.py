"""What each rank of the test of resumed runs runs: `resume_worker.py <folder>`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

sys.path.insert(0, str(Path(__file__).parents[3]))

import paraplan as pp
from paraplan.ir.errors import PlanMismatchError
from paraplan.runtime.trainer import Trainer
from paraplan.runtime.transport.launch import init_distributed, leave_job


class Net(nn.Module):
    """Dropout, a buffer that is written, and what no training step reads or writes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, width), nn.Linear(width, 16), nn.Linear(16, 6)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()))
        self.never, self.only = nn.Linear(4, 3), nn.Linear(6, 6)
        self.again = self.never
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("idle", torch.randn(3))
        self.register_buffer("cached", torch.randn(3), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.seen += 1
        x = self.drop(torch.tanh(self.a(x))) * self.scale
        x = self.c(torch.relu(self.b(x)))
        return F.cross_entropy(x if self.training else self.only(x), y)


def net(unread: float = 0.0) -> Net:
    """The model; to everything that no step reads, something is added."""
    torch.manual_seed(3)
    model = Net().double().train()
    with torch.no_grad():
        for x in (*model.never.parameters(), *model.only.parameters(), model.frozen, model.idle):
            x += unread
    return model


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(0, 6, (8,), generator=generator)}


def example() -> dict[str, Tensor]:
    return {"x": torch.zeros(8, 8), "y": torch.zeros(8, dtype=torch.int64)}


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.05], total_steps=12),
    "warm-up": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 8)),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=1.0, min_lr=[1e-4, 1e-5]),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.MultiStepLR(o, [2, 4])], milestones=[3]
    ),
}
GROUPS = [{"match": "bias$", "weight_decay": 0.0, "lr": 0.02}]
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "cosine": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "one cycle": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "warm-up": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "plateau": (torch.optim.AdamW, {"lr": 0.01}),
    "sequential": (torch.optim.RMSprop, {"lr": 0.01}),
}
PLANS: dict[str, dict[str, Any]] = {
    "sharded": {"dp": 2, "zero": 3},
    "states on the host": {"dp": 2, "zero": 1, "offload_states": "host"},
    "tensors parallel": {"tp": 2},
    "stages": {"pp": 2, "microbatches": 2},
}


@functools.cache
def planned(name: str) -> pp.Plan:
    return pp.compile(net().float(), "local:2", example_inputs=example(), precision="fp64", **PLANS[name])


def made(name: str, kind: str, seed: int) -> tuple[Trainer, torch.optim.Optimizer, Any]:
    trainer = planned(name).executable(net(seed), seed=seed)
    cls, options = KINDS[kind]
    optimizer = trainer.optimizer(cls, groups=GROUPS, **options)
    return trainer, optimizer, SCHEDULES[kind](optimizer)


def go(trainer: Trainer, optimizer: torch.optim.Optimizer, schedule: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = trainer.step(batch(step))
        optimizer.step()
        schedule.step(*([loss] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def resumed(folder: Path, kind: str) -> None:
    """A run that another plan resumes after three steps, and one that goes on."""
    names = list(PLANS)
    first = list(KINDS).index(kind) % len(names)
    trainer, optimizer, schedule = made(names[first], kind, 5)
    go(trainer, optimizer, schedule, range(3))
    at = folder / kind.replace(" ", "_")
    trainer.save(at, optimizer, schedule)
    full = trainer.full_training_state(optimizer, schedule)
    if trainer.rank == 0:
        torch.save(full, folder / f"{at.name}.pt")
    wanted = go(trainer, optimizer, schedule, range(3, 6))
    values = trainer.full_state_dict()
    if trainer.rank == 0:
        torch.save({"losses": wanted, "values": values}, folder / f"{at.name}.wanted.pt")
    rates = [group["lr"] for group in optimizer.param_groups]
    for more in (1, 2):
        name = names[(first + more) % len(names)]
        for whole in (False, True)[: 1 + (name == "stages")]:
            other, mine, planner = made(name, kind, 77)
            if whole:
                other.load_full_training_state(full, mine, planner)
            else:
                other.resume(at, mine, planner)
            found = go(other, mine, planner, range(3, 6))
            assert all(abs(a - b) <= 1e-9 * abs(b) for a, b in zip(found, wanted, strict=True)), (kind, name, found)
            here = other.full_state_dict()
            assert all(torch.allclose(here[key], x, rtol=1e-9, atol=1e-12) for key, x in values.items()), (kind, name)
            net().load_state_dict(here)
            assert other.steps_done == 6
            assert {group["lr"] for group in mine.param_groups} == set(rates)


def refused(folder: Path) -> None:
    """What does not belong together, by name."""
    trainer, optimizer, schedule = made("sharded", "cosine", 5)

    def says(words: str, act: Callable[[], object]) -> None:
        try:
            act()
        except PlanMismatchError as fault:
            assert words in str(fault), fault
            return
        raise AssertionError(words)

    at = folder / "cosine"
    says("0 schedulers were given", lambda: trainer.resume(at, optimizer))
    says("none was given", lambda: trainer.resume(at))
    says("has no checkpoint", lambda: trainer.resume(folder / "nowhere", optimizer, schedule))
    wide = pp.compile(Net(32), "local:2", example_inputs=example(), precision="fp64", dp=2).executable(Net(32).double())
    other = wide.optimizer(torch.optim.AdamW, groups=GROUPS)
    says("parameter a.weight of shape (16, 8) where the plan has (32, 8)", lambda: wide.resume(at, other))
    alone = trainer.optimizer(torch.optim.AdamW)
    fresh = lr_scheduler.CosineAnnealingLR(alone, 10)
    says("saved in 2 groups of other options (lr: ", lambda: trainer.resume(at, alone, fresh))


def by_hand(folder: Path) -> None:
    """The parts one by one, through torch.distributed.checkpoint: groups, steps and seed come with the optimizer."""
    dcp = torch.distributed.checkpoint
    trainer, optimizer, schedule = made("sharded", "cosine", 5)
    go(trainer, optimizer, schedule, range(3))
    dcp.save(
        {"model": trainer.state_dict(), "optimizer": trainer.optimizer_state_dict(optimizer)},
        checkpoint_id=folder / "parts",
    )
    other, mine, planner = made("tensors parallel", "cosine", 77)
    state = {"model": other.state_dict(), "optimizer": other.optimizer_state_dict(mine, create=True)}
    dcp.load(state, checkpoint_id=folder / "parts")
    other.load_state_dict(state["model"])
    other.load_optimizer_state_dict(mine, state["optimizer"])
    planner.load_state_dict(schedule.state_dict())
    assert torch.equal(other.full_state_dict()["only.weight"], net(5).only.weight)
    wanted, found = go(trainer, optimizer, schedule, range(3, 6)), go(other, mine, planner, range(3, 6))
    assert all(abs(a - b) <= 1e-9 * abs(b) for a, b in zip(found, wanted, strict=True)), (found, wanted)


def main() -> None:
    folder = Path(sys.argv[1])
    rank, _ = init_distributed("gloo", timeout_s=60)
    torch.set_num_threads(1)
    for kind in KINDS:
        resumed(folder, kind)
    refused(folder)
    by_hand(folder)
    (folder / f"done{rank}").touch()
    leave_job()


if __name__ == "__main__":
    from tests.runtime.state import resume_worker  # a model is told by the module of its class too

    resume_worker.main()
