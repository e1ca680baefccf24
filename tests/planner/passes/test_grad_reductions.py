"""Gradients of several microbatches reduced at once (`Plan.reduce_every`)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from paraplan.capture import capture
from paraplan.cost_models.realised_plan import realised
from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.rank_program import InstrKind
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering import lower
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.passes.grad_reductions import grouped, reducing
from paraplan.planner.passes.pass_context import PassContext
from paraplan.planner.search import search
from tests.against_eager import eager_steps, loss_by, worst_error

PINS: dict[str, dict[str, Any]] = {
    "zero2": {"dp": 2, "zero": 2},
    "zero3": {"dp": 2, "zero": 3},
    "sequence": {"tp": 2, "sp": True},
    "1f1b": {"dp": 2, "zero": 2, "pp": 2, "schedule": "1f1b"},
    "zb-h1": {"dp": 2, "zero": 3, "pp": 2, "schedule": "zb-h1"},
    "interleaved": {"dp": 2, "zero": 2, "pp": 2, "schedule": "interleaved"},
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Layers with a weight that the first and the last share, and a decay that is the same in every microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        loss = nn.functional.cross_entropy((x @ self.table.weight.t()).flatten(0, 1), labels.flatten())
        return loss + self.layers[3].down.weight.square().mean()


@pytest.fixture(scope="module")
def case() -> tuple[Model, dict[str, Tensor], Program, list[dict[str, Tensor | None]]]:
    torch.manual_seed(0)
    model = Model()
    batch = {"ids": torch.randint(0, 12, (8, 4)), "labels": torch.randint(0, 12, (8, 4))}
    wanted = list(eager_steps(model, batch, loss_by(None), 2))
    return model, batch, capture(model, batch, precision="fp64"), wanted


def planned(program: Program, pins: dict[str, Any]) -> Plan:
    ranks = pins.get("dp", 1) * pins.get("tp", 1) * pins.get("pp", 1)
    job = Job(program, ClusterSpec.local(ranks), OPTIMIZERS["momentum"], ModelRef(display="model"), {})
    plan = search(job, Constraints(microbatches=4, **pins), certify=False).plan
    return msgspec.structs.replace(plan, reduce_every=1, bundle_bytes=1 << 10)


def reduced(plan: Plan) -> int:
    """Sums over ranks that a step makes, on the first rank."""
    (program, *_), sums = lower(plan), ("reduce_scatter", "all_reduce")
    instrs = [instr for step in program.steps if step.block for instr in program.blocks[step.block].instrs]
    return sum(instr.kind is InstrKind.COLLECTIVE and instr.target in sums for instr in instrs)


@pytest.mark.parametrize("pins", PINS)
def test_groups_train_as_eager_and_are_reduced_less_often(case, pins: str) -> None:  # type: ignore[no-untyped-def]
    """Of four microbatches, in groups of two, of three and one, and of all; entries as predicted."""
    model, batch, program, wanted = case
    plan, counts = planned(program, PINS[pins]), []
    for every, under_way in ((1, 0), (2, 0), (3, 1 << 30), (4, 0)):
        tried = msgspec.structs.replace(plan, reduce_every=every, reducing_bytes=under_way)
        counts.append(reduced(tried))
        error, where = worst_error(tried, model, batch, wanted)
        assert error <= 1e-9, (where, error, every)
    assert counts[0] > counts[1] == counts[2] > counts[3], counts


def test_more_than_there_are_is_all_of_them(case) -> None:  # type: ignore[no-untyped-def]
    plan = planned(case[2], PINS["zero2"])
    four, nine = (lower(msgspec.structs.replace(plan, reduce_every=every)) for every in (4, 9))
    assert four == nine
    with pytest.raises(InvalidPlanError, match="reduce_every is 0: at least 1"):
        verify_plan(msgspec.structs.replace(plan, reduce_every=0))


def test_the_planner_groups_where_it_is_faster_and_there_is_room(case) -> None:  # type: ignore[no-untyped-def]
    made = realised(planned(case[2], PINS["zero2"]))
    assert made.simulation.exposed_comm_s > 0
    (tried,) = [realised(each) for each in grouped(made.plan)]
    assert tried.plan.reduce_every == 4 and tried.simulation.step_s < made.simulation.step_s
    assert reducing(made, PassContext(tried.peak_bytes, Constraints())).simulation.step_s <= tried.simulation.step_s
    assert reducing(made, PassContext(made.peak_bytes, Constraints())).peak_bytes <= made.peak_bytes
    pipeline = planned(case[2], PINS["interleaved"])
    assert [each.reduce_every for each in grouped(pipeline)] == [4, 2]
