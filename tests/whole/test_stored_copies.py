"""Stored copies of updated parameters: the masters' values rounded, written and cast by one copy each, as predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paraplan.codegen import build_modules
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.execution import names
from paraplan.ir.execution.rank_program import InstrKind
from paraplan.runtime.in_process import InProcessTrainer
from tests.captures import compiled


class Deep(nn.Module):
    """Linear layers, whose parameters weigh more than their activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(x)).float(), y)


BATCH = {"x": torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).bfloat16(), "y": torch.arange(4)}
HOWS: dict[str, dict[str, Any]] = {
    "one": {},
    "zero0": {"mesh": (2,), "zero": 0},
    "zero1": {"mesh": (2,), "zero": 1},
    "written-whole": {"mesh": (2,), "params": {"layers.1.0.weight": "R/P/S0", "head.weight": "R/P/S0"}},
    "zero3": {"mesh": (2,), "zero": 3},
    "host": {"mesh": (2,), "offload_states": "host"},
    "fetched": {"offload_states": "fetched"},
    "disk": {"offload_states": "disk"},
}


@pytest.mark.parametrize("how", HOWS)
def test_a_stored_copy_is_written_by_one_copy_that_casts(how: str) -> None:
    options = HOWS[how]
    cluster = "local:2" if "mesh" in options else "local:1"
    plan = compiled(Deep(), cluster, example_inputs=BATCH, precision="bf16", **options)
    trainer = InProcessTrainer(plan.data, plan.programs, [build_modules(p) for p in plan.programs], Deep())
    for _ in range(2):
        trainer.step(BATCH)
        trainer.apply_optimizer(torch.optim.AdamW, lr=0.05)
    simulation = simulate_plan(plan.data, plan.programs)
    for index, rank in enumerate(trainer.ranks):
        trace = simulation.traces[plan.data.schedule.rank_class[index]]
        assert trainer.peak_bytes(index) == trace.peak_bytes
        assert [entry.key for entry in trainer.entries(index)] == [entry.key for entry in entries(rank.program)]
        for name, layouts in rank.stage.params.items():
            stored, master = rank.tensors[names.param(name)], rank.tensors[names.state(name)]
            assert stored.dtype == torch.bfloat16
            assert master.dtype == torch.float32
            whole = torch.cat([each.tensors[names.state(name)] for each in trainer.ranks])
            alike = layouts.resting == layouts.state or len(trainer.ranks) == 1
            assert torch.equal(stored, (master if alike else whole).bfloat16())
            assert not torch.equal(stored.float(), master if alike else whole)
    written, gathered = 0, 0
    for program in plan.programs:
        for block in (program.blocks[step.block] for step in program.steps if step.block.startswith("restore")):
            ops = [instr.target for instr in block.instrs if instr.kind is InstrKind.OP]
            sent = any(instr.kind is InstrKind.COLLECTIVE for instr in block.instrs)
            assert ops == [*["aten._to_copy.default"] * sent, "paraplan.write"]
            written, gathered = written + 1, gathered + sent
    assert written == sum(len(program.grads) for program in plan.programs)
    assert (gathered >= 2) == (how == "written-whole")
