"""A complete training run of a plan, on every rank of a job; see docs/training.md.

paraplan plan examples.train:factory local:2 --dp 2 --zero 3 -o zero3.json
torchrun --nproc-per-node 2 -m examples.train zero3.json --epochs 2 --save checkpoint
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import paraplan
from paraplan.runtime.transport.launch import leave_job

Batch = dict[str, Tensor]
BATCH, TOTAL_STEPS, WARM_UP_STEPS = 32, 64, 8


class Classifier(nn.Module):
    """Points of a plane in three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(2, 64), nn.LayerNorm(64)
        self.middle, self.down = nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor, label: Tensor) -> dict[str, Tensor]:
        """The loss, and what it is made of."""
        x = self.middle(torch.relu(self.norm(self.up(x))))
        logits = self.down(torch.relu(x))
        return {"loss": nn.functional.cross_entropy(logits, label), "logits": logits}


def factory() -> tuple[nn.Module, Batch]:
    """The model and one global batch, for the planner."""
    torch.manual_seed(0)
    return Classifier(), {"x": torch.zeros(BATCH, 2), "label": torch.zeros(BATCH, dtype=torch.int64)}


def spirals(count: int, seed: int) -> TensorDataset:
    """Three arms of a spiral."""
    random = torch.Generator().manual_seed(seed)
    label = torch.arange(count) % 3
    radius = torch.rand(count, generator=random)
    angle = 4 * radius + 2 * math.pi / 3 * label + 0.1 * torch.randn(count, generator=random)
    return TensorDataset(radius[:, None] * torch.stack([angle.cos(), angle.sin()], 1), label)


def batches(data: TensorDataset, epoch: int = -1) -> Iterator[Batch]:
    """Global batches, the same on every rank: shuffled by the epoch, or in order. The last is smaller."""
    order = torch.Generator().manual_seed(epoch) if epoch >= 0 else None
    for x, label in DataLoader(data, BATCH, shuffle=order is not None, generator=order):
        yield {"x": x, "label": label}


def warm_up_then_cosine(step: int) -> float:
    """The share of the learning rate a step has."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    return 0.5 * (1 + math.cos(math.pi * min(1.0, step / TOTAL_STEPS)))


def accuracy(trainer: paraplan.Trainer, data: TensorDataset) -> float:
    """The share of held-out points that are classified right."""
    right = 0
    for batch in batches(data):
        found = trainer.eval_step(batch, outputs="global").outputs["logits"]
        right += int((found.argmax(-1) == batch["label"]).sum())
    return right / len(data)


def parser() -> argparse.ArgumentParser:
    """The script's options."""
    found = argparse.ArgumentParser()
    found.add_argument("plan", help="A plan file.")
    found.add_argument("--epochs", type=int, default=2)
    found.add_argument("--resume", metavar="FOLDER", help="A checkpoint to go on from.")
    found.add_argument("--save", metavar="FOLDER", help="Where to write a checkpoint.")
    found.add_argument("--export", metavar="FILE", help="Where to write the parameters.")
    return found


def main() -> None:
    """Train a plan for some epochs."""
    asked = parser().parse_args()
    model, _ = factory()
    trainer = paraplan.Plan.load(asked.plan).executable(model)  # joins torchrun's job
    optimizer = trainer.optimizer(
        torch.optim.AdamW, lr=1e-2, weight_decay=0.1, groups=[{"match": r"bias$|^norm", "weight_decay": 0.0}]
    )
    schedule = LambdaLR(optimizer, warm_up_then_cosine)
    if asked.resume:
        trainer.resume(asked.resume, optimizer, schedule)

    train, held_out = spirals(500, seed=1), spirals(200, seed=2)
    begin = trainer.steps_done // math.ceil(len(train) / BATCH)
    for epoch in range(begin, begin + asked.epochs):
        total = 0.0
        for batch in trainer.shard(batches(train, epoch)):
            loss = trainer.step(batch)
            trainer.clip_grad_norm_(1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            total += float(loss)
        right = accuracy(trainer, held_out)
        if trainer.rank == 0:
            print(f"epoch {epoch}: loss {total / math.ceil(len(train) / BATCH):.4f}, held out {right:.1%} right")

    if asked.save:
        trainer.save(asked.save, optimizer, schedule)
    if asked.export:
        weights = trainer.full_state_dict(rank0_only=True)  # all ranks call it
        if trainer.rank == 0:
            torch.save(weights, asked.export)


if __name__ == "__main__":
    main()
    leave_job()  # ends torchrun's process once all ranks are through
