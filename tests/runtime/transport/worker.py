"""What each rank of the two-process tests runs (through `spawn_local`): `worker.py <mode> <folder>`."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parents[3]))

from paraplan.codegen import build_modules
from paraplan.ir.execution.name import Name
from paraplan.ir.machine.collectives import COLLECTIVES
from paraplan.runtime.executing import instructions
from paraplan.runtime.executing.executor import Executor
from paraplan.runtime.executing.stepping import make_executors, step_together
from paraplan.runtime.in_process import InProcessTrainer
from paraplan.runtime.trainer import Trainer, TrainerOptions
from paraplan.runtime.transport.collectives import IMPLEMENTATIONS
from paraplan.runtime.transport.distributed import DistributedTransport
from paraplan.runtime.transport.launch import init_distributed, leave_job
from tests.named import named
from tests.runtime import plans
from tests.runtime.programs import collectives_program, pair
from tests.runtime.transport.collective_cases import cases

Tensors = dict[Name, torch.Tensor]


def values_of(rank: int) -> Tensors:
    found: Tensors = {}
    for m in range(2):
        found[named(f"x@{m}")] = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3).pow(rank + 1) + m
        found[named(f"idle@{m}")] = torch.zeros(5, dtype=torch.float64)
    return found


def book(executor: Executor) -> None:
    executor.bind(values_of(executor.rank))
    for tensor in executor.outer.values():
        executor.account.ledger.register(tensor)


def by_hand(transport: DistributedTransport) -> None:
    """The hand-written program: fast and recorded over Gloo equal the in-process run, entries too."""
    program = collectives_program()
    local, executors = make_executors(pair(), [program], (0, 0), [build_modules(program)])
    for executor in executors:
        book(executor)
    step_together(local, executors, [program.steps] * 2)
    wanted = executors[transport.rank]
    modules = build_modules(program, transport.groups)
    fast = Executor(program, modules, (transport.rank,), transport, transport.rank)
    fast.bind(values_of(transport.rank))
    fast.run(program.steps)
    recorded = Executor(program, modules, (transport.rank,), transport, transport.rank)
    book(recorded)
    step_together(transport, [recorded], [program.steps])
    for other in (fast, recorded):
        assert set(other.outer) == set(wanted.outer)
        assert all(torch.equal(other.outer[name], wanted.outer[name]) for name in wanted.outer)
    assert [e.key for e in recorded.account.entries] == [e.key for e in wanted.account.entries]
    assert recorded.account.ledger.peak_bytes == wanted.account.ledger.peak_bytes


def by_definition(transport: DistributedTransport) -> None:
    """Every collective, started as emitted code does and as recordings do, equals its definition."""
    rank, group = transport.rank, transport.groups[0]
    for case in cases(2):
        record, implementation, route = COLLECTIVES[case.name], IMPLEMENTATIONS[case.name], case.route(rank)
        for start in (implementation.start, implementation.start_in_place):
            if start is not None:
                found = start(case.inputs[rank].clone(), case.reduction, 2, group, *(route or ()))
                assert torch.equal(instructions.wait_holding(found), case.wanted[rank]), case
        for in_place in (False, record.in_place):
            x = case.inputs[rank].clone()
            handle = transport.issue(case.name, x, case.reduction, 0, in_place, route)
            assert transport.ready(handle)
            assert torch.equal(handle.out, case.wanted[rank]), case
            assert (handle.out is x) == in_place


def close(found: Tensors, wanted: Tensors) -> bool:
    return all(torch.allclose(found[name].double(), wanted[name].double(), rtol=1e-10, atol=1e-12) for name in wanted)


def train(seed: int, record: bool, folder: Path) -> None:
    """A random plan over Gloo equals the same plan in one process; checkpoints load back."""
    plan, programs = plans.planned(seed)
    transport = DistributedTransport(plan.stages[0].mesh)
    modules = build_modules(programs[0], transport.groups)
    trainer = Trainer(plan, programs, modules, plans.net(), transport, TrainerOptions(record=record))
    local = InProcessTrainer(plan, programs, plans.emitted(programs), plans.net())
    optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0)
    batches = trainer.shard(plans.batch(step) for step in range(3))
    for step, mine in enumerate(batches):
        loss, wanted = trainer.step(mine if step else plans.batch(0)), local.step(plans.batch(step))
        assert torch.allclose(loss, wanted, rtol=1e-13, atol=0)
        assert torch.allclose(trainer.clip_grad_norm_(0.5), local.clip_grad_norm_(0.5), rtol=1e-13, atol=0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        local.apply_optimizer(torch.optim.AdamW, lr=1e-2)
        if record:
            assert [e.key for e in trainer.entries] == [e.key for e in local.entries(transport.rank)]
    full = trainer.full_state_dict()
    assert close(full, local.params())
    stored = dict(trainer.named_parameters())
    assert close({name: value.full_tensor() for name, value in stored.items()}, full)
    checkpoints(trainer, optimizer, full, folder / f"plan{seed}")


def checkpoints(trainer: Trainer, optimizer: torch.optim.Optimizer, full: Tensors, folder: Path) -> None:
    state = {"model": trainer.state_dict(), "optimizer": trainer.optimizer_state_dict(optimizer)}
    dcp.save(state, checkpoint_id=folder)
    trainer.load_full_state_dict({name: torch.zeros_like(value) for name, value in full.items()})
    assert not any(bool(value.any()) for value in trainer.full_state_dict().values())
    fresh = {"model": trainer.state_dict()}
    dcp.load(fresh, checkpoint_id=folder)
    trainer.load_state_dict(fresh["model"])
    assert all(torch.equal(value, full[name]) for name, value in trainer.full_state_dict().items())
    assert close({name: value.full_tensor() for name, value in trainer.named_parameters()}, full)


def across(folder: Path) -> None:
    """A checkpoint of one plan loads into another."""
    plan, programs = plans.planned(plans.SEEDS[1])
    transport = DistributedTransport(plan.stages[0].mesh)
    trainer = Trainer(plan, programs, build_modules(programs[0], transport.groups), plans.net(), transport)
    state = {"model": trainer.state_dict()}
    dcp.load(state, checkpoint_id=folder / f"plan{plans.SEEDS[0]}")
    trainer.load_state_dict(state["model"])
    first, lowered = plans.planned(plans.SEEDS[0])
    local = InProcessTrainer(first, lowered, plans.emitted(lowered), plans.net())
    for step in range(3):
        local.step(plans.batch(step))
        local.clip_grad_norm_(0.5)
        local.apply_optimizer(torch.optim.AdamW, lr=1e-2)
    assert close(trainer.full_state_dict(), local.params())


def read_nothing() -> None:
    """Dies of a segmentation fault."""
    ctypes.string_at(0)


def main() -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    rank, _ = init_distributed("gloo", timeout_s=60)
    torch.set_num_threads(1)
    if mode == "die" and rank == 1:
        raise ValueError("this rank gives up")
    if mode == "crash" and rank == 1:
        read_nothing()
    transport = DistributedTransport(pair())
    by_hand(transport)
    by_definition(transport)
    if mode == "all":
        for index, seed in enumerate(plans.SEEDS):
            train(seed, index == 0, folder)
        across(folder)
    (folder / f"done{rank}").touch()
    leave_job()


if __name__ == "__main__":
    main()
