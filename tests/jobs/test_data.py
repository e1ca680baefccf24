"""Random batches hold what the model's own examples say can be there."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import paraplan
from paraplan.jobs.data import RandomBatches
from paraplan.jobs.models import Made

SIZES = (20, 50, 3)


class Tables(nn.Module):
    """A table for each column of ids; labels are counted from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 8) for size in SIZES)
        self.out = nn.Linear(8, 5)

    def forward(self, ids: Tensor, labels: Tensor, order: Tensor) -> Tensor:
        rows = torch.stack([table(ids[:, column]) for column, table in enumerate(self.tables)], 1)
        return nn.functional.cross_entropy(self.out(rows[:, order].sum(1)), labels - 1, ignore_index=-101)


def examples() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randint(0, size, (8,), generator=generator) for size in SIZES], 1)
    labels = torch.randint(1, 6, (8,), generator=generator)
    labels[0] = -100
    return {"ids": ids, "labels": labels, "order": torch.tensor([2, 0, 1])}


def test_every_column_has_its_own_range() -> None:
    given = examples()
    plan = paraplan.compile(Tables(), "local:1", example_inputs=given, batch_dims={"order": None})
    batches = RandomBatches(plan.data, Made(Tables(), given), seed=0)
    drawn = [batches(step) for step in range(50)]
    ids = torch.cat([batch["ids"] for batch in drawn])
    assert torch.equal(ids.amax(0), given["ids"].amax(0)) and torch.equal(ids.amin(0), given["ids"].amin(0))
    assert len({tuple(batch["ids"].flatten().tolist()) for batch in drawn}) == 50
    assert all(torch.equal(batch["order"], given["order"]) for batch in drawn)
    assert all(torch.equal(batches(step)["ids"], drawn[step]["ids"]) for step in range(3))


def test_labels_counted_from_one_and_none_but_ignored_ones() -> None:
    given = examples()
    plan = paraplan.compile(Tables(), "local:1", example_inputs=given, batch_dims={"order": None})
    given["labels"] = given["labels"].clamp(min=1)
    labels = torch.cat([RandomBatches(plan.data, Made(Tables(), given), seed=0)(step)["labels"] for step in range(20)])
    assert (int(labels.min()), int(labels.max())) == (1, int(given["labels"].max()))
    given["labels"] = torch.full((8,), -100)
    assert (RandomBatches(plan.data, Made(Tables(), given), seed=0)(0)["labels"] == -100).all()
