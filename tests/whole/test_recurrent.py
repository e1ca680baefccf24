"""Models with loops over time under plans at random on 1, 2 and 4 ranks: exact, and what was predicted."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from benchmarks.zoo.recurrent import BATCH, STATE, STEPS, WIDTH, WORDS, Layers, Selective
from paraplan.capture import capture, run_program
from paraplan.codegen import build_modules
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.graph import Phase
from paraplan.ir.model.program import Program
from paraplan.ir.model.scan import SCAN
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.sampling import random_plan
from paraplan.rules.loop_dims import loop_dims
from paraplan.rules.strategies import op_strategies
from paraplan.runtime.in_process import InProcessTrainer
from tests.captures import compiled
from tests.numerics import relative_error

torch.set_num_threads(1)
MODELS: dict[str, type[nn.Module]] = {"layers": Layers, "selective": Selective}


def batch() -> dict[str, Tensor]:
    return {"words": torch.randint(0, WORDS, (BATCH, STEPS), generator=torch.Generator().manual_seed(0))}


@cache
def made(name: str) -> tuple[nn.Module, Program]:
    torch.manual_seed(1)
    model = MODELS[name](0.0)
    program = capture(model, batch(), precision="fp64")
    return model.double(), program


@pytest.mark.parametrize("name", MODELS)
def test_random_plans_train_exactly_and_as_predicted(name: str) -> None:
    model, program = made(name)
    wanted = model(**batch())
    params = {key: x.detach() for key, x in model.named_parameters()}
    loss, grads = run_program(program, params, {}, batch(), 0)
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=0.0)
    chosen = set()
    for seed, ranks in enumerate((1, 2, 4, 2, 4)):
        job = Job(program, ClusterSpec.local(ranks), OPTIMIZERS["adamw"], ModelRef(display=name), {})
        plan = random_plan(job, seed, max_microbatches=2)
        programs = verify_plan(plan)
        trainer = InProcessTrainer(plan, programs, [build_modules(each) for each in programs], model, seed=0)
        trainer.step(batch())
        assert relative_error(trainer.grads(), grads) < 1e-9, (name, seed)
        trainer.apply_optimizer(torch.optim.SGD, lr=0.0)
        trainer.step(batch())
        trainer.apply_optimizer(torch.optim.SGD, lr=0.0)
        predicted = [entry.key for entry in entries(programs[0])]
        peak = max(simulate_plan(plan, programs).peak_bytes)
        for rank in range(ranks):
            assert [entry.key for entry in trainer.entries(rank)] == predicted
            assert 1.0 <= peak / trainer.peak_bytes(rank)
        for choice in plan.stages[0].choices:
            pairs = zip(choice.ops, program.kinds[choice.kind].graph.ops, strict=True)
            chosen |= {part for key, op in pairs if op.target == SCAN for part in key.split("|")}
    assert len(chosen) >= 2, f"too few strategies were drawn: {chosen}"


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_for_two_ranks_equals_eager(name: str) -> None:
    torch.manual_seed(1)
    model = MODELS[name](0.0)
    plan = compiled(model, "local:2", alike=False, example_inputs=batch(), precision="fp64", dp=2)
    assert "largest error" in plan.check(model, [batch()])


def test_which_dims_of_a_loop_may_be_sharded() -> None:
    """Rows of both, channels of a scan; not the width of a recurrence, which is contracted on the way to a carry."""
    scan = {False: [BATCH, WIDTH, STATE], True: [BATCH, WIDTH]}
    for name, wanted in {"layers": {False: [BATCH], True: [BATCH]}, "selective": scan}.items():
        _, program = made(name)
        for kind in program.kinds:
            for op in kind.graph.ops:
                if op.target == SCAN:
                    backward = op.phase is Phase.BACKWARD
                    assert [*loop_dims(str(op.args[3])).sizes.values()] == wanted[backward]
                    keys = {strategy.key.split(">")[0] for strategy in op_strategies(op, kind.graph.values, (2,))}
                    assert len(keys) == 1 + len(wanted[backward])
