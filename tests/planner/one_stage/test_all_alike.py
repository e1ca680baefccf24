"""Several devices are never planned to be slower than one of them, of which each may do all of the work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paraplan.capture import capture
from paraplan.ir.model.program import Program
from paraplan.planner.constraints import Constraints
from paraplan.planner.one_stage import solved_meshes
from paraplan.planner.search import search
from tests.runtime.pipelines import job_of


class Unrolled(nn.Module):
    """Many small ops and many small parameters: every message is dear."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.last = nn.ModuleList(nn.Linear(24, 12) for _ in range(3)), nn.Linear(12, 20)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h, outs = torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            now = x[:, step]
            z, r, n = (gate(torch.cat([now, h], -1)) for gate in self.gates)
            h = (1 - torch.sigmoid(z)) * h + torch.sigmoid(z) * torch.tanh(torch.sigmoid(r) * n)
            outs.append(h)
        return F.cross_entropy(self.last(torch.stack(outs, 1)).flatten(0, 1), labels.flatten())


def unrolled() -> Program:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 6, 12), "labels": torch.randint(20, (8, 6))}
    return capture(Unrolled(), batch, precision="fp32")


def test_four_devices_take_no_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    program, pins = unrolled(), Constraints(mesh=(4,))
    alone_s = search(job_of(program, 1), Constraints(), certify=False).step_s
    found = search(job_of(program, 4), pins)
    assert found.step_s <= alone_s * (1 + 1e-9)
    assert sum("each of the 4 devices does all of the work" in note for note in found.plan.notes) == 1
    known = found.plan.certificate
    assert known is not None and 0 < known.bound_s <= found.step_s
    free = search(job_of(program, 4), Constraints()).plan
    assert free.prediction is not None and free.prediction.step_s <= found.step_s
    assert len(set(free.notes)) == len(free.notes)
    monkeypatch.setattr(solved_meshes, "all_alike", lambda *_: [])
    assert search(job_of(program, 4), pins, certify=False).step_s > alone_s, "what divides it is found by its work"
