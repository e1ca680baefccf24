"""Token ids outside a table and labels outside the classes are refused, whole or split over ranks, as in eager."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import paraplan
from paraplan.ir.errors import RuntimeFailure
from paraplan.kernels import reference_kernels

ROWS, CLASSES, BATCH = 20, 10, 6


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(ROWS, 16), nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.out(self.table(ids)), labels - 1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Classifier()


def batch(**wrong: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    found = {
        "ids": torch.randint(0, ROWS, (BATCH,), generator=generator),
        "labels": torch.randint(1, CLASSES + 1, (BATCH,), generator=generator),
    }
    for name, value in wrong.items():
        found[name][-1] = value
    return found


WRONG = [
    ({"ids": ROWS}, "embedding .*id 20 is out of range"),
    ({"ids": -1}, "embedding .*id -1 is out of range"),
    ({"labels": CLASSES + 1}, "ce_target .*label 10 is out of range"),
    ({"labels": -2}, "ce_target .*label -3 is out of range"),
]


@pytest.mark.parametrize(("wrong", "says"), WRONG)
def test_a_plan_refuses_ids_and_labels_out_of_range(wrong: dict[str, int], says: str) -> None:
    with pytest.raises(IndexError):
        model()(**batch(**wrong))
    trainer = paraplan.compile(model(), "local:1", example_inputs=batch()).executable(model())
    trainer.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(RuntimeFailure, match=says):
        trainer.step(batch(**wrong))
    torch.testing.assert_close(trainer.step(batch()), model()(**batch()).detach())
    fitted = paraplan.fit(model(), batch(), "1GiB")
    with pytest.raises(RuntimeFailure, match=says):
        fitted(**batch(**wrong))


@pytest.mark.parametrize("options", [{"tp": 2}, {"dp": 2, "zero": 3}])
def test_split_plans_refuse_them_too(options: dict[str, int]) -> None:
    plan = paraplan.compile(model(), "local:2", example_inputs=batch(), **options)
    plan.check(model(), [batch(labels=-99)])
    for wrong, says in WRONG:
        with pytest.raises(RuntimeFailure, match=says):
            plan.check(model(), [batch(**wrong)])


def test_blocks_of_a_vocabulary_know_its_whole_size() -> None:
    w, logits = torch.randn(10, 4), torch.randn(3, 5)
    assert torch.equal(reference_kernels.embedding(w, torch.tensor([3, 12]), 10, 20)[0], torch.zeros(4))
    assert reference_kernels.ce_target(logits, torch.tensor([7, 1, -100]), -100, 5, 10).tolist()[1:] == [0, 0]
    for start in (0, 10):
        for wrong in (-1, 20):
            with pytest.raises(IndexError, match=f"id {wrong}"):
                reference_kernels.embedding(w, torch.tensor([3, wrong]), start, 20)
            with pytest.raises(IndexError, match=f"label {wrong}"):
                reference_kernels.ce_target(logits, torch.tensor([1, wrong, -100]), -100, start, 20)
            with pytest.raises(IndexError, match=f"id {wrong}"):
                reference_kernels.embedding_tables(torch.randn(2, 10, 4), torch.tensor([[3, wrong]]), start, 20)
