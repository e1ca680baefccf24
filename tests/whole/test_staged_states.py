"""States on disk, and states fetched to the device: the single device's numbers, exactly what was predicted."""

from __future__ import annotations

import copy
import errno
import itertools
import os
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from paraplan.api import Buckets
from paraplan.capture import capture
from paraplan.codegen import build_modules
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.cost_models.simulator.peak_attribution import BytesRole, peak_of
from paraplan.ir.errors import InfeasibleError, PlanMismatchError, RuntimeFailure
from paraplan.ir.execution import names
from paraplan.ir.execution.name import Role as OuterRole
from paraplan.ir.execution.rank_program import InstrKind, RankProgram, StepKind
from paraplan.ir.plan import Plan
from paraplan.lowering import lower
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer
from paraplan.runtime.trainer import Trainer, TrainerOptions
from paraplan.runtime.transport.distributed import DistributedTransport
from paraplan.runtime.transport.tier_copies import Copier
from tests.numerics import relative_error
from tests.whole.offloaded_states import captured, in_runs, job, planned, single, squares, trained

STAGED = ["disk", "disk-all-grads", "disk-fetched-grads", "disk-all-fetched", "fetched-grads", "all-fetched"]


def as_predicted(plan: Plan, programs: tuple[RankProgram, ...], trainer: InProcessTrainer) -> None:
    simulation = simulate_plan(plan, programs)
    for rank in range(len(trainer.ranks)):
        of = plan.schedule.rank_class[rank]
        assert [entry.key for entry in trainer.entries(rank)] == [entry.key for entry in entries(programs[of])]
        assert 1.0 <= simulation.peak_bytes[of] / trainer.peak_bytes(rank) <= 1.001
        assert trainer.tier_peak_bytes(rank) == simulation.traces[of].tier_peak_bytes != {}


SHARDED = [("zero1", "disk-grads"), ("zero3", "disk-all"), ("zero3", "fetched-grads"), ("pp", "disk-all-fetched-grads")]


@pytest.mark.parametrize(("pin", "states"), [*(("one", states) for states in STAGED), *SHARDED])
def test_steps_equal_one_device_and_are_as_predicted(pin: str, states: str) -> None:
    plan = in_runs(planned("gpt2", pin, states, "momentum"))
    assert {f"@{states}"} == {layouts.text[layouts.text.index("@") :] for layouts in plan.stages[0].params.values()}
    programs = tuple(verify_plan(plan))
    assert sum(step.staged is not None for step in programs[0].steps) > 2, "several runs"
    trainer = trained(plan, "gpt2", torch.optim.SGD, lr=0.05, momentum=0.9)
    assert relative_error(trainer.params(), single("gpt2")[2]) <= 1e-9
    as_predicted(plan, programs, trainer)


@pytest.mark.parametrize(("states", "precision"), [("disk", "bf16"), ("fetched", "fp64")])
def test_staging_changes_nothing(states: str, precision: str) -> None:
    """Adam over the same shards, of which every third lives here and every third on the host; of the others every
    second gradient waits beside them. Products of float64 may add in another order where memory is aligned otherwise.
    """
    device = planned("gpt2", "zero1", "none", precision=precision)
    (stage,) = device.stages
    params = {
        name: msgspec.structs.replace(
            layouts,
            ahead=False,
            state_tier=("", "host", states if states == "disk" else "host")[index % 3],
            fetched=states == "fetched" and index % 3 == 2,
            grad_tier="" if index % 6 != 5 else states if states == "disk" else "host",
        )
        for index, (name, layouts) in enumerate(stage.params.items())
    }
    mixed = in_runs(msgspec.structs.replace(device, stages=(msgspec.structs.replace(stage, params=params),)))
    wanted, found = (trained(plan, "gpt2", torch.optim.AdamW, lr=1e-3) for plan in (device, mixed))
    assert relative_error(found.params(), wanted.params()) <= (1e-11 if precision == "fp64" else 0.0)
    as_predicted(mixed, tuple(verify_plan(mixed)), found)


@pytest.mark.parametrize("states", ["disk", "fetched"])
def test_two_runs_are_there_at_most_and_copies_go_beside_the_update(states: str) -> None:
    (program,) = verify_plan(in_runs(planned("gpt2", "one", states)))
    there: set[tuple[OuterRole, str]] = set()
    most = 0
    under_way = updates = 0
    for step in program.steps:
        block = program.blocks.get(step.block)
        for instr, name in zip(block.instrs if block else (), step.outs, strict=False):
            if instr.kind is InstrKind.COPY and step.block.startswith("bring"):
                assert name is not None
                there.add((name.role, name.source))
                under_way += 1
        most = max(most, len(there))
        if step.block.startswith("came"):
            under_way -= len(step.outs)
        if step.kind is StepKind.UPDATE and step.staged is not None:
            updates += bool(under_way)
        if step.block.startswith("stored"):
            there -= {(name.role, name.source) for name in step.args}
    runs = [step for step in program.steps if step.staged is not None]
    assert not there and updates >= len(runs) - 1, "while one is updated the next one comes"
    assert most <= 2 * 2 * max(len(step.args) for step in runs)


@pytest.mark.parametrize("states", ["disk", "fetched"])
def test_the_peak_taken_apart_adds_up(states: str) -> None:
    plan = in_runs(planned("gpt2", "one", states))
    (program,) = verify_plan(plan)
    trace = simulate_plan(plan, (program,)).traces[0]
    peak = peak_of(program, trace, plan.program)
    assert sum(each.nbytes for each in peak.roles if not each.tier) == trace.peak_bytes
    home = "disk" if states == "disk" else "host"
    away = {each.role: each.nbytes for each in peak.roles if each.tier == home}
    assert away[BytesRole.STATES] == 2 * away[BytesRole.MASTERS] > 0
    plain = planned("gpt2", "one", "none")
    assert trace.peak_bytes < simulate_plan(plain, verify_plan(plain)).peak_bytes[0]


def test_an_optimizer_that_keeps_more_than_there_is_room_for_is_refused() -> None:
    plan = planned("gpt2", "one", "disk", "momentum")
    programs = verify_plan(plan)
    model, _, batch = captured("gpt2")
    trainer = InProcessTrainer(plan, programs, [build_modules(p) for p in programs], model)
    trainer.step(batch)
    with pytest.raises(PlanMismatchError, match=r"AdamW keeps more than 1 tensors for .*'momentum', has room for 1"):
        trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)


def test_a_disk_without_room_is_refused_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("gpt2", "one", "disk")
    programs, model = verify_plan(plan), captured("gpt2")[0]
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**6, 10**6 - 1024, 1024))
    words = r"2\.\d+ MiB of optimizer states .*tmp.* has 1.00 KiB free: 2\.\d+ MiB are missing; .*offload_folder"
    transport = DistributedTransport(plan.stages[0].mesh)
    with pytest.raises(RuntimeFailure, match=words):
        Trainer(
            plan, programs, build_modules(programs[0]), model, transport, TrainerOptions(copier=Copier(folder=tmp_path))
        )
    monkeypatch.undo()
    Trainer(
        plan, programs, build_modules(programs[0]), model, transport, TrainerOptions(copier=Copier(folder=tmp_path))
    )
    assert not list(tmp_path.iterdir()), "the file has no name"
    (group,) = plan.cluster.groups
    small = msgspec.structs.replace(group, disk_bytes=1 << 20)
    given = job(captured("gpt2")[1], 1)
    cluster = msgspec.structs.replace(given.cluster, groups=(small,))
    with pytest.raises(InfeasibleError, match=r"pinned to disk takes at least 2\.\d+ MiB .* room for 1.00 MiB"):
        search(replace(given, cluster=cluster), Constraints(offload_states="disk"), certify=False)


@pytest.mark.parametrize("write", [0, 9])
def test_a_write_that_fails_leaves_every_parameter_with_its_states(
    write: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full at some write of the third step: of a parameter (write 0), or of its states."""
    plan = in_runs(planned("gpt2", "one", "disk"))
    (program,), (model, _, batch) = verify_plan(plan), captured("gpt2")

    def made() -> tuple[Trainer, torch.optim.Optimizer]:
        copier = Copier(beside=True, folder=tmp_path)
        transport = DistributedTransport(plan.stages[0].mesh)
        trainer = Trainer(plan, (program,), build_modules(program), model, transport, TrainerOptions(copier=copier))
        return trainer, trainer.optimizer(torch.optim.AdamW, lr=1e-2)

    def step(trainer: Trainer, optimizer: torch.optim.Optimizer) -> float:
        loss = float(trainer.step(batch))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def held(trainer: Trainer) -> dict[str, list[torch.Tensor]]:
        tensors = trainer.state.tensors
        return {n: [tensors[names.state(n)].clone(), tensors[names.slots(n)].clone()] for n in trainer.state.params}

    twin, other = made()
    trainer, optimizer = made()
    for each in ((twin, other), (trainer, optimizer)):
        step(*each)
        step(*each)
    before, groups = held(twin), [list(group["params"]) for group in optimizer.param_groups]
    assert all(torch.equal(x, y) for n, xs in held(trainer).items() for x, y in zip(xs, before[n], strict=True))
    step(twin, other)
    after, write_at, counted = held(twin), os.pwrite, itertools.count()

    def full(file: int, content: memoryview, start: int) -> int:
        if next(counted) == write:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_at(file, content, start)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RuntimeFailure, match=r"store of \d+ bytes to disk failed: .*No space.*; free space or name"):
        step(trainer, optimizer)
    assert next(counted) == write + 1, "nothing more was written"
    monkeypatch.undo()
    assert not list(tmp_path.iterdir()) and not trainer.state.executor.copier.under_way
    assert [list(group["params"]) for group in optimizer.param_groups] == groups
    sides = {
        name: [0 if torch.equal(x, old) else 1 if torch.equal(x, new) else 2 for x, old, new in zip(*each, strict=True)]
        for name, now in held(trainer).items()
        for each in [(now, before[name], after[name])]
    }
    mixed = [name for name, at in sides.items() if len(set(at)) > 1]
    assert {0, 1} >= {at for each in sides.values() for at in each}
    assert len(mixed) == write % 2, mixed
    assert ([1, 1] in sides.values()) == (write > 1) and [0, 0] in sides.values()
    trainer.zero_grad()
    trainer.step(batch)
    for name in trainer.state.params:
        assert torch.equal(trainer.state.tensors[names.param(name)], trainer.state.tensors[names.state(name)])
    optimizer.step()
    optimizer.zero_grad()
    assert step(trainer, optimizer) > 0.0


def test_states_loaded_into_the_optimizer_are_taken_in() -> None:
    """torch's own load_state_dict, into states that live on disk."""
    plan = in_runs(planned("gpt2", "one", "disk"))
    programs = verify_plan(plan)
    model, _, batch = captured("gpt2")

    def made() -> tuple[Trainer, torch.optim.Optimizer]:
        transport = DistributedTransport(plan.stages[0].mesh)
        trainer = Trainer(plan, programs, build_modules(programs[0]), model, transport)
        return trainer, trainer.optimizer(torch.optim.AdamW, lr=1e-2)

    def step(trainer: Trainer, optimizer: torch.optim.Optimizer) -> None:
        trainer.step(batch)
        optimizer.step()
        optimizer.zero_grad()

    trainer, optimizer = made()
    step(trainer, optimizer)
    other, theirs = made()
    other.load_full_state_dict(trainer.full_state_dict())
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in ((trainer, optimizer), (other, theirs)):
        step(*each)
    wanted = trainer.full_state_dict()
    assert all(torch.equal(x, wanted[name]) for name, x in other.full_state_dict().items())


@pytest.mark.parametrize("states", ["disk-all-grads", "fetched"])
def test_plans_of_several_shapes_share_them_and_evaluate(states: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    shapes = [{"example_inputs": {"input": torch.randn(rows, 16)}} for rows in (8, 4)]
    batches = [torch.randn(rows, 16) for rows in (4, 8, 4, 8)]
    found = []
    for where in ("none", states):
        made = Buckets.compile(model, "local:1", shapes, loss_fn=squares, offload_states=where)
        trainer = made.executable(model)
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-2)
        for x in batches:
            trainer.step({"input": x})
            optimizer.step()
            optimizer.zero_grad()
        held = trainer.checkpoint.full_state_dict()
        found.append((held, float(trainer.eval_step({"input": batches[1]}).loss)))
    (wanted, loss), (held, evaluated) = found
    assert evaluated == loss
    assert all(torch.equal(x, held[name]) for name, x in wanted.items())


def ahead(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, states_ahead=True)


@pytest.mark.parametrize(
    ("pin", "states"), [("one", "fetched"), ("one", "disk-all-grads"), ("zero3", "disk"), ("pp", "fetched-grads")]
)
def test_the_first_states_set_out_beside_the_last_backward(pin: str, states: str) -> None:
    plan = ahead(in_runs(planned("gpt2", pin, states, "momentum")))
    programs = tuple(verify_plan(plan))
    for program in programs:
        blocks = [step.block.split(".") for step in program.steps]
        brought = min(index for index, block in enumerate(blocks) if block[0] == "bring")
        backwards = [index for index, block in enumerate(blocks) if len(block) > 2 and block[2][:1] in "BW"]
        assert brought < backwards[-1] and brought > backwards[-2], "before the last one"
    trainer = trained(plan, "gpt2", torch.optim.SGD, lr=0.05, momentum=0.9)
    assert relative_error(trainer.params(), single("gpt2")[2]) <= 1e-9
    as_predicted(plan, programs, trainer)


def test_states_that_set_out_are_brought_again_where_others_were_loaded_or_the_update_was_skipped() -> None:
    """Against states that set out at the update."""
    later = in_runs(planned("gpt2", "one", "disk"))
    model, _, batch = captured("gpt2")

    def made(plan: Plan) -> tuple[Trainer, torch.optim.Optimizer]:
        (program,) = verify_plan(plan)
        transport = DistributedTransport(plan.stages[0].mesh)
        copier = Copier(beside=True)
        trainer = Trainer(plan, (program,), build_modules(program), model, transport, TrainerOptions(copier=copier))
        return trainer, trainer.optimizer(torch.optim.AdamW, lr=1e-2)

    pairs = [made(plan) for plan in (later, ahead(later))]
    for trainer, optimizer in pairs:
        trainer.optimizer_state_dict(optimizer, create=True)  # an update without a backward
        for _ in range(2):
            trainer.step(batch)
            optimizer.step()
            optimizer.zero_grad()
        trainer.step(batch)
        trainer.zero_grad()  # and no update
        trainer.step(batch)
        under_way = len(trainer.state.executor.copier._flights)
        assert bool(under_way) == trainer.plan.states_ahead
        trainer.load_full_state_dict({name: x + 0.01 for name, x in trainer.full_state_dict().items()})
        optimizer.step()
        optimizer.zero_grad()
        assert not trainer.state.executor.copier._flights
        trainer.step(batch)
        optimizer.step()
    wanted, found = (trainer.full_state_dict() for trainer, _ in pairs)
    assert all(torch.equal(x, wanted[name]) for name, x in found.items())


def test_states_set_out_ahead_where_that_is_faster_and_fits() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12)))
    program = capture(model, {"input": torch.randn(2048, 1024)}, loss_fn=squares)
    given = replace(job(program, 1), cluster=parse_cluster("1xH100"))
    pins = Constraints(offload_states="fetched", microbatches=1)
    found = search(given, pins, certify=False).plan
    later = msgspec.structs.replace(found, states_ahead=False)
    sooner, timely = (simulate_plan(each, lower(each)) for each in (found, later))
    assert found.states_ahead and sooner.step_s < timely.step_s
    limit = msgspec.structs.replace(pins, memory_bytes=max(sooner.peak_bytes) - 1)
    if sooner.peak_bytes > timely.peak_bytes:
        assert not search(given, limit, certify=False).plan.states_ahead
