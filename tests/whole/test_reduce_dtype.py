"""`reduce_dtype`: what gradients of half precisions are summed over ranks in."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paraplan as pp
from paraplan.capture import capture
from paraplan.codegen import build_modules
from paraplan.cost_models.simulator.live_bytes import MemoryWalk, entries
from paraplan.ir.errors import ConstraintError, InvalidPlanError
from paraplan.ir.execution import names
from paraplan.ir.execution.name import Role
from paraplan.ir.execution.rank_program import RankProgram, StepKind
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program, trained_params
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.jobs.checking.check import Captured, max_error
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.sampling import random_plan
from paraplan.runtime.in_process import InProcessTrainer
from tests.captures import compiled


class Net(nn.Module):
    """Two layers that share a norm, and two of their own; sizes that go in float8."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm = nn.Linear(16, 32), nn.LayerNorm(32)
        self.layers, self.out = nn.ModuleList(nn.Linear(32, 32) for _ in range(2)), nn.Linear(32, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.into(x)
        for layer in self.layers:
            h = h + layer(self.norm(h)).tanh()
        return F.cross_entropy(self.out(h), y)


@functools.cache
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def batch(step: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, 16, generator=draw), "y": torch.randint(0, 16, (8,), generator=draw)}


def planned(devices: int, precision: str, reduce_dtype: str | None, **pins: Any) -> pp.Plan:
    return compiled(
        net(), f"local:{devices}", example_inputs=batch(), precision=precision, reduce_dtype=reduce_dtype, **pins
    )


def summed_in(programs: tuple[RankProgram, ...]) -> dict[str, set[str]]:
    """The dtypes of sums over ranks: of small gradients ("sums"), once a step ("reduce"), within blocks ("B")."""
    found: dict[str, set[str]] = {}
    for block in (block for program in programs for block in program.blocks.values()):
        words = block.name.split(".")
        where = words[-1] if words[-1] == "B" else words[0]
        for instr in block.instrs:
            if ":sum" in instr.args and where not in ("loss", "tangent0"):
                assert instr.outs[0] is not None
                found.setdefault(where, set()).add(block.values[instr.outs[0]].dtype)
    return found


def trainer_of(plan: Any, programs: tuple[RankProgram, ...]) -> InProcessTrainer:
    return InProcessTrainer(plan, programs, [build_modules(each) for each in programs], net())


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


BF16, FP32, FP16 = "bfloat16", "float32", "float16"


@pytest.mark.parametrize(
    ("precision", "reduce_dtype", "pins", "wanted"),
    [
        ("bf16", None, {"zero": 0}, {"reduce": {FP32}}),
        ("bf16", None, {"zero": 3}, {"sums": {BF16}}),
        ("bf16", "bf16", {"zero": 0}, {"reduce": {BF16}}),
        ("bf16", "bf16", {"zero": 1, "microbatches": 2}, {"reduce": {BF16}}),
        ("bf16", "fp32", {"zero": 2}, {"sums": {FP32}}),
        ("bf16", "fp32", {"zero": 3, "microbatches": 2}, {"sums": {FP32}}),
        ("fp16", None, {"zero": 2}, {"sums": {FP16}}),
        ("fp16", "bf16", {"zero": 2}, {"sums": {BF16}}),
        ("fp16", "fp32", {"zero": 3}, {"sums": {FP32}}),
        ("fp8", "fp32", {"zero": 2}, {"sums": {FP32}}),
        ("fp8", "bf16", {"zero": 1}, {"reduce": {BF16}}),
    ],
    ids=str,
)
def test_gradients_cross_in_the_dtype_asked_for(
    precision: str, reduce_dtype: str | None, pins: dict[str, int], wanted: dict[str, set[str]]
) -> None:
    """And every rank does what was predicted."""
    plan = planned(2, precision, reduce_dtype, certify=True, dp=2, **pins)
    assert summed_in(plan.programs) == wanted
    assert plan.certificate is not None and plan.certificate.bound_s <= plan.prediction.step_s
    trainer, single = trainer_of(plan.data, plan.programs), Captured(plan.data, net(), adamw, 0)
    for step in range(2):
        loss, found = float(trainer.step(batch(step))), trainer.grads()
        expected, exact = single.step(batch(step), None, update_with=found)
        assert all(x.dtype == torch.float32 for x in found.values())
        assert loss == pytest.approx(expected, rel=2e-3) and max_error(found, exact)[0] < 1.5e-2
        trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2)
        for rank in range(2):
            assert [e.key for e in trainer.entries(rank)] == [e.key for e in entries(plan.programs[0])]


def test_a_gradient_that_is_all_of_the_sum_is_reduced_as_it_was_made() -> None:
    """No cast to float32 and back; what is added up is, and microbatches add up in float32."""
    for microbatches, held in ((1, {BF16, FP32}), (2, {FP32})):
        program = planned(2, "bf16", "bf16", dp=2, zero=1, microbatches=microbatches).programs[0]
        walk, dtypes = MemoryWalk(program), {}
        for step in program.steps:
            memory = walk.advance(step)
            if step.kind is StepKind.ACCUMULATE and step.args[0].role is Role.ACCUMULATOR:
                assert memory.held is not None
                dtypes[step.args[0]] = memory.held.dtype
        assert set(dtypes.values()) == held and dtypes[names.accumulator("norm.weight")] == FP32


@functools.cache
def captured(precision: str) -> Program:
    return capture(net(), batch(), precision=precision)


@pytest.mark.parametrize(
    ("precision", "reduce_dtype", "seed"),
    [("bf16", "fp32", 0), ("bf16", "fp32", 1), ("fp16", "bf16", 2), ("fp16", "bf16", 3), ("bf16", "bf16", 3)],
)
def test_random_plans(precision: str, reduce_dtype: str, seed: int) -> None:
    """Any layouts, microbatches and recomputation; nothing of a gradient is summed in another dtype."""
    job = Job(
        captured(precision),
        ClusterSpec.local(2 + 2 * (seed % 2)),
        OPTIMIZERS["adamw"],
        ModelRef(display="net"),
        {},
        reduce_dtype=reduce_dtype,
    )
    plan = random_plan(job, seed)
    programs = verify_plan(plan)
    found = summed_in(programs)
    assert found.pop("sums", set()) | found.pop("reduce", set()) <= {"bfloat16" if reduce_dtype == "bf16" else FP32}
    trainer, single = trainer_of(plan, programs), Captured(plan, net(), adamw, 0)
    loss, (expected, exact) = float(trainer.step(batch())), single.step(batch(), None)
    assert loss == pytest.approx(expected, rel=5e-3) and max_error(trainer.grads(), exact)[0] < 3e-2
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2)
    for rank, number in enumerate(plan.schedule.rank_class):
        assert [e.key for e in trainer.entries(rank)] == [e.key for e in entries(programs[number])]


@pytest.mark.parametrize(
    ("pins", "reduce_dtype"),
    [
        ({"pp": 2, "dp": 2, "zero": 1, "schedule": "zb-h1", "microbatches": 4}, "fp32"),
        ({"pp": 2, "dp": 2, "zero": 2, "microbatches": 2}, "bf16"),
        ({"dp": 2, "zero": 2, "offload_states": "disk-grads"}, "fp32"),
        ({"dp": 2, "zero": 1, "recompute": "full"}, "bf16"),
    ],
    ids=str,
)
def test_in_pipelines_and_with_states_away(pins: dict[str, Any], reduce_dtype: str) -> None:
    """Weight gradients apart from input gradients, gradients that leave once reduced: as predicted, as on one."""
    plan = planned(pins["dp"] * pins.get("pp", 1), "bf16", reduce_dtype, **pins)
    assert set().union(*summed_in(plan.programs).values()) == {FP32 if reduce_dtype == "fp32" else BF16}
    trainer, single = trainer_of(plan.data, plan.programs), Captured(plan.data, net(), adamw, 0)
    loss, (expected, _) = float(trainer.step(batch())), single.step(batch(), None)
    assert loss == pytest.approx(expected, rel=2e-3)
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2)
    for rank, number in enumerate(plan.data.schedule.rank_class):
        assert [e.key for e in trainer.entries(rank)] == [e.key for e in entries(plan.programs[number])]


@pytest.mark.parametrize(
    ("pins", "reduce_dtype"), [({"dp": 4, "zero": 2}, "fp32"), ({"dp": 4, "zero": 0}, "bf16")], ids=str
)
def test_training_follows_one_device(reduce_dtype: str, pins: dict[str, int]) -> None:
    """Twelve steps, each from where the one before led: the loss stays within 2 % of a single device's."""
    plan = planned(4, "bf16", reduce_dtype, microbatches=2, **pins)
    trainer, single = trainer_of(plan.data, plan.programs), Captured(plan.data, net(), adamw, 0)
    losses = []
    for _ in range(12):
        losses.append((float(trainer.step(batch())), single.step(batch(), None)[0]))
        trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2)
    assert all(found == pytest.approx(wanted, rel=2e-2) for found, wanted in losses)
    assert losses[-1][0] < 0.5 * losses[0][0]
    masters = {name: single.masters[name] for name in trained_params(plan.data.program)}
    assert max_error(trainer.params(), masters)[0] < 1e-1


class Wide(nn.Module):
    """Weights too large to share a collective with others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2304, 2304, bias=False) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).float().square().mean()


@pytest.mark.parametrize(("zero", "where"), [(1, "reduce"), (2, "B")])
def test_bytes_on_the_wire_are_priced(zero: int, where: str) -> None:
    """Sums of float32 take longer than those of bfloat16, reduced once a step or in the block that makes them."""
    with torch.device("meta"):
        model, x = Wide(), {"x": torch.zeros(64, 2304)}
    comm_s = {}
    for reduce_dtype in ("bf16", "fp32", None):
        plan = pp.compile(
            model, "8xH100", example_inputs=x, precision="bf16", reduce_dtype=reduce_dtype, dp=8, zero=zero
        )
        dtype = {"bf16": BF16, "fp32": FP32, None: FP32 if zero == 1 else BF16}[reduce_dtype]
        late = zero == 2 and dtype == BF16  # summed as it is made: the last one of a block goes beside the next block
        assert summed_in(plan.programs) == {"sums" if late else where: {dtype}}
        assert plan.certificate is not None and plan.certificate.bound_s <= plan.prediction.step_s
        assert (f"gradients summed over ranks in {reduce_dtype}" in str(plan.explain())) == (reduce_dtype is not None)
        comm_s.setdefault(dtype, set()).add(sum(plan.simulate().comm_s.values()))
    assert max(comm_s[BF16]) < 0.9 * min(comm_s[FP32])
    assert len(comm_s[BF16]) + len(comm_s[FP32]) == 2, "left out, it is what is done anyway"


def test_the_check_knows_of_it() -> None:
    """fp16 reduced in bfloat16 is off by that dtype's roundings, which the check of fp16 alone refuses."""
    plan = planned(4, "fp16", "bf16", dp=4, zero=2)
    assert "largest error" in plan.check(net(), [batch(0), batch(1)])


def test_what_cannot_be_is_refused_by_name() -> None:
    for precision in ("fp32", "fp64"):
        with pytest.raises(ConstraintError, match=f"reduce_dtype='bf16' .* precision='{precision}' sums them as they"):
            planned(2, precision, "bf16", dp=2)
    with pytest.raises(ConstraintError, match="reduce_dtype='fp16': one of fp32, bf16"):
        planned(2, "bf16", "fp16", dp=2)
    plan = planned(2, "bf16", "fp32", dp=2, zero=2)
    assert plan.data.reduce_dtype == "fp32"
    with pytest.raises(InvalidPlanError, match="reduce_dtype is 'int8'"):
        verify_plan(msgspec.structs.replace(plan.data, reduce_dtype="int8"))
    wide = pp.compile(net(), "local:2", example_inputs=batch(), precision="fp32", dp=2)
    with pytest.raises(InvalidPlanError, match="gradients of fp32 are summed as they are"):
        verify_plan(msgspec.structs.replace(wide.data, reduce_dtype="bf16"))
