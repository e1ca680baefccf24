"""precision="fp8" sharded, against one device running the same captured program."""

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
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.errors import ConstraintError, InvalidPlanError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.jobs.checking.check import Captured, max_error
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.sampling import random_plan
from paraplan.runtime.in_process import InProcessTrainer
from tests.captures import compiled

VOCABULARY, WIDTH, BATCH, SEQUENCE = 48, 32, 8, 6


class Net(nn.Module):
    """One attention, one feed-forward whose two weights go in float8, and a head that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.wte(x)
        n = self.norm(h)
        q, k, v = (each(n).unflatten(-1, (2, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = h + self.down(F.gelu(self.up(h)))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


@functools.cache
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def batch(step: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {name: torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=draw) for name in "xy"}


@functools.cache
def program() -> Program:
    return capture(net(), batch(), precision="fp8")


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def compare(plan: Plan, steps: int = 2) -> tuple[float, float]:
    """The largest errors of losses and gradients; what every rank did is what was predicted."""
    programs = verify_plan(plan)
    trainer = InProcessTrainer(plan, programs, [build_modules(each) for each in programs], net())
    single = Captured(plan, net(), adamw, 0)
    losses, grads = [0.0], [0.0]
    for step in range(steps):
        loss, found = float(trainer.step(batch(step))), trainer.grads()
        wanted, exact = single.step(batch(step), None, update_with=found)
        trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2)
        for rank, number in enumerate(plan.schedule.rank_class):
            assert [e.key for e in trainer.entries(rank)] == [e.key for e in entries(programs[number])]
        losses.append(abs(loss / wanted - 1))
        grads.append(max_error(found, exact)[0])
    return max(losses), max(grads)


def test_what_goes_in_float8() -> None:
    """One cast of what several products read, of which the transpose is kept; weights cast again backward and not kept;
    the head in bfloat16."""
    attention = next(kind for kind in program().kinds if any("attention" in op.target for op in kind.graph.ops))
    forward = [op.target for op in attention.graph.ops if op.phase.value == "F"]
    assert forward.count("paraplan.float8_linear") == 3
    assert forward.count("paraplan.float8_cast") == 3 and forward.count("paraplan.float8_cast_both") == 1
    assert forward.count("paraplan.float8_scale") == 4
    backward = [op for op in attention.graph.ops if op.phase.value == "B"]
    assert sum(op.target == "paraplan.float8_scale" for op in backward) == 3, "scales of weights are kept"
    casts = {out: op.tensors[0] for op in attention.graph.ops if "float8_cast" in op.target for out in op.outs if out}
    read = {name for op in backward for name in op.tensors}
    first = {name for op in attention.graph.ops if op.phase.value == "F" for name in op.outs}
    kept = [name for name in read & first if name in casts]
    turned = {op.outs[1] for op in attention.graph.ops if op.target == "paraplan.float8_cast_both"}
    assert len(kept) == 1 and kept[0] in turned
    assert casts[kept[0]] not in attention.params and casts[kept[0]] not in read
    dtypes = {op.args[2] if "cast" in op.target else op.args[1] for op in backward if "float8_s" in op.target}
    assert dtypes == {":float8_e5m2"}
    head = next(kind for kind in program().kinds if any("ce_loss" in op.target for op in kind.graph.ops))
    assert head.graph.ops[0].target == "paraplan.linear"


def test_odd_layers_and_other_precisions_stay() -> None:
    def targets(width: int, precision: str) -> set[str]:
        model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 16))
        x = torch.zeros(4, 16, dtype=torch.bfloat16)
        found = capture(model, (x,), loss_fn=lambda out, batch: out.square().mean(), precision=precision)
        return {op.target for kind in found.kinds for op in kind.graph.ops if op.target.endswith("linear")}

    assert targets(32, "bf16") == targets(24, "fp8") == {"paraplan.linear"}
    assert targets(32, "fp8") == {"paraplan.float8_linear", "paraplan.linear"}


@pytest.mark.parametrize(
    ("pins", "devices"),
    [({"dp": 2}, 2), ({"dp": 4, "zero": 3}, 4)],
    ids=str,
)
def test_data_parallel_losses_are_those_of_one_device(pins: dict[str, Any], devices: int) -> None:
    """Scales are maxima over all ranks, so every product sees the numbers it sees on one device."""
    plan = compiled(net(), f"local:{devices}", example_inputs=batch(), precision="fp8", **pins)
    loss, grad = compare(plan.data)
    assert loss < 1e-6, "the sum over ranks alone is in another order"
    assert grad < 4e-2, "sums over ranks are of bfloat16"


@pytest.mark.parametrize(
    ("pins", "devices"),
    [
        ({"cp": 2}, 2),
        ({"dp": 2, "tp": 2, "zero": 1, "microbatches": 2}, 4),
        ({"pp": 2, "schedule": "1f1b", "microbatches": 4}, 2),
    ],
    ids=str,
)
def test_other_ways_differ_by_roundings(pins: dict[str, Any], devices: int) -> None:
    plan = compiled(net(), f"local:{devices}", example_inputs=batch(), precision="fp8", **pins)
    loss, grad = compare(plan.data)
    assert loss < 2e-3 and grad < 2e-1


@pytest.mark.parametrize("seed", range(4))
def test_random_plans(seed: int) -> None:
    job = Job(program(), ClusterSpec.local(2 + 2 * (seed % 2)), OPTIMIZERS["adamw"], ModelRef(display="net"), {})
    loss, grad = compare(random_plan(job, seed), 1)
    assert loss < 2e-3 and grad < 2e-1


def test_one_device_without_float8_is_refused() -> None:
    with pytest.raises(ConstraintError, match=r"A100-80 has no rate .*precision='bf16'.*H100"):
        pp.compile(net(), "2xA100-80", example_inputs=batch(), precision="fp8")


class Turned(nn.Module):
    """Weights [k, n], as of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 6) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.one_hot(x, WIDTH * 2)[..., :WIDTH].to(self.up.dtype)
        return F.cross_entropy(self.head(h + F.gelu((h + 1) @ self.up) @ self.down).flatten(0, 1), y.flatten())


def run_of(plan: Plan, model: nn.Module) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Losses of two steps, the last gradients, and what of float8 rank 0 runs; as predicted."""
    programs = verify_plan(plan)
    trainer = InProcessTrainer(plan, programs, [build_modules(each) for each in programs], model)
    losses, grads = [], {}
    for step in range(2):
        losses.append(float(trainer.step(batch(step))))
        grads = {name: x.clone() for name, x in trainer.grads().items()}
        trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2)
        for rank, number in enumerate(plan.schedule.rank_class):
            assert [e.key for e in trainer.entries(rank)] == [e.key for e in entries(programs[number])]
    calls = [programs[0].blocks[step.block] for step in programs[0].steps if step.block]
    return losses, grads, [i.target for block in calls for i in block.instrs if "float8" in i.target]


def same_bits(plan: Plan, model: nn.Module) -> tuple[list[str], list[str]]:
    """What runs with weights cast at every use and once a step, where all numbers are equal."""
    found = [run_of(msgspec.structs.replace(plan, hold_casts=held), model) for held in (False, True)]
    assert found[0][0] == found[1][0]
    assert all(torch.equal(x, found[1][1][name]) for name, x in found[0][1].items())
    return found[0][2], found[1][2]


@pytest.mark.parametrize(
    ("pins", "devices"),
    [
        ({}, 1),
        ({"dp": 2, "zero": 1}, 2),
        ({"dp": 2, "zero": 3, "microbatches": 4}, 2),
        ({"tp": 2, "sp": True}, 2),
        ({"pp": 2, "schedule": "1f1b", "microbatches": 4}, 2),
        ({"dp": 2, "zero": 3, "recompute": "full"}, 2),
    ],
    ids=str,
)
def test_weights_cast_once_a_step_change_no_bit(pins: dict[str, Any], devices: int) -> None:
    plan = compiled(net(), f"local:{devices}", example_inputs=batch(), precision="fp8", **pins).data
    each, once = same_bits(plan, net())
    weights, uses = len([name for name in once if name.endswith("_cast_both")]), each.count("paraplan.float8_cast")
    inputs = each.count("paraplan.float8_cast_both")
    assert "paraplan.float8_cast" not in once and weights - inputs == uses / (2 * plan.num_microbatches)


def test_weights_that_lie_the_other_way_are_held_so() -> None:
    torch.manual_seed(0)
    model = Turned()
    plan = pp.compile(model, "local:2", example_inputs=batch(), precision="fp8", dp=2, zero=3, microbatches=2).data
    products = [op for kind in plan.program.kinds for op in kind.graph.ops if op.target == "paraplan.float8_linear"]
    assert products and all(op.args[4] for op in products)
    each, once = same_bits(plan, model)
    assert each.count("paraplan.float8_cast") == 2 * 3 and "paraplan.float8_cast" not in once


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_with_weights_cast_once(seed: int) -> None:
    job = Job(program(), ClusterSpec.local(2 + 2 * (seed % 2)), OPTIMIZERS["adamw"], ModelRef(display="net"), {})
    same_bits(random_plan(job, seed), net())


def test_weights_are_cast_once_where_that_is_faster_and_fits() -> None:
    """The bound then is over plans that do not; what has no room for the casts does without."""
    torch.manual_seed(0)
    given = {"x": torch.randn(8, 64).bfloat16(), "y": torch.randint(0, 8, (8,))}

    def planned(**more: Any) -> pp.Plan:
        return pp.compile(
            Wide(), "2xH100", example_inputs=given, precision="fp8", dp=2, zero=0, microbatches=4, reserve=0, **more
        )

    roomy = planned()
    assert roomy.data.hold_casts and roomy.certificate is not None
    assert "; weights cast at every use" in roomy.certificate.bound_scope
    assert "weights cast once a step" in str(roomy.explain())
    (without,) = {priced_peak(msgspec.structs.replace(roomy.data, hold_casts=False))}
    assert without < max(roomy.prediction.peak_bytes)
    tight = planned(memory=(without + max(roomy.prediction.peak_bytes)) // 2, recompute="none")
    assert not tight.data.hold_casts and max(tight.prediction.peak_bytes) <= without


def priced_peak(plan: Plan) -> int:
    return max(simulate_plan(plan, verify_plan(plan)).peak_bytes)


def test_other_precisions_hold_no_casts() -> None:
    plan = pp.compile(net(), "local:1", example_inputs=batch(), precision="bf16").data
    with pytest.raises(InvalidPlanError, match="hold_casts in bf16: only a plan in fp8 casts weights"):
        verify_plan(msgspec.structs.replace(plan, hold_casts=True))


class Wide(nn.Module):
    """Weights large enough to be worth gathering as float8."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 2048), nn.Linear(2048, 512)
        self.out = nn.Linear(512, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.into(x)
        return F.cross_entropy(self.out(h + self.down(F.gelu(self.up(h)))), y)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_sharded_weights_travel_in_float8(recompute: str) -> None:
    """Cast in shards under their common scale, then gathered; once a block, though the backward may cast them twice."""
    torch.manual_seed(0)
    model = Wide()
    given = {"x": torch.randn(2, 64).bfloat16(), "y": torch.randint(0, 8, (2,))}
    plan = pp.compile(model, "local:2", example_inputs=given, precision="fp8", dp=2, zero=3, recompute=recompute)
    gathers = []
    for name, block in plan.programs[0].blocks.items():
        issued = [block.values[i.outs[0]] for i in block.instrs if i.target == "all_gather" and i.outs[0]]
        gathers += [(name[-1], value.dtype) for value in issued if value.shape in ((2048, 512), (512, 2048))]
    assert gathers == [("F", "float8_e4m3fn")] * 2 + [("B", "float8_e4m3fn")] * 2
    trainer = InProcessTrainer(plan.data, plan.programs, [build_modules(each) for each in plan.programs], model)
    single = Captured(plan.data, model, adamw, 0)
    loss, found = float(trainer.step(given)), trainer.grads()
    wanted, exact = single.step(given, None)
    assert abs(loss / wanted - 1) < 1e-6 and max_error(found, exact)[0] < 4e-2
