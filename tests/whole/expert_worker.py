"""What each of two processes runs for `test_expert_parallel`: `expert_worker.py <model> <plan file>`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.zoo import build
from paraplan.codegen import build_modules
from paraplan.jobs.files import decode_plan
from paraplan.lowering import lower
from paraplan.runtime.in_process import InProcessTrainer
from paraplan.runtime.trainer import Trainer, TrainerOptions
from paraplan.runtime.transport.distributed import DistributedTransport
from paraplan.runtime.transport.launch import init_distributed, leave_job

Tensors = dict[str, torch.Tensor]


def close(found: Tensors, wanted: Tensors) -> bool:
    return all(torch.allclose(found[name].double(), wanted[name], rtol=1e-9, atol=1e-12) for name in wanted)


def main() -> None:
    """Steps over Gloo equal those in one process: losses, parameters, and entries where they are recorded."""
    name, file = sys.argv[1], Path(sys.argv[2])
    rank, _ = init_distributed("gloo", timeout_s=60)
    torch.set_num_threads(1)
    plan = decode_plan(file.read_bytes(), "the plan")
    programs = lower(plan)
    transport = DistributedTransport(plan.stages[0].mesh)
    modules = build_modules(programs[0], transport.groups)
    for record in (False, True):
        small = build(name, 0.0)
        trainer = Trainer(plan, programs, modules, small.model, transport, TrainerOptions(record=record))
        local = InProcessTrainer(plan, programs, [build_modules(p) for p in programs], build(name, 0.0).model)
        optimizer = trainer.optimizer(torch.optim.SGD, lr=0.05)
        for _ in range(3):
            loss, wanted = trainer.step(small.batch), local.step(small.batch)
            assert torch.allclose(loss, wanted, rtol=1e-12, atol=0)
            optimizer.step()
            optimizer.zero_grad()
            local.apply_optimizer(torch.optim.SGD, lr=0.05)
            if record:
                assert [e.key for e in trainer.entries] == [e.key for e in local.entries(transport.rank)]
        assert close(trainer.full_state_dict(), local.params())
    file.with_name(f"done{rank}").touch()
    leave_job()


if __name__ == "__main__":
    main()
