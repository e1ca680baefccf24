"""Scalars that forward updates, read before and after, over microbatches and where their readers are executed again."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor, nn

from paraplan.capture import capture
from paraplan.ir.plan import Plan
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search
from tests.against_eager import eager_error, loss_by
from tests.runtime.pipelines import job_of

X = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(3))}


class Layers(nn.Module):
    """Two linears, and what is between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def between(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(torch.relu(self.first(x)))).pow(2).mean()


class Counted(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(()))

    def between(self, h: Tensor) -> Tensor:
        self.count.mul_(1.5)
        return h * torch.exp(-self.count)


class Observed(Layers):
    """A running maximum over the batch, of all or of each channel, that scales what is seen or does not."""

    def __init__(self, shape: tuple[int, ...], scales: bool) -> None:
        super().__init__()
        self.scales = scales
        self.register_buffer("peak", torch.zeros(shape))

    def between(self, h: Tensor) -> Tensor:
        seen = h.detach().abs()
        self.peak = torch.maximum(self.peak, seen.amax(0) if self.peak.dim() else seen.max())
        return h / (1 + self.peak) if self.scales else h


MODELS = {
    "counted": Counted,
    **{
        f"{'a channel' if shape else 'all'}, {'read' if scales else 'unread'}": (
            lambda shape=shape, scales=scales: Observed(shape, scales)
        )
        for shape in ((), (8,))
        for scales in (False, True)
    },
}


def again(plan: Plan) -> Plan:
    """All that a forward makes and hands to nobody is made again."""

    def choices(stage: int) -> tuple[object, ...]:
        found = []
        for choice in plan.stages[stage].choices:
            kind = plan.program.kinds[choice.kind]
            made = [op for op in kind.graph.ops if op.phase.value == "F" and not {*op.outs} & {*kind.outputs}]
            fates = {out: "recompute" for op in made for out in op.outs if out is not None}
            found.append(msgspec.structs.replace(choice, activations=fates))
        return tuple(found)

    stages = tuple(msgspec.structs.replace(each, choices=choices(at)) for at, each in enumerate(plan.stages))
    return msgspec.structs.replace(plan, stages=stages)


@pytest.mark.parametrize("name", MODELS)
def test_written_scalars_are_as_in_eager(name: str) -> None:
    program = capture(MODELS[name](), X, precision="fp64")
    one, two = (
        search(job_of(program, devices, "momentum"), Constraints(microbatches=2, **pins), certify=False).plan
        for devices, pins in ((1, {}), (2, {"pp": 2}))
    )
    for plan in (one, again(one), two):
        assert eager_error(plan, MODELS[name](), X, loss_by(None)) <= 1e-9
