"""A chain of layers of different sizes, and clusters of small groups that differ."""

from __future__ import annotations

import functools
import itertools

import msgspec
import torch
from torch import Tensor, nn

from paraplan.capture import capture
from paraplan.ir.machine.cluster import ClusterSpec, NodeGroup, check_cluster
from paraplan.ir.machine.device import Link
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.planner.assemble import Job

(LOCAL,) = ClusterSpec.local(2).groups
WIDTHS = (24, 96, 48, 160, 32, 64, 8)


class Chain(nn.Module):
    """Layers of different sizes, one after another."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(times * a, times * b) for a, b in itertools.pairwise(WIDTHS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * x).mean()


def chain() -> Chain:
    torch.manual_seed(0)
    return Chain().double()


def rows() -> dict[str, Tensor]:
    return {"x": torch.randn(256, WIDTHS[0], dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


@functools.cache
def chained() -> Program:
    return capture(chain(), rows(), precision="fp64")


def group(speed: float, devices: int = 1, memory_bytes: int = 4 << 30, link: float = 1.0) -> NodeGroup:
    """A node of CPU processes so many times as fast as `ClusterSpec.local`'s, their link likewise."""
    device = msgspec.structs.replace(
        LOCAL.device,
        kind=f"cpu x{speed:g}",
        memory_bytes=memory_bytes,
        reserves=(),
        launch_s=1e-7,
        flops_per_s={dtype: rate * speed / 25 for dtype, rate in LOCAL.device.flops_per_s.items()},
        memory_bytes_per_s=LOCAL.device.memory_bytes_per_s * speed,
    )
    in_node = Link(bytes_per_s=LOCAL.in_node.bytes_per_s * link, latency_s=1e-6)
    return msgspec.structs.replace(LOCAL, device=device, devices_per_node=devices, in_node=in_node)


def cluster(*groups: NodeGroup, between: float = 1e9) -> ClusterSpec:
    slow = Link(bytes_per_s=between, latency_s=1e-6)
    return check_cluster(ClusterSpec(name="mixed", groups=groups, between_nodes=slow))


def job(on: ClusterSpec, of: Program) -> Job:
    return Job(of, on, OPTIMIZERS["adamw"], ModelRef(display="chain"), {})


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s
