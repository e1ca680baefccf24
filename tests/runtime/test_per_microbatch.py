"""Microbatches that are batches by themselves, where the user allows it: eager gradient accumulation's numbers."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paraplan import compile as compile_plan
from paraplan.capture import capture
from paraplan.capture.reference import run_step
from paraplan.codegen import build_modules
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.errors import ConstraintError, InvalidPlanError, PlanMismatchError
from paraplan.ir.model.program import Program
from paraplan.ir.model.seeds import segment_seed
from paraplan.ir.plan import Plan
from paraplan.jobs.checking.check import SingleDevice
from paraplan.jobs.models import Made
from paraplan.lowering import lower
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.sampling import random_plan
from paraplan.report.explain import facts
from paraplan.runtime.in_process import InProcessTrainer
from paraplan.runtime.state.params import full_tensors
from tests.numerics import relative_error
from tests.runtime.pipelines import job_of, pipeline_of

ROWS, MICROBATCHES = 8, 2


class Standard(nn.Module):
    """Layers with batch norm between them, a mean over labels some of which are ignored."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(4))
        self.head, self.drop = nn.Linear(6, 5), nn.Dropout(dropout)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.drop(torch.tanh(norm(layer(x))))
        return F.cross_entropy(self.head(x), label)


class Widening(Standard):
    """As `Standard`, with norms of other widths one after another."""

    def __init__(self) -> None:
        super().__init__()
        widths = (6, 7, 8, 9, 6)
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in itertools.pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in widths[1:])


class Paired(nn.Module):
    """A contrastive loss over the rows it sees, without labels: a mean of means."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), nn.Linear(6, 6)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        odds = F.normalize(self.one(x), dim=-1) @ F.normalize(self.two(x), dim=-1).T
        return -3 * odds.log_softmax(-1).diagonal().mean() + 0 * label.sum()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    label = torch.randint(0, 5, (ROWS,), generator=generator)
    label[:3] = -100
    return {"x": torch.randn(ROWS, 6, generator=generator), "label": label}


def model_of(make: type[nn.Module], *args: float) -> nn.Module:
    torch.manual_seed(0)
    return make(*args).train()


@functools.cache
def program_of(make: type[nn.Module], *args: float) -> Program:
    return capture(model_of(make, *args), batch(), precision="fp64", per_microbatch=MICROBATCHES)


def trainer_of(plan: Plan, model: nn.Module) -> InProcessTrainer:
    programs = verify_plan(plan)
    return InProcessTrainer(plan, programs, [build_modules(each) for each in programs], model)


def hold_to_eager(plan: Plan, make: type[nn.Module]) -> None:
    """One step against eager gradient accumulation, each microbatch counting as its labels do."""
    trainer, model = trainer_of(plan, model_of(make)), copy.deepcopy(model_of(make)).double()
    trainer.step(batch())
    total = 0.0
    counted = int((batch()["label"] >= 0).sum()) if issubclass(make, Standard) else ROWS
    for x, label in zip(*(each.chunk(MICROBATCHES) for each in batch().values()), strict=True):
        mine = int((label >= 0).sum()) if issubclass(make, Standard) else len(label)
        loss = model(x.double(), label) * (mine / counted)
        loss.backward()
        total += float(loss.detach())
    assert relative_error(trainer.grads(), {n: p.grad for n, p in model.named_parameters()}) < 1e-9
    assert all(abs(float(loss) - total) < 1e-12 for loss in trainer.losses())
    assert not trainer.buffers() or relative_error(trainer.buffers(), dict(model.named_buffers())) < 1e-12
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2)
    programs = lower(plan)
    for rank, at in enumerate(plan.schedule.rank_class):
        assert [entry.key for entry in trainer.entries(rank)] == [entry.key for entry in entries(programs[at])]


@pytest.mark.parametrize("make", [Standard, Paired])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_on_one_stage(make: type[nn.Module], ranks: int) -> None:
    hold_to_eager(random_plan(job_of(program_of(make), ranks), ranks), make)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_in_pipelines(schedule: str) -> None:
    program = program_of(Standard)
    bounds = [(0, 2), (2, len(program.segments))]
    hold_to_eager(pipeline_of(random_plan(job_of(program, 2), 5), schedule, 2, bounds), Standard)


def test_stages_of_one_rank_write_their_own_buffers() -> None:
    program = program_of(Widening)
    last = len(program.segments)
    bounds = [(0, 1), (1, 2), (2, 3), (3, last)]
    plan = pipeline_of(random_plan(job_of(program, 1), 5), "interleaved", 2, bounds)
    for made in lower(plan):
        called = ((made.blocks[step.block], step.args) for step in made.steps if step.block)
        given = (
            (block.values[local], name)
            for block, args in called
            for local, name in zip(block.inputs, args, strict=True)
        )
        assert all(value.shape == made.outer[name].shape for value, name in given if name in made.outer)
    hold_to_eager(plan, Widening)


def test_groups_that_share_microbatches_out_cannot_keep_running_statistics() -> None:
    program = program_of(Standard)
    bounds = [(0, 2), (2, len(program.segments))]
    plan = pipeline_of(random_plan(job_of(program, 1), 5), "chimera", 2, bounds)
    with pytest.raises(InvalidPlanError, match=r"is written once a microbatch.*use a schedule .*gpipe"):
        lower(plan)


def test_every_microbatch_draws_its_own_dropout() -> None:
    program, model = program_of(Standard, 0.5), model_of(Standard, 0.5)
    trainer = trainer_of(random_plan(job_of(program, 2), 1), model)
    trainer.step(batch())
    whole = {name.split(":", 1)[1]: value.double() for name, value in full_tensors(program, model).items()}
    given = {"x": batch()["x"].double(), "label": batch()["label"]}
    count = MICROBATCHES * len(program.segments)
    seeds = [torch.tensor(segment_seed(0, 0, index)) for index in range(count)]
    params, buffers = ({name: whole[name] for name in names} for names in (program.params, program.buffers))
    buffers = {name: value.to(getattr(torch, program.buffers[name].dtype)) for name, value in buffers.items()}
    step = run_step(program, params, buffers, given, seeds)
    assert relative_error(trainer.grads(), {n: g for n, g in step.grads.items() if g is not None}) < 1e-9
    same = run_step(program, params, buffers, given, seeds[: len(program.segments)] * MICROBATCHES)
    assert abs(float(step.loss - same.loss)) > 1e-3


def test_the_choice_is_asked_for_by_name_and_said() -> None:
    inputs, model = batch(), model_of(Standard)
    with pytest.raises(ConstraintError, match=r"bn_\w+ \(test_per_microbatch.*per_microbatch=True, --per-microbatch"):
        compile_plan(model, "local:2", example_inputs=inputs, pp=2, microbatches=2)
    alone = compile_plan(model, "local:2", example_inputs=inputs, pp=2).data
    assert alone.num_microbatches == 1
    assert any("there is one microbatch: " in note and "--per-microbatch" in note for note in alone.notes)
    with pytest.raises(ConstraintError, match=r"per_microbatch makes the number.*microbatches=4"):
        compile_plan(model, "local:2", example_inputs=inputs, pp=2, per_microbatch=True)
    made = compile_plan(
        model, "local:2", example_inputs=inputs, pp=2, microbatches=2, per_microbatch=True, precision="fp64"
    )
    plan = made.data
    assert plan.program.rows == ROWS and plan.program.batch_size == ROWS // 2
    assert any("each of 2 microbatches of 4 rows is a batch by itself" in note for note in plan.notes)
    assert any("2 microbatches, each a batch by itself" in words for _, words in facts(plan))
    hold_to_eager(plan, Standard)
    with pytest.raises(PlanMismatchError, match=r"has 6 rows.* was made for 8.*is a batch by itself"):
        trainer_of(plan, model).step({name: x[:6] for name, x in inputs.items()})


@pytest.mark.parametrize("pins", [{"recompute": "full"}, {"pp": 2, "schedule": "searched"}])
def test_layers_made_again_and_searched_schedules_write_buffers_once(pins: dict[str, object]) -> None:
    made = compile_plan(
        model_of(Standard),
        f"local:{pins.get('pp', 1)}",
        example_inputs=batch(),
        microbatches=MICROBATCHES,
        per_microbatch=True,
        precision="fp64",
        **pins,
    )
    hold_to_eager(made.data, Standard)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_check_accumulates_too(dropout: float) -> None:
    plan, model = random_plan(job_of(program_of(Standard, dropout), 1), 3), model_of(Standard, dropout)
    made = Made(model=model, example_inputs=batch(), loss_fn=None)
    single = SingleDevice(plan, made, lambda params: torch.optim.SGD(params, lr=0.1), 0)
    trainer = trainer_of(plan, model)
    trainer.step(batch())
    single.compare(batch(), None, float(trainer.losses()[0]), trainer.grads(), None, trainer.buffers())
    single.errors.raise_failure()
    assert max(single.errors.eager, single.errors.grad, single.errors.param) < 1e-9
