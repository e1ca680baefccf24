"""Gradients that wait beside states, on disk or on the host: the same numbers, clipped, unscaled and added up."""

from __future__ import annotations

import errno
import itertools
import os
import time
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

from paraplan.capture import capture
from paraplan.codegen import build_modules
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.cost_models.simulator.peak_attribution import BytesRole, peak_of
from paraplan.ir.errors import InvalidPlanError, PlanMismatchError, RuntimeFailure
from paraplan.ir.machine.mesh import padded_dims, parse_layout
from paraplan.ir.plan import Plan
from paraplan.lowering import lower
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer
from paraplan.runtime.trainer import Trainer, TrainerOptions
from paraplan.runtime.transport.disk_store import Region
from paraplan.runtime.transport.distributed import DistributedTransport
from paraplan.runtime.transport.tier_copies import Copier
from tests.numerics import relative_error
from tests.whole.offloaded_states import captured, in_runs, job, planned, squares, with_host

Pair = tuple[Trainer, torch.optim.Optimizer]


def made(states: str, precision: str = "fp64", folder: Path | None = None) -> Pair:
    """A trainer of GPT-2 on one device, with its optimizer."""
    plan = in_runs(planned("gpt2", "one", states, precision=precision))
    (program,) = verify_plan(plan)
    transport, copier = DistributedTransport(plan.stages[0].mesh), Copier(beside=True, folder=folder)
    trainer = Trainer(
        plan, (program,), build_modules(program), captured("gpt2")[0], transport, TrainerOptions(copier=copier)
    )
    return trainer, trainer.optimizer(torch.optim.AdamW, lr=1e-2)


def alike(one: Trainer, other: Trainer) -> bool:
    wanted = one.full_state_dict()
    return all(torch.equal(x, wanted[name]) for name, x in other.full_state_dict().items())


def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every read from disk from now on."""
    found, read = [], Region.read
    monkeypatch.setattr(Region, "read", lambda self, into: (found.append(len(into)), read(self, into))[1])
    return found


def landed(trainer: Trainer) -> None:
    """Blocks until no copy that a step began ahead of its need is under way."""
    while trainer.state.executor.copier.under_way:
        time.sleep(0.001)


def test_what_waits_is_on_disk_and_nowhere_else() -> None:
    """Against gradients in the host's memory, under a bundle's bytes at a time."""
    here, there = (in_runs(planned("gpt2", "one", states)) for states in ("disk", "disk-grads"))
    traces = []
    for plan in (here, there):
        (program,) = verify_plan(plan)
        trace = simulate_plan(plan, (program,)).traces[0]
        peak = peak_of(program, trace, plan.program)
        assert sum(each.nbytes for each in peak.roles if not each.tier) == trace.peak_bytes
        traces.append((trace.tier_peak_bytes, {(x.role, x.tier): x.nbytes for x in peak.roles}, trace.copy_s))
    (before, _, copies), (after, roles, slower) = traces
    grads = roles[BytesRole.GRADIENTS, "disk"]
    assert grads == roles[BytesRole.MASTERS, "disk"] == after["disk"] - before["disk"]
    assert before["host"] > grads and before["host"] > after["host"]
    assert slower["copy:disk:out"] > copies["copy:disk:out"] and slower["copy:disk:in"] > copies["copy:disk:in"]


def test_clipping_and_unscaling_read_nothing_and_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 with a scale that is too large at first: unscaled, clipped, skipped, against gradients on the host."""
    _, _, batch = captured("gpt2", "fp16")
    pairs = [made(states, "fp16") for states in ("disk", "disk-grads")]
    scalers = [trainer.scaler(init_scale=2.0**20, growth_interval=3) for trainer, _ in pairs]
    scales, norms = [], []
    for number in range(8):
        for (trainer, optimizer), scaler in zip(pairs, scalers, strict=True):
            trainer.step(batch)
            landed(trainer)
            with monkeypatch.context() as patched:
                found = reads(patched)
                scaler.unscale_(optimizer)
                norms.append(trainer.clip_grad_norm_(0.1, 2.0 if number % 2 else float("inf")))
                assert not found
            waiting = trainer.state.waiting
            assert all(waiting.is_known(n, trainer.state.params[n].grad) for n in waiting.names)
        (here, there), names = ([trainer.state for trainer, _ in pairs], pairs[1][0].state.waiting.names)
        for name in names:
            taken = there.waiting.value(name, there.params[name].grad)
            assert torch.equal(here.params[name].grad.nan_to_num(), taken.nan_to_num()), name
        for (_, optimizer), scaler in zip(pairs, scalers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        assert scales[-1] == scales[-2] and torch.allclose(*norms[-2:], rtol=1e-12, equal_nan=True), number
        assert alike(pairs[0][0], pairs[1][0]), number
    assert pairs[1][0].state.waiting.names
    assert {after < before for before, after in itertools.pairwise(scales[::2])} == {True, False}, "skipped and not"


def test_a_gradient_somebody_writes_to_is_as_written() -> None:
    """Values clamped before the norm is taken, of a p that is not known; steps added up; then a refusal."""
    _, _, batch = captured("gpt2")
    pairs = [made(states) for states in ("disk", "disk-all-grads")]
    for trainer, optimizer in pairs:
        trainer.step(batch)
        for param in trainer.state.params.values():
            assert param.grad is not None
            param.grad.clamp_(-1e-3, 1e-3)
        trainer.clip_grad_norm_(0.01)
        optimizer.step()
        optimizer.zero_grad()
        trainer.step(batch)
        trainer.clip_grad_norm_(0.01)
        trainer.step(batch)  # added to what was clipped
        trainer.clip_grad_norm_(0.01, 3.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        trainer.step(batch)
        for param in trainer.state.params.values():
            param.grad = param.grad * 2
        trainer.step(batch)
        optimizer.step()
    (one, _), (other, optimizer) = pairs
    wanted = one.full_state_dict()
    assert relative_error(other.full_state_dict(), wanted) <= 1e-9
    name = next(iter(other.state.params))
    before, own = other.full_state_dict(), other.state.params[name]
    other.zero_grad()
    other.step(batch)
    other.clip_grad_norm_(0.01)
    own.grad.mul_(2.0)
    with pytest.raises(PlanMismatchError, match=rf"gradient of {name}, .* written to after it was clipped .*grads"):
        optimizer.step()
    assert all(torch.equal(x, before[key]) for key, x in other.full_state_dict().items())


@pytest.mark.parametrize("write", [0, 3])
def test_a_disk_that_fills_fails_the_step_and_leaves_all_as_it_was(
    write: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write of the third step's gradients; the next step is as if that one had not been."""
    _, _, batch = captured("gpt2")
    pairs = [made("disk-grads", folder=tmp_path) for _ in range(2)]

    def step(trainer: Trainer, optimizer: torch.optim.Optimizer) -> None:
        trainer.step(batch)
        trainer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        for each in pairs:
            step(*each)
    (twin, _), (trainer, optimizer) = pairs
    write_at, counted = os.pwrite, itertools.count()

    def full(file: int, content: memoryview, start: int) -> int:
        if next(counted) == write:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_at(file, content, start)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(
            RuntimeFailure, match=r"store of \d+ bytes to disk failed: .*No space.*; free space or name"
        ):
            trainer.step(batch)
    assert next(counted) == write + 1, "nothing more was written"
    assert not list(tmp_path.iterdir()) and not trainer.state.executor.copier.under_way
    assert alike(twin, trainer) and all(param.grad is None for param in trainer.state.params.values())
    optimizer.step()  # without gradients
    assert alike(twin, trainer)
    for each in pairs:
        step(*each)
    assert alike(twin, trainer)


def odd() -> tuple[nn.Module, dict[str, Tensor]]:
    """Dims of 13 and 7 over two ranks: padded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 13), nn.Tanh(), nn.Linear(13, 13, bias=False))
    return model, {"input": torch.randn(8, 13)}


def test_padding_is_not_measured() -> None:
    model, batch = odd()
    program = capture(model, batch, loss_fn=squares, precision="fp64")
    trainers = []
    assert padded_dims((13, 13), parse_layout("S0"), (2,))
    for states in ("", "@disk-grads"):
        pins = Constraints(dp=2, params=dict.fromkeys(program.params, "S0/S0/S0" + states))
        plan = in_runs(search(job(program, 2), pins, certify=False).plan)
        programs = verify_plan(plan)
        kept = [block for name, block in programs[0].blocks.items() if name.startswith("keep.")]
        assert all("paraplan.fill_tail_" in {each.target for each in block.instrs} for block in kept)
        trainer = InProcessTrainer(plan, programs, [build_modules(p) for p in programs], model)
        norms = []
        for _ in range(2):
            trainer.step(batch)
            norms.append(float(trainer.clip_grad_norm_(1e-3)))
            trainer.apply_optimizer(torch.optim.SGD, lr=0.1)
        assert [e.key for e in trainer.entries(0)] == [e.key for e in entries(programs[0])]
        trainers.append((trainer.params(), norms))
    (wanted, norms), (found, measured) = trainers
    assert measured == pytest.approx(norms, rel=1e-12) and relative_error(found, wanted) <= 1e-9


def test_gradients_go_to_disk_only_where_nothing_else_fits() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(20)))
    given = job(capture(model, {"input": torch.randn(64, 256)}, loss_fn=squares), 1)
    layer = 256 * 256 * 4
    free = Constraints(offload="disk", memory_bytes=14 * layer, microbatches=1, recompute="none")
    roomy = search(with_host(given, 1 << 30), free, certify=False).plan
    assert not any(layouts.grad_tier for layouts in roomy.stages[0].params.values())
    tight = with_host(given, 14 * layer)
    plan = search(tight, free, certify=False).plan
    waits = {layouts.grad_tier for layouts in plan.stages[0].params.values()}
    made = simulate_plan(plan, lower(plan))
    assert "disk" in waits and max(made.peak_bytes) <= 14 * layer and made.tier_peak_bytes["host"] <= 14 * layer
    assert any(note.startswith("gradients wait on disk: ") and "no plan was found" in note for note in plan.notes), (
        plan.notes
    )


def test_a_gradient_waits_with_states_that_come_to_their_update_alone() -> None:
    for states in ("none", "host", "all"):
        plan = planned("gpt2", "one", states)
        (stage,) = plan.stages
        params = {n: msgspec.structs.replace(x, grad_tier="disk", ahead=False) for n, x in stage.params.items()}
        wrong = replace_stage(plan, params)
        with pytest.raises(InvalidPlanError, match=r"grads=disk with states=.*: a gradient is where its update is"):
            verify_plan(wrong)


def replace_stage(plan: Plan, params: dict[str, object]) -> Plan:
    return msgspec.structs.replace(plan, stages=(msgspec.structs.replace(plan.stages[0], params=params),))
