"""Any legal plan gives the single device's numbers, does what was predicted, and peaks where it was predicted to.

A few plans a model; `python -m benchmarks.fuzz` runs many.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.zoo import NAMES, build
from benchmarks.zoo.vision import WITHOUT_DROPOUT
from paraplan.capture.reference import run_step
from paraplan.codegen import build_modules
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.lowering.blocks import bundle
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.sampling import random_plan
from paraplan.runtime.in_process import InProcessTrainer
from tests.captures import program_of
from tests.liveness import left_alive
from tests.numerics import relative_error

torch.set_num_threads(1)


PLANS = {
    ("gpt2", 0.1): ((2, 4),),
    ("bert", 0.1): ((2, 4),),
    ("mlp", 0.0): ((1, 2), (2, 4)),
    ("mlp", 0.1): ((1, 2), (2, 4)),
}
"""Seeds and ranks; other models are tried with dropout alone, where they have any, on two ranks."""
CASES = [
    (name, dropout)
    for name in NAMES
    for dropout in (0.0, 0.1)
    if ((name, dropout) in PLANS or bool(dropout) != (name in WITHOUT_DROPOUT))
]


@pytest.mark.parametrize(("name", "dropout"), CASES)
def test_random_plans(name: str, dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    if CASES.index((name, dropout)) % 2:  # nothing of the zoo is large
        monkeypatch.setattr(bundle, "SMALL_BYTES", 0)
    small = build(name, dropout)
    program = program_of(name, dropout)
    tensors = dict(small.model.named_parameters(remove_duplicate=False))
    params = {key: tensors[key].detach() for key in program.params}
    buffers = {key: b.double() if b.is_floating_point() else b for key, b in small.model.named_buffers()}
    loss, grads, written = run_step(program, params, buffers, small.batch, 0)
    for seed, ranks in PLANS.get((name, dropout), ((2, 2),)):
        job = Job(program, ClusterSpec.local(ranks), OPTIMIZERS["adamw"], ModelRef(display=name), {})
        plan = random_plan(job, seed, max_microbatches=4, states_leave=True)
        programs = verify_plan(plan)
        assert not any(left_alive(program) for program in programs)
        trainer = InProcessTrainer(plan, programs, [build_modules(p) for p in programs], small.model)
        assert float(abs(trainer.step(small.batch) - loss) / abs(loss)) <= 1e-9
        assert relative_error(trainer.grads(), grads) <= 1e-9
        assert all(relative_error(trainer.buffers(rank), written) <= 1e-9 for rank in range(ranks))
        trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)
        for _ in range(1 if plan.delayed_update is None else plan.delayed_update + 2):  # until states are there
            trainer.step(small.batch)
            trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)
        predicted = [entry.key for entry in entries(programs[0])]
        peak = max(simulate_plan(plan, programs).peak_bytes)
        for rank in range(ranks):
            assert [entry.key for entry in trainer.entries(rank)] == predicted
            assert 1.0 <= peak / trainer.peak_bytes(rank) <= 1.02
