"""Shares of a step's compute by kind of kernel add up to what the simulator says, and published plans are read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import paraplan as pp
from benchmarks.compute_shares import KINDS, SHOWN, compute_seconds, kind_of, plan_rows


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(64, 32), nn.LayerNorm(32)
        self.up, self.head = nn.Linear(32, 64), nn.Linear(64, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.relu(self.up(self.norm(self.embed(ids)))))
        return nn.functional.cross_entropy(logits.float(), ids)


@pytest.mark.parametrize("compiled", [False, True])
def test_kinds_add_up_to_the_compute(tmp_path: Path, compiled: bool) -> None:
    ids = torch.zeros(64, dtype=torch.long)
    plan = pp.compile(
        Net(), "2xH200", example_inputs={"ids": ids}, precision="bf16", dp=2, microbatches=2, compiled=compiled
    )
    found = compute_seconds(plan.data, plan.programs)
    assert sum(found.get(kind, 0.0) for kind in SHOWN) == pytest.approx(plan.simulate().compute_s)
    assert all(found[kind] > 0 for kind in ("products", "norms", "embeddings", "loss", "update"))
    assert found["chains"] > 0 if compiled else not found["chains"]
    plan.save(tmp_path / "one.json")
    assert dict(plan_rows(tmp_path, ""))["one"] == pytest.approx(found)
    assert not list(plan_rows(tmp_path, "another"))


def test_kinds_of_ops() -> None:
    kinds = {
        "paraplan.linear": "products",
        "paraplan.attention_grad": "attention",
        "paraplan.rms_norm_grad": "norms",
        "aten.sum.dim_IntList": "row sums",
        "aten._to_copy.default": "casts",
        "paraplan.embedding_grad": "embeddings",
        "paraplan.ce_grad": "loss",
        "aten.gelu.default": "elementwise",
    }
    assert {target: kind_of(target) for target in kinds} == kinds
    assert set(kinds.values()) <= set(KINDS)
