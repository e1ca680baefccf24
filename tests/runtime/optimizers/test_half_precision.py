"""fp16 with gradient scaling, and learning-rate schedules, against one device doing the same."""

from __future__ import annotations

import functools
import itertools
import warnings

import msgspec
import pytest
import torch
from torch import nn

import paraplan as pp
from paraplan.capture import capture
from paraplan.codegen import build_modules
from paraplan.cost_models.simulator.live_bytes import MemoryWalk, entries
from paraplan.ir.errors import PlanMismatchError
from paraplan.ir.execution import names
from paraplan.ir.execution.name import Role
from paraplan.ir.execution.rank_program import StepKind
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program, trained_params
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.jobs.checking.check import Captured, max_error
from paraplan.lowering.steps.delayed_update import in_phase
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.sampling import random_plan
from paraplan.runtime.in_process import InProcessTrainer
from paraplan.runtime.optimizers.optim import param_groups
from tests.runtime import plans


def net() -> nn.Module:
    return plans.net().float()


def batch(step: int) -> dict[str, torch.Tensor]:
    found = plans.batch(step)
    return {"x": found["x"].half(), "y": found["y"]}


@functools.cache
def program() -> Program:
    return capture(net(), {"x": torch.zeros(4, 8).half(), "y": torch.zeros(4, dtype=torch.int64)}, precision="fp16")


def plan_of(seed: int, away: bool = False) -> Plan:
    job = Job(program(), ClusterSpec.local(2), OPTIMIZERS["adamw"], ModelRef(display="net"), {})
    return random_plan(job, seed, states_leave=away)


def trainer_of(plan: Plan) -> InProcessTrainer:
    programs = verify_plan(plan)
    return InProcessTrainer(plan, programs, [build_modules(p) for p in programs], net())


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def test_masters_are_float32() -> None:
    for rank in trainer_of(plan_of(0)).ranks:
        assert all(p.dtype == torch.float32 for p in rank.params.values())
        assert all(rank.tensors[names.param(name)].dtype == torch.float16 for name in rank.stage.params)


def test_float_inputs_are_taken_in_the_precision_computed_in() -> None:
    """Images in float32, say: the plan reads them as they come and casts them, as the batch itself might have been."""
    wide = {"x": torch.zeros(4, 8), "y": torch.zeros(4, dtype=torch.int64)}
    job = Job(
        capture(net(), wide, precision="fp16"), ClusterSpec.local(2), OPTIMIZERS["adamw"], ModelRef(display="net"), {}
    )
    assert job.program.batch["x"].spec.dtype == "float32"
    found = []
    for plan, dtype in ((random_plan(job, 0), torch.float32), (plan_of(0), torch.float16)):
        trainer = trainer_of(plan)
        losses = []
        for step in range(3):
            losses.append(trainer.step({**batch(step), "x": batch(step)["x"].to(dtype)}))
            trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2)
        found.append(torch.stack(losses))
    torch.testing.assert_close(*found, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize(("seed", "away"), [(0, False), (2, False), (5, False), (2, True), (6, True)])
def test_steps_and_scales_equal_one_device(seed: int, away: bool) -> None:
    """The first scale overflows: steps are skipped until it fits, on every rank, wherever its states live; then it
    grows."""
    plan = plan_of(seed, away)
    trainer, single = trainer_of(plan), Captured(plan, net(), adamw, 0)
    options = {"init_scale": 2.0**22, "growth_interval": 3}
    scaler = trainer.scaler(**options)
    single.scaler = torch.amp.GradScaler("cpu", **options)  # type: ignore[arg-type]
    scales = []
    for step in range(12):
        loss = trainer.step(batch(step))
        trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2, scaler=scaler)
        wanted, _ = single.step(batch(step), None)
        assert float(loss) == pytest.approx(wanted, rel=5e-3)
        scales.append(scaler.get_scale())
        assert scales[-1] == single.scaler.get_scale()
        (program_,) = {id(p): p for p in verify_plan(plan)}.values()
        if scales[-1] >= (scales[-2] if step else scales[-1] + 1):
            for rank, each in enumerate(trainer.ranks):
                predicted = entries(in_phase(program_, each.phase))
                assert [e.key for e in trainer.entries(rank)] == [e.key for e in predicted]
    assert min(scales) < scales[0] or scales[0] < 2.0**22
    assert any(after > before for before, after in itertools.pairwise(scales))
    masters = {name: single.masters[name] for name in trained_params(plan.program)}
    assert max_error(trainer.params(), masters)[0] < 2e-2


def test_of_several_microbatches_the_first_gradient_alone_is_cast() -> None:
    """An accumulator begins as a cast copy; what is added to it comes in halves, in one kernel."""
    plan = next(made for made in map(plan_of, range(40)) if made.num_microbatches == 2 and made.group == 1)
    (program_,) = {id(p): p for p in verify_plan(plan)}.values()
    casts = [step.outs[0] for step in program_.steps if step.block.startswith("cast.")]
    walk, added = MemoryWalk(program_), []
    for step in program_.steps:
        memory = walk.advance(step)
        if step.kind is StepKind.ACCUMULATE and step.args[0].role is Role.ACCUMULATOR:
            assert memory.held is not None and memory.held.dtype == "float32"
            if memory.moved:
                assert memory.added == "float32"
            else:
                added.append(memory.added)
    assert casts and added.count("float16") >= len(casts)
    trainer = trainer_of(plan)
    trainer.step(batch(0))
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2)
    for rank in range(2):
        assert [e.key for e in trainer.entries(rank)] == [e.key for e in entries(program_)]


@pytest.mark.parametrize("seed", [0, 5])
def test_skipped_steps_hold_nothing_where_updates_are_late(seed: int) -> None:
    """What was held before is applied all the same; scales overflow at first, and again when they have grown."""
    plan = plan_of(seed)
    stages = tuple(
        msgspec.structs.replace(
            stage,
            params={n: msgspec.structs.replace(x, state_tier="host", ahead=False) for n, x in stage.params.items()},
        )
        for stage in plan.stages
    )
    plan = msgspec.structs.replace(plan, stages=stages, delayed_update=2)
    trainer, single = trainer_of(plan), Captured(plan, net(), adamw, 0)
    options = {"init_scale": 2.0**22, "growth_interval": 2, "growth_factor": 2.0**8}
    scaler = trainer.scaler(**options)
    single.scaler = torch.amp.GradScaler("cpu", **options)  # type: ignore[arg-type]
    skipped = set()
    for step in range(14):
        held, before = trainer.ranks[0].is_due, scaler.get_scale()
        loss = trainer.step(batch(step))
        trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2, scaler=scaler)
        wanted, _ = single.step(batch(step), None)
        assert float(loss) == pytest.approx(wanted, rel=5e-3)
        assert scaler.get_scale() == single.scaler.get_scale()
        if scaler.get_scale() < before:
            skipped.add(held)
        else:
            for rank in range(2):
                program_ = in_phase(trainer.ranks[rank].program, trainer.ranks[rank].phase)
                assert [e.key for e in trainer.entries(rank)] == [e.key for e in entries(program_)]
    assert skipped == {False, True}, "with gradients held, and without"
    masters = {name: single.masters[name] for name in trained_params(plan.program)}
    assert max_error(trainer.params(), masters)[0] < 2e-2


def test_an_infinity_on_one_rank_skips_the_step_on_all() -> None:
    trainer = trainer_of(plan_of(0))
    scaler = trainer.scaler(init_scale=8.0)
    trainer.step(batch(0))
    before = {name: value.clone() for name, value in trainer.params().items()}
    victim = trainer.ranks[1].executor.outer[next(iter(trainer.ranks[1].program.grads.values()))]
    victim.view(-1)[0] = float("inf")
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2, scaler=scaler)
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(value, before[name]) for name, value in trainer.params().items())
    trainer.step(batch(0))
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2, scaler=scaler)
    assert any(not torch.equal(value, before[name]) for name, value in trainer.params().items())


def test_a_scaler_is_for_fp16_and_scale_is_not_called() -> None:
    plan, programs = plans.planned(0)
    with pytest.raises(PlanMismatchError, match="computes in fp64, whose gradients need no scaling"):
        InProcessTrainer(plan, programs, plans.emitted(programs), plans.net()).scaler()
    scaler = trainer_of(plan_of(0)).scaler()
    with pytest.raises(PlanMismatchError, match="scales by itself"):
        scaler.scale(torch.ones(()))
    other = trainer_of(plan_of(0)).scaler()
    other.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    assert other.get_scale() == 2.0


SCHEDULES = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.7**step),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=6),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rate_schedules(name: str) -> None:
    """On the shards' optimizers as on the model's own."""
    plan, programs = plans.planned(2)
    trainer = InProcessTrainer(plan, programs, plans.emitted(programs), plans.net())
    for rank in trainer.ranks:
        rank.optimizers = [torch.optim.AdamW(param_groups(rank.params, None, None), lr=1e-2)]
    schedules = [SCHEDULES[name](optimizer) for optimizer in trainer.optimizers]
    model = plans.net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    schedule = SCHEDULES[name](optimizer)
    for step in range(5):
        loss = model(**plans.batch(step))
        loss.backward()
        assert float(trainer.step(plans.batch(step))) == pytest.approx(loss.item(), rel=1e-12)
        trainer.apply_optimizer(torch.optim.AdamW)
        optimizer.step()
        optimizer.zero_grad()
        for each in (schedule, *schedules):
            each.step()
        assert trainer.optimizers[1].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    named = dict(model.named_parameters())
    assert all(torch.allclose(x, named[name], rtol=1e-9, atol=1e-12) for name, x in trainer.params().items())


def test_executable_with_schedule_scaler_and_compiled_blocks() -> None:
    """What a training script writes, in one process."""
    inputs = {"x": torch.zeros(4, 8).half(), "y": torch.zeros(4, dtype=torch.int64)}
    plan = pp.compile(net(), "local:1", example_inputs=inputs, precision="fp16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a machine without a compiler says so, block by block
        trainer = plan.executable(net(), compile="eager")
        optimizer, scaler = trainer.optimizer(torch.optim.AdamW, lr=1e-2), trainer.scaler(init_scale=1024.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        single = Captured(plan.data, net(), adamw, 0)
        for step in range(3):
            loss = trainer.step(batch(step))
            assert float(loss) == pytest.approx(single.step(batch(step), None)[0], rel=2e-2)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.125)
    assert trainer.compiled
    assert all(reason is not None for reason in trainer.compiled.values())


class Shared(nn.Module):
    """A weight in three layers, embeddings tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.layer, self.norm = nn.Embedding(32, 16), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.wte(x)
        for _ in range(3):
            h = h + self.layer(self.norm(h)).tanh()
        return nn.functional.cross_entropy(h @ self.wte.weight.t(), y)


@pytest.mark.parametrize("pins", [{}, {"dp": 2, "zero": 0}, {"dp": 2, "zero": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_what_is_added_to_a_gradient_is_not_cast_first(pins: dict[str, int]) -> None:
    """Of a weight that several segments read the first gradient is cast, and later ones by the addition."""
    torch.manual_seed(0)
    model, draw = Shared(), torch.Generator().manual_seed(0)
    given = {name: torch.randint(0, 32, (8,), generator=draw) for name in "xy"}
    devices = pins.get("dp", 1)
    plan = pp.compile(model, f"local:{devices}", example_inputs=given, precision="bf16", **pins)
    walk, added = MemoryWalk(plan.programs[0]), []
    for step in plan.programs[0].steps:
        memory = walk.advance(step)
        if step.kind is StepKind.ACCUMULATE and step.args[0].role is Role.ACCUMULATOR:
            assert memory.held is not None and memory.held.dtype == "float32"
            added.append((memory.moved, memory.added))
    assert added == [(True, "float32")] * 5 + [(False, "bfloat16")] * 9
    trainer = InProcessTrainer(plan.data, plan.programs, [build_modules(p) for p in plan.programs], model)
    loss, (wanted, exact) = trainer.step(given), Captured(plan.data, model, adamw, 0).step(given, None)
    assert float(loss) == pytest.approx(wanted, rel=5e-3) and max_error(trainer.grads(), exact)[0] < 2e-2
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2)
    for rank in range(devices):
        assert [e.key for e in trainer.entries(rank)] == [e.key for e in entries(plan.programs[0])]
