"""Several devices are never planned to be slower than one of them, of which each may do all of the work."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.machine.mesh import R, parse_layout
from paraplan.ir.model.program import Program
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import SolveLimits
from paraplan.planner.one_stage import all_alike as all_alike_module
from paraplan.planner.one_stage import solved_meshes
from paraplan.planner.one_stage.all_alike import all_alike
from paraplan.planner.pipeline.meshes import candidate_meshes
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


@pytest.mark.parametrize("name", ["2xH100", "2xH100:2"])
def test_launches_are_as_many_however_work_is_divided(name: str) -> None:
    """Kernels of a few microseconds take as long on a part of the rows; several nodes have more meshes."""
    job = replace(job_of(tiny(), 1), cluster=parse_cluster(name))
    alone_s = search(replace(job, cluster=parse_cluster("1xH100")), Constraints(), certify=False).step_s
    found = search(job, Constraints(), certify=False)
    assert found.step_s <= alone_s * (1 + 1e-9)
    for pins in (Constraints(dp=job.cluster.num_devices), Constraints(mesh=(job.cluster.num_devices,))):
        open_s = search(job, pins, certify=False).step_s
        for zero in range(4):
            given = msgspec.structs.replace(pins, mesh=None, dp=job.cluster.num_devices, zero=zero)
            assert open_s <= search(job, given, certify=False).step_s * (1 + 1e-9)


def tiny() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.LayerNorm(24), nn.Linear(24, 8), nn.GELU(), nn.Linear(8, 4))
    batch = {"input": torch.randn(8, 16), "labels": torch.randint(4, (8,))}
    return capture(Classified(model), batch, precision="fp32")


class Classified(nn.Module):
    """A network with its loss."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.of = of

    def forward(self, input: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.of(input), labels)


def test_all_nodes_may_be_alike_and_their_devices_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links inside nodes are as ever, products are long."""
    monkeypatch.setattr(all_alike_module, "WAITS", 0.0)
    with torch.device("meta"):
        model = Classified(nn.Sequential(nn.Linear(4096, 8192), nn.ReLU(), nn.Linear(8192, 4096)))
        batch = {"input": torch.empty(4096, 4096), "labels": torch.zeros(4096, dtype=torch.int64)}
    job = replace(job_of(capture(model, batch, precision="bf16"), 1), cluster=parse_cluster("2xH100:2"))
    limits = SolveLimits(time_s=20.0, memory_bytes=1e12, known_s=1.0)
    (mesh,) = candidate_meshes(job, Constraints(mesh=(2, 2)))
    for in_node in (False, True):
        (found,) = all_alike(job, mesh, Constraints(), limits, [], in_node)
        axes = [[parse_layout(text)[axis] for text in found.plan.stages[0].batch.values()] for axis in (0, 1)]
        assert set(axes[0]) == {R} and (set(axes[1]) == {R}) == in_node
    assert all_alike(job, mesh, Constraints(), replace(limits, known_s=1e-6), [], False) == [], "slower than known"
    assert all_alike(job, mesh, Constraints(dp=2, tp=2), limits, [], False) == [], "somebody says how to divide"
