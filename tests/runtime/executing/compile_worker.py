"""What each rank of the two-process compilation test runs (through `spawn_local`): `compile_worker.py <folder>`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

sys.path.insert(0, str(Path(__file__).parents[3]))

from paraplan.codegen import build_modules
from paraplan.ir.errors import CodegenError
from paraplan.ir.execution.rank_program import InstrKind
from paraplan.runtime.executing.compiled import Compilation
from paraplan.runtime.trainer import Trainer, TrainerOptions
from paraplan.runtime.transport.distributed import DistributedTransport
from paraplan.runtime.transport.launch import init_distributed, leave_job
from tests.runtime import plans

SEED = 0


def trainer_of(transport: DistributedTransport, *compilation: Any) -> Trainer:
    plan, programs = plans.planned(SEED)
    modules = build_modules(programs[0], transport.groups)
    return Trainer(
        plan, programs, modules, plans.net(), transport, TrainerOptions(compilation=Compilation(*compilation))
    )


def failing(rank: int, bad: int, fault: str) -> Callable[..., Any]:
    """A compiler that fails on one rank, or whose code does, or is wrong, there."""

    def compiler(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if rank == bad and fault == "compiling":
            raise ValueError("no compiler here")
        if rank == bad and fault == "wrong":
            return lambda *args: tuple(result + 1 for result in module(*args))
        return module.forward

    return compiler


def main() -> None:
    folder = Path(sys.argv[1])
    rank, _ = init_distributed("gloo", timeout_s=20)
    torch.set_num_threads(1)
    transport = DistributedTransport(plans.planned(SEED)[0].stages[0].mesh)
    program = plans.planned(SEED)[1][0]
    assert any(i.kind is InstrKind.COLLECTIVE for name in program.blocks for i in program.blocks[name].instrs)
    wanted = [trainer_of(transport).step(plans.batch(step)) for step in range(2)]
    for fault in ("", "compiling", "wrong"):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer = trainer_of(transport, ("F", "B"), failing(rank, 1, fault))
            assert all(torch.equal(trainer.step(plans.batch(step)), wanted[step]) for step in range(2))
        reasons = trainer.compiled
        assert reasons and all(bool(why) == bool(fault) for why in reasons.values()), reasons
        if fault == "compiling":
            said = "rank 1 could not compile it: BackendCompilerFailed"
            assert all(why.startswith(said) and "no compiler here" in why for why in reasons.values()), reasons
            assert all(
                any(f"block {name} stays eager: {said}" in str(each.message) for each in told) for name in reasons
            )
        if fault == "wrong" and rank == 0:
            assert set(reasons.values()) == {"rank 1 found a difference"}
    strict = trainer_of(transport, ("F",), failing(rank, 1, "compiling"), True)
    try:
        strict.step(plans.batch())
    except CodegenError as error:
        assert "rank 1 could not compile it" in str(error) and "no compiler here" in str(error)
        assert len(set(transport.everyones(str(error)))) == 1
    else:
        raise AssertionError("a strict trainer took a step")
    (folder / f"done{rank}").touch()
    leave_job()


if __name__ == "__main__":
    main()
