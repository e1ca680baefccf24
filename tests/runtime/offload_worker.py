"""What each rank of the two-process offload test runs (through `spawn_local`): `offload_worker.py <folder>`."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from paraplan.api import Plan
from paraplan.codegen import build_modules
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.errors import RuntimeFailure
from paraplan.ir.execution.name import Role
from paraplan.lowering.blocks.remat import recomputable
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.runtime.in_process import InProcessTrainer
from paraplan.runtime.transport.launch import init_distributed, leave_job
from tests.runtime import plans


def pinned() -> Plan:
    """A random plan whose values wait on the host and on disk in turn."""
    plan, _ = plans.planned(plans.SEEDS[0])
    (stage,) = plan.stages
    choices = tuple(
        msgspec.structs.replace(
            choice,
            activations={
                name: ("disk", "host")[index % 2]
                for index, name in enumerate(recomputable(plan.program.kinds[choice.kind]))
            },
        )
        for choice in stage.choices
    )
    made = msgspec.structs.replace(plan, stages=(msgspec.structs.replace(stage, choices=choices),))
    return Plan(made, verify_plan(made))


def main() -> None:
    folder = Path(sys.argv[1])
    rank, _ = init_distributed("gloo", timeout_s=60)
    torch.set_num_threads(1)
    plan, files = pinned(), folder / "files"
    trainer = plan.executable(plans.net(), record=True, offload_folder=files, paced=True)
    local = InProcessTrainer(plan.data, plan.programs, [build_modules(p) for p in plan.programs], plans.net())
    optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-2)
    predicted = [entry.key for entry in entries(plan.programs[0])]
    for step in range(4):
        trainer.record = step % 2 == 0
        loss, wanted = trainer.step(plans.batch(step)), local.step(plans.batch(step))
        assert torch.allclose(loss, wanted, rtol=1e-12), (loss, wanted)
        optimizer.step()
        local.apply_optimizer(torch.optim.AdamW, lr=1e-2)
        if trainer.record:
            assert [entry.key for entry in trainer.entries] == predicted
            assert trainer.tier_peak_bytes == plan.simulate().tier_peak_bytes == local.tier_peak_bytes(rank)
            assert set(trainer.tier_peak_bytes) == {"host", "disk"}
        optimizer.zero_grad()
        assert trainer.state.executor.copier.files == []
    named, held = local.params(), trainer.full_state_dict()
    assert all(torch.allclose(named[name], held[name], rtol=1e-10) for name in named)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, most))  # every rank's disk is full
    before = {name: x.clone() for name, x in trainer.state.tensors.items() if name.role is Role.PARAMETER}
    try:
        trainer.step(plans.batch(4))
    except RuntimeFailure as fault:
        assert f"rank {rank}: offload of" in str(fault) and "free space" in str(fault), fault
    else:
        raise AssertionError("a full disk was not noticed")
    assert all(torch.equal(x, trainer.state.tensors[name]) for name, x in before.items())
    assert not [path for path in files.rglob("*") if f"rank{rank}" in str(path)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    (folder / f"done{rank}").touch()
    leave_job()


if __name__ == "__main__":
    main()
