"""Steps captured once and replayed train as steps do: losses, gradients, parameters and buffers bit for bit."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import paraplan as pp
from benchmarks.replaying import NotedGraphs
from paraplan.api import Buckets, Plan
from paraplan.cost_models.simulator.graph_memory import graphs_bytes
from paraplan.ir import plan as ir_plan
from paraplan.ir.errors import ConstraintError
from paraplan.jobs.run import RunResult, account, update
from paraplan.jobs.trainers import check_graphs
from paraplan.runtime.executing.graphs import ReplayedSteps, refuse_graphs
from paraplan.runtime.executing.tracker import Ledger, Tracker
from paraplan.runtime.rank import Rank
from paraplan.runtime.trainer import Trainer
from tests.captures import compiled

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


class Several(Plain):
    """Two losses."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"first": super().forward(ids, labels), "second": self.words(ids).square().mean()}


def batches(rows: int = ROWS) -> Iterator[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(3)
    while True:
        yield {name: torch.randint(0, 11, (rows,), generator=random) for name in ("ids", "labels")}


def planned(cls: type[nn.Module] = Net, **options: Any) -> tuple[Plan, nn.Module]:
    torch.manual_seed(0)
    model = cls().train()
    return compiled(model, "local:1", example_inputs=next(batches()), mesh=(1,), **options), model


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


def held(trainer: Trainer, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What a user keeps of every step, looked at after the last."""
    found, given = [], batches()
    for _ in range(STEPS):
        found += [trainer.step(next(given)), *trainer.metrics.values()]
        found += [param.grad for param in trainer.state.params.values() if param.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found


def partly_recorded(trainer: Trainer, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Steps of which either part is recorded, or both, and what metrics say after them."""
    found, given = [], batches()
    for step in range(3 * STEPS):
        trainer.record = step % 4 == 1
        found.append(trainer.step(next(given)))
        trainer.record = step % 3 == 1
        optimizer.step()
        found += trainer.metrics.values()
        optimizer.zero_grad()
    trainer.record = False
    return found


CASES: dict[str, tuple[type[nn.Module], dict[str, Any], Loop]] = {
    "float32": (Net, {}, simple),
    "bfloat16": (Net, {"precision": "bf16"}, simple),
    "float16 with a scaler": (Plain, {"precision": "fp16"}, scaled),
    "microbatches": (Plain, {"precision": "bf16", "microbatches": 3}, simple),
    "gradients added": (Net, {}, gradients_added),
    "results kept": (Plain, {"precision": "bf16"}, held),
    "results kept of several losses": (Several, {"precision": "bf16", "loss": "sum"}, held),
    "partly recorded": (Several, {"precision": "bf16", "loss": "sum"}, partly_recorded),
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
    """The same loops, with a part left out, do not pass."""
    if forgotten == "gradients":
        monkeypatch.setattr(ReplayedSteps, "_give_room", lambda self: None)
    else:
        start = Rank.start

        def stale(self: Rank, batch: Any, homes: dict[str, Tensor] | None = None) -> None:
            held = {name: x.clone() for name, x in (homes or {}).items()}
            start(self, batch, homes)
            for name, x in held.items():
                self.executor.outer[name].copy_(x)

        monkeypatch.setattr(Rank, "start", stale)
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


def test_one_part_alone_is_not_replayed() -> None:
    class Once(NotedGraphs):
        def capture(self, run: Callable[[], Iterable[Tensor]]) -> Callable[[], None]:
            self.capture = self.fail  # type: ignore[method-assign]
            replay = super().capture(run)
            made.append(weakref.ref(replay))
            return replay

        def fail(self, run: Callable[[], Iterable[Tensor]]) -> Callable[[], None]:
            raise RuntimeError("no graph of this")

    made: list[weakref.ref[Any]] = []
    plan, model = planned(precision="bf16")
    wanted = simple(*started(plan, model, False))
    trainer, optimizer = started(plan, model, False)
    trainer.replay(Once(READ_ON_CPU))
    with pytest.warns(UserWarning, match="not replayed as CUDA graphs: .*no graph of this"):
        found = simple(trainer, optimizer)
    assert [x.tolist() for x in found] == [x.tolist() for x in wanted]
    assert trainer.replayed is not None and trainer.replayed.replays == {"before": 1, "after": 0}
    assert not trainer.replayed.homes and made[0]() is None  # nor is memory held for it


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


class Booked(NotedGraphs):
    """Keeps an account of what a rank's graphs make beside what is there, and replays nothing.

    Attributes:
        still: bytes that are there when the first is captured.
        pool: the most bytes that graphs have had.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tracker, self.ledger, self.still = Tracker(), Ledger(), 0
        self.run: tuple[Trainer, torch.optim.Optimizer] | None = None

    def capture(self, run: Callable[[], Iterable[Tensor]]) -> Callable[[], None]:
        assert self.run is not None
        if not self.still:
            for x in self.run[0].state.executor.outer.values():
                self.ledger.register(x)
            self.still = self.ledger.live_bytes
        with self.tracker, self.tracker.booking(self.ledger):
            list(run())
        return lambda: None

    @property
    def pool(self) -> int:
        return self.ledger.peak_bytes - self.still


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (Plain, {}),
        (Plain, {"microbatches": 3}),
        (Net, {"precision": "bf16"}),
        (Plain, {"precision": "bf16", "microbatches": 2}),
    ],
)
def test_the_pool_holds_what_is_predicted(cls: type[nn.Module], options: dict[str, Any]) -> None:
    plan, model = planned(cls, **options)
    (program,), graphs = plan.programs, Booked()
    trainer, optimizer = graphs.run = started(plan, model, False)
    trainer.replay(graphs)
    given = batches()
    for step in range(4):
        trainer.record = step == 1
        trainer.step(next(given))
        if step == 1:  # as the eager step beside it
            unseen = plan.prediction.peak_bytes[0] - trainer.peak_bytes
            trainer.record = False
        optimizer.step()
        optimizer.zero_grad()
    said, states = graphs_bytes(program), program.update_bytes("")[0]
    assert said.still == graphs.still + states
    assert 0 <= said.pool - graphs.pool <= unseen <= 0.02 * said.peak
    assert said.peak >= plan.prediction.peak_bytes[0]


def test_a_pool_without_room_and_recorded_steps_are_refused() -> None:
    plan = pp.compile(Plain(), "1xH100", example_inputs=next(batches()))
    peak = max(graphs_bytes(program).peak for program in plan.programs)
    check_graphs(with_memory(plan, peak), plan.programs)
    with pytest.raises(ConstraintError, match=r"CUDA graphs need .* for the graphs' pool .*leave CUDA graphs out"):
        check_graphs(with_memory(plan, peak - 1), plan.programs)
    with pytest.raises(ConstraintError, match="record=True"):
        plan.executable(Plain(), cuda_graphs=True, record=True)


def with_memory(plan: Plan, room: int) -> ir_plan.Plan:
    """A plan as if its devices had so many bytes."""
    replace, cluster = msgspec.structs.replace, plan.data.cluster
    groups = tuple(replace(each, device=replace(each.device, memory_bytes=room)) for each in cluster.groups)
    return replace(plan.data, cluster=replace(cluster, groups=groups))


@pytest.mark.parametrize("recorded", [1, 5])
def test_recorded_steps_are_what_was_predicted(recorded: int) -> None:
    plan, model = planned(Plain, microbatches=2)
    trainer, optimizer = started(plan, model, True)
    given, result = batches(), RunResult()
    for step in range(recorded + 1):
        trainer.record = step == recorded
        trainer.step(next(given))
        update(trainer, optimizer, None, None)
    account(trainer, plan.programs, result)
    assert result.entries_difference == "" and result.measured_peak_bytes == list(plan.prediction.peak_bytes)


def test_graphs_want_cuda_and_one_shape() -> None:
    plan, model = planned()
    with pytest.raises(ConstraintError, match="need CUDA devices, and the plan is for local:1; leave them out"):
        plan.executable(model, cuda_graphs=True)
    with pytest.raises(ConstraintError, match="several shapes have no CUDA graphs"):
        Buckets((plan,)).executable(model, cuda_graphs=True)
