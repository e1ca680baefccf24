"""A plan for GPUs is checked where there are none: on the kernels that run anywhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paraplan as pp
from benchmarks.zoo import build


class Classes(nn.Module):
    """Norms, dropout and a cross entropy, which have kernels of their own on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 50)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = F.dropout(self.norm(self.embedding(ids)), 0.1)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("pins", [{"dp": 2}, {"tp": 2}, {"pp": 2, "microbatches": 4}], ids=str)
def test_classes(pins: dict[str, int]) -> None:
    torch.manual_seed(0)
    batch = {name: torch.randint(50, (8, 6)) for name in ("ids", "labels")}
    model = Classes()
    plan = pp.compile(model, "2xH100", example_inputs=batch, time_limit_s=10, **pins)
    assert any(i.kernel for program in plan.programs for block in program.blocks.values() for i in block.instrs)
    assert "2 steps" in str(plan.check(model, [batch, batch]))


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_models(name: str) -> None:
    small = build(name, 0.0)
    model = small.model.float()
    batch = {key: x.float() if x.is_floating_point() else x for key, x in small.batch.items()}
    plan = pp.compile(model, "2xH100", example_inputs=batch, time_limit_s=10, dp=2)
    assert "1 step" in str(plan.check(model, [batch]))
