"""What sees the whole batch at the end of a model runs once a step, whatever the microbatches: equal to eager."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paraplan import fit
from paraplan.capture import capture
from paraplan.codegen import build_modules
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.errors import ConstraintError, InvalidPlanError
from paraplan.ir.model.program import Program
from paraplan.ir.plan import Plan
from paraplan.lowering import lower
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.constraints import Constraints
from paraplan.planner.sampling import random_plan
from paraplan.planner.search import search
from paraplan.rules.time_axis import program_micro
from paraplan.runtime.in_process import InProcessTrainer
from tests.against_eager import eager_error
from tests.numerics import relative_error
from tests.runtime.pipelines import job_of, pipeline_of

ROWS = 8


class Tower(nn.Module):
    """An encoder: residual layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Clip(nn.Module):
    """Two towers, every pair of whose rows is compared; returns the comparison too."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Tower(5), Tower(4)
        self.scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        image, text = F.normalize(self.image(x), dim=-1), F.normalize(self.text(y), dim=-1)
        logits = self.scale.exp() * image @ text.T
        labels = torch.arange(x.shape[0])
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        return {"loss": loss, "logits": logits, "image": image}


class Hardest(nn.Module):
    """A triplet loss that mines the farthest positive and the nearest negative of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Tower(5)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        rows = self.net(x)
        apart = (rows[:, None] - rows[None]).square().sum(-1)
        same = label[:, None] == label[None]
        near = torch.where(same, 1e3, apart).min(1).values
        return F.relu(torch.where(same, apart, 0.0).max(1).values - near + 2.0).mean()


class Balanced(nn.Module):
    """Layers with routers, whose load over the batch is balanced by an auxiliary loss (Switch)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 7)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.routers = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        x, extra = self.first(x), torch.zeros(())
        for layer, router in zip(self.layers, self.routers, strict=True):
            odds = router(x).softmax(-1)
            taken = F.one_hot(odds.argmax(-1), 3).to(odds.dtype)
            x = x + torch.tanh(layer(x)) * (odds * taken).sum(-1, keepdim=True)
            extra = extra + 3 * (taken.mean(0) * odds.mean(0)).sum()
        return F.cross_entropy(self.head(x), label) + 0.1 * extra


class Projected(nn.Module):
    """A projection with batch norm before a loss of cross-correlations (Barlow twins)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Tower(5)
        self.head = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.head(self.net(x))
        return ((rows.T @ rows) / len(rows) - torch.eye(4)).square().sum()


class Remembered(nn.Module):
    """Keeps the last batch's rows in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Tower(5)
        self.register_buffer("last", torch.zeros(ROWS, 6))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.net(x)
        self.last.copy_(rows.detach())
        return rows.square().mean()


MODELS: tuple[type[nn.Module], ...] = (Clip, Hardest, Balanced, Projected, Remembered)


def batch_of(make: type[nn.Module]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 5, generator=generator)
    if make is Clip:
        return {"x": x, "y": torch.randn(ROWS, 4, generator=generator)}
    return {"x": x, "label": torch.arange(ROWS) % 3} if make in (Hardest, Balanced) else {"x": x}


def model_of(make: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().train()


@functools.cache
def program_of(make: type[nn.Module]) -> Program:
    return capture(model_of(make), batch_of(make), precision="fp64")


def hold_to_eager(plan: Plan, make: type[nn.Module]) -> None:
    """Loss, gradients and buffers equal the eager model's, and what ran is what was predicted."""
    programs = verify_plan(plan)
    trainer = InProcessTrainer(plan, programs, [build_modules(each) for each in programs], model_of(make))
    trainer.step(batch_of(make))
    model = copy.deepcopy(model_of(make)).double()
    given = {name: x.double() if x.is_floating_point() else x for name, x in batch_of(make).items()}
    result = model(**given)
    loss = result["loss"] if isinstance(result, dict) else result
    loss.backward()
    assert relative_error(trainer.grads(), {n: p.grad for n, p in model.named_parameters()}) < 1e-9
    assert all(abs(float(mine - loss.detach())) < 1e-12 for mine in trainer.losses())
    wanted = {name: value for name, value in model.named_buffers() if name in trainer.buffers()}
    assert not wanted or relative_error(trainer.buffers(), wanted) < 1e-9
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2)
    trainer.step(batch_of(make))
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2)
    simulation = simulate_plan(plan, programs)
    for rank, at in enumerate(plan.schedule.rank_class):
        assert [entry.key for entry in trainer.entries(rank)] == [entry.key for entry in entries(programs[at])]
        assert 0.98 <= trainer.peak_bytes(rank) / simulation.peak_bytes[at] <= 1.0


def plan_of(make: type[nn.Module], ranks: int, wanted: Callable[[Plan], bool] = lambda plan: True) -> Plan:
    """A random plan of several microbatches."""
    plans = (random_plan(job_of(program_of(make), ranks), seed, max_microbatches=4) for seed in range(40))
    return next(plan for plan in plans if plan.num_microbatches > 1 and wanted(plan))


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_microbatches(make: type[nn.Module], ranks: int) -> None:
    hold_to_eager(plan_of(make, ranks), make)


@pytest.mark.parametrize("make", MODELS)
def test_pipelines(make: type[nn.Module]) -> None:
    program = program_of(make)
    bounds = [(0, 2), (2, len(program.segments))]
    hold_to_eager(pipeline_of(plan_of(make, 2), "gpipe", 2, bounds), make)


def test_the_planner_takes_a_schedule_that_runs_it() -> None:
    plan = search(job_of(program_of(Clip), 4), Constraints(pp=2, dp=2, microbatches=2)).plan
    assert plan.schedule.name == "gpipe" and plan.num_microbatches > 1
    assert any("runs once a step on the whole batch, after all forwards: aten.mm" in note for note in plan.notes)
    assert plan.stages[-1].first <= program_micro(plan.program, 2).tail
    hold_to_eager(plan, Clip)


def test_other_schedules_are_refused_by_name() -> None:
    line = r"aten\.mm\.default \(test_whole_batch\.py.*image @ text.*\)"
    with pytest.raises(ConstraintError, match=rf"schedule 1f1b: {line} reads the whole batch.*use schedule gpipe"):
        search(job_of(program_of(Clip), 2), Constraints(pp=2, schedule="1f1b", microbatches=4), certify=False)
    with pytest.raises(ConstraintError, match=r"buffer 'last' has a row per sample.*use schedule gpipe"):
        search(job_of(program_of(Remembered), 2), Constraints(pp=2, schedule="chimera", microbatches=4), certify=False)
    one = plan_of(Clip, 1)
    bounds = [(0, 2), (2, len(one.program.segments))]
    with pytest.raises(InvalidPlanError, match=rf"schedule 1f1b: 1B0 comes before .*{line}.*use the schedule gpipe"):
        lower(pipeline_of(one, "1f1b", 2, bounds))


def test_a_buffer_with_a_row_per_sample_under_tensor_parallelism() -> None:
    hold_to_eager(search(job_of(program_of(Remembered), 2), Constraints(tp=2), certify=False).plan, Remembered)


def test_fit_in_microbatches() -> None:
    model, given = model_of(Hardest).double(), batch_of(Hardest) | {"x": batch_of(Hardest)["x"].double()}
    eager = copy.deepcopy(model)
    fit(model, given, memory="64MiB", microbatches=2)(**given).backward()
    eager(**given).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert relative_error(found, {name: p.grad for name, p in eager.named_parameters()}) < 1e-9


def test_a_batch_that_does_not_divide_over_the_ranks_is_refused_with_sizes_that_do() -> None:
    match = r"a batch of 8 does not divide over 3 data-parallel ranks in 1 microbatch,.*\(a batch of 6 or 9\)"
    with pytest.raises(ConstraintError, match=match):
        search(job_of(program_of(Balanced), 3), Constraints(dp=3), certify=False)


def test_outputs_of_the_whole_batch() -> None:
    plan = plan_of(Clip, 2)
    programs = verify_plan(plan)
    modules = [build_modules(each) for each in programs]
    trainer = InProcessTrainer(plan, programs, modules, model_of(Clip), build=build_modules)
    found = trainer.eval_step(batch_of(Clip), outputs="global")
    with torch.no_grad():
        wanted = model_of(Clip).double().eval()(**{name: x.double() for name, x in batch_of(Clip).items()})
    torch.testing.assert_close(found.loss, wanted["loss"], rtol=1e-12, atol=1e-13)
    for name in ("logits", "image"):
        torch.testing.assert_close(found.outputs[name], wanted[name], rtol=1e-12, atol=1e-13)


class Spectral(nn.Module):
    """A loss of the spectrum of overlapping windows, whose gradient is added up over the flattened batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.register_buffer("window", torch.hann_window(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.stft(x * self.gain, 8, 4, window=self.window, return_complex=True, center=False)
        return spectrum.abs().square().mean()


def test_a_gradient_added_up_over_a_flattened_batch_is_of_the_whole_batch() -> None:
    model, x = Spectral(), torch.randn(ROWS, 24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    program = capture(model, {"x": x}, precision="fp64")
    assert program_micro(program, 2).has_tail
    plan = search(job_of(program, 1, "momentum"), Constraints(microbatches=2), certify=False).plan
    assert eager_error(plan, model, {"x": x}, lambda model, given: model(**given)) <= 1e-12
