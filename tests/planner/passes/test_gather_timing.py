"""A finished plan is no slower than with its parameters gathered at another time, or fewer at a time."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

from paraplan.capture import capture
from paraplan.cost_models.realised_plan import realised
from paraplan.ir.execution.rank_program import BlockRole
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.evaluate_plan import gathers_large
from paraplan.planner.search import search


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("width", [512, 1024])
def test_no_other_time_to_gather_is_faster(width: int, pp: int) -> None:
    """Of 1 MiB each all come in one bundle, there when its last one is; of 4 MiB each alone, a segment ahead."""
    with torch.device("meta"):
        model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(width, width), nn.Tanh())])
        batch = {"input": torch.zeros(64, width)}
    program = capture(model, batch, loss_fn=lambda out, _: out.pow(2).mean(), precision="fp32")
    job = Job(program, ClusterSpec.local(2 * pp), OPTIMIZERS["adamw"], ModelRef(display="chain"), {})
    plan = search(job, Constraints(pp=pp, dp=2, zero=3, microbatches=pp, reserve_bytes=0), certify=False).plan
    ahead = realised(msgspec.structs.replace(plan, params_ahead=True)).programs
    assert plan.prediction is not None and gathers_large(ahead) == (width > 512)
    assert any(block.role is BlockRole.GATHER for program in ahead for block in program.blocks.values())
    options = plan.options
    for each in (options.but(params_ahead=False), options.but(bundle_bytes=0), options.lean):
        other = realised(msgspec.structs.replace(plan, **msgspec.structs.asdict(each)))
        assert plan.prediction.step_s <= other.simulation.step_s * (1 + 1e-9)
