"""Steps captured once and replayed train as steps do: losses, gradients, parameters and buffers bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paraplan as pp
from benchmarks.replaying import NotedGraphs
from paraplan.api import Buckets, Plan
from paraplan.ir.errors import ConstraintError
from paraplan.runtime.graphs import ReplayedSteps, refuse_graphs
from paraplan.runtime.trainer import Trainer

ROWS, STEPS = 6, 7
READ_ON_CPU = ("_local_scalar_dense",)  # ids and labels are looked at there, on a device they are not


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(11, 8), nn.BatchNorm1d(8)
        self.inner, self.drop, self.out = nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 11)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.words(ids)) + self.words(ids).square()
        return nn.functional.cross_entropy(self.out(self.drop(torch.relu(self.inner(x)))), labels)


class Plain(Net):
    """Without what mixes samples, so that a batch may be shorter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()  # type: ignore[assignment]


def batches(rows: int = ROWS) -> Iterator[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(3)
    while True:
        yield {name: torch.randint(0, 11, (rows,), generator=random) for name in ("ids", "labels")}


def planned(cls: type[nn.Module] = Net, **options: Any) -> tuple[Plan, nn.Module]:
    torch.manual_seed(0)
    model = cls().train()
    return pp.compile(model, "local:1", example_inputs=next(batches()), mesh=(1,), **options), model


def started(plan: Plan, model: nn.Module, graphs: bool, **options: Any) -> tuple[Trainer, torch.optim.Optimizer]:
    trainer = plan.executable(copy.deepcopy(model), seed=4, **options)
    if graphs:
        trainer.replay(NotedGraphs(READ_ON_CPU))
    return trainer, trainer.optimizer(torch.optim.AdamW, lr=1e-2)


def trained(trainer: Trainer) -> dict[str, Tensor]:
    return {**{name: x.clone() for name, x in trainer.full_state_dict().items()}, **trainer.state.buffers()}


Loop = Callable[[Trainer, torch.optim.Optimizer], list[Tensor]]


def simple(trainer: Trainer, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found, given = [], batches()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for _ in range(STEPS):
        found.append(trainer.step(next(given)))
        found.append(trainer.clip_grad_norm_(0.5))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return found


def scaled(trainer: Trainer, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found, given, scaler = [], batches(), trainer.scaler(init_scale=2.0**18, growth_interval=2)
    for _ in range(STEPS + 4):
        found.append(trainer.step(next(given)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(torch.tensor(scaler.get_scale()))
    return found


def gradients_added(trainer: Trainer, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Two batches a step, and gradients that the user keeps."""
    found, given = [], batches()
    for step in range(2 * STEPS):
        found.append(trainer.step(next(given)))
        if step % 2:
            kept = [param.grad for param in trainer.state.params.values()]
            optimizer.step()
            trainer.step(next(given))
            found += [x.clone() for x in kept if x is not None]
            optimizer.zero_grad()
    return found


def interrupted(trainer: Trainer, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Evaluations, short batches, skipped updates and weights written by hand between steps."""
    found, given = [], batches()
    for step in range(2 * STEPS):
        batch = next(given)
        if step % 4 == 3:
            batch = {name: x[: ROWS - 2] for name, x in batch.items()}
        found.append(trainer.step(batch))
        if step != 5:
            optimizer.step()
        if step % 3 == 2:
            found.append(trainer.eval_step(next(given)).loss)
            with torch.no_grad():
                for param in trainer.state.params.values():
                    param.clamp_(-0.4, 0.4)
        optimizer.zero_grad()
    return found


CASES: dict[str, tuple[type[nn.Module], dict[str, Any], Loop]] = {
    "float32": (Net, {}, simple),
    "bfloat16": (Net, {"precision": "bf16"}, simple),
    "float16 with a scaler": (Plain, {"precision": "fp16"}, scaled),
    "microbatches": (Plain, {"precision": "bf16", "microbatches": 3}, simple),
    "gradients added": (Net, {}, gradients_added),
    "gradients added, microbatches": (Plain, {"precision": "bf16", "microbatches": 2}, gradients_added),
    "evaluations and short batches": (Plain, {"precision": "bf16", "microbatches": 2}, interrupted),
}


@pytest.mark.parametrize("name", CASES)
def test_replayed_steps_are_the_steps(name: str) -> None:
    cls, options, loop = CASES[name]
    plan, model = planned(cls, **options)
    plainly, replayed = (started(plan, model, graphs) for graphs in (False, True))
    wanted, found = loop(*plainly), loop(*replayed)
    assert [x.tolist() for x in found] == [x.tolist() for x in wanted]
    ours, theirs = trained(replayed[0]), trained(plainly[0])
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)
    steps = replayed[0].replayed
    assert steps is not None and steps.reason == "" and steps.replays["before"] >= STEPS - 2
    assert ("half" if plan.data.program.precision != "fp32" else "") == ("half" if steps.replays["after"] else "")


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    plan, model = planned(precision="bf16")
    wanted = started(plan, model, False)
    simple(*wanted)
    first = started(plan, model, True)
    simple(*first)
    first[0].save(tmp_path / "here", first[1])
    again, second = started(plan, model, True), started(plan, model, True)
    simple(*again)
    again[0].resume(tmp_path / "here", again[1])  # what was captured reads what is loaded
    second[0].resume(tmp_path / "here", second[1])
    losses = [[x.tolist() for x in simple(*each)] for each in (wanted, again, second)]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("forgotten", ["batches", "gradients"])
def test_what_a_replay_would_overwrite_is_seen(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same loops, with a part of `begin` left out, do not pass."""
    begin = ReplayedSteps.begin

    def half(self: ReplayedSteps) -> None:
        kept = [param.grad for param in self.rank.params.values()]
        bound = dict(self.rank.executor.outer)
        begin(self)
        if forgotten == "gradients":
            for param, grad in zip(self.rank.params.values(), kept, strict=True):
                param.grad = grad
        else:
            for home in [x for name, x in self.rank.executor.outer.items() if x is not bound[name]]:
                home.fill_(1)

    monkeypatch.setattr(ReplayedSteps, "begin", half)
    plan, model = planned()
    wanted, found = (gradients_added(*started(plan, model, graphs)) for graphs in (False, True))
    assert [x.tolist() for x in found] != [x.tolist() for x in wanted]


def test_what_cannot_be_captured_runs_as_ever() -> None:
    plan, model = planned()
    trainer, optimizer = started(plan, model, False)
    trainer.replay(NotedGraphs())  # ids are read on the host
    wanted = simple(*started(plan, model, False))
    with pytest.warns(UserWarning, match="not replayed as CUDA graphs: .*_local_scalar_dense"):
        found = simple(trainer, optimizer)
    assert [x.tolist() for x in found] == [x.tolist() for x in wanted]
    assert trainer.replayed is not None and not any(trainer.replayed.replays.values())


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "pipeline": ("2xH100", {"pp": 2, "microbatches": 2}, "stages send each other messages.* pp=1"),
    "states on host": ("1xH100", {"offload_states": "host"}, "wait on host or disk.*without offload"),
    "late updates": ("1xH100", {"offload_states": "host", "delayed_update": 3}, "without delayed_update"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_plans_in_which_the_host_decides_are_refused(name: str) -> None:
    cluster, options, match = REFUSED[name]
    torch.manual_seed(0)
    plan = pp.compile(Plain(), cluster, example_inputs=next(batches()), **options)
    with pytest.raises(ConstraintError, match=match):
        refuse_graphs(plan.data, plan.programs)


def test_graphs_want_cuda_and_one_shape() -> None:
    plan, model = planned()
    with pytest.raises(ConstraintError, match="need CUDA devices, and the plan is for local:1; leave them out"):
        plan.executable(model, cuda_graphs=True)
    with pytest.raises(ConstraintError, match="several shapes have no CUDA graphs"):
        Buckets((plan,)).executable(model, cuda_graphs=True)
