"""Hand-written attentions under tensor parallelism: Megatron's collectives, and the single device's numbers.

Several sequences a rank, and several microbatches: what is split is the heads, however samples and heads are laid out.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch

from benchmarks.attentions import ATTENTIONS, Stack
from benchmarks.layer_collectives import collectives, given_bytes, layer_blocks, planned
from paraplan.capture import capture
from paraplan.capture.reference import StepResult, run_step
from paraplan.codegen import build_modules
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.lowering import lower
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer
from tests.numerics import relative_error
from tests.told import assert_told

torch.set_num_threads(1)
MEGATRON = {
    False: (Counter(all_reduce=2), Counter(all_reduce=2)),
    True: (Counter(all_gather=2, reduce_scatter=2), Counter(all_gather=4, reduce_scatter=2)),
}
ROWS, SEQUENCE, HIDDEN, HEADS = 4, 16, 64, 8


@cache
def captured(name: str) -> tuple[Stack, dict[str, torch.Tensor], Program, StepResult]:
    """A model, a batch, its program, and one step of it in eager torch's order."""
    torch.manual_seed(0)
    model = Stack(name, HIDDEN, HEADS, SEQUENCE).double()
    batch = {key: torch.randint(64, (ROWS, SEQUENCE)) for key in ("ids", "labels")}
    program = capture(model, batch, precision="fp64")
    params = {key: x.detach() for key, x in model.named_parameters()}
    return model, batch, program, run_step(program, params, dict(model.named_buffers()), batch, 0)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_program_computes_what_eager_does(name: str) -> None:
    model, batch, _, step = captured(name)
    model.zero_grad()
    loss = model(**batch)
    loss.backward()
    assert step.loss.item() == pytest.approx(loss.item(), rel=1e-12)
    assert relative_error(step.grads, {key: x.grad for key, x in model.named_parameters()}) <= 1e-10


@pytest.mark.parametrize(
    ("name", "ranks", "sp"), [(name, *((4, False), (2, True))[at % 2]) for at, name in enumerate(ATTENTIONS)]
)
def test_heads_are_split_as_megatron_splits_them(name: str, ranks: int, sp: bool) -> None:
    model, batch, program, expected = captured(name)
    job = Job(program, ClusterSpec.local(ranks), OPTIMIZERS["adamw"], ModelRef(display=name), {})
    pins = Constraints(dp=1, tp=ranks, sp=sp, microbatches=2, recompute="none")
    plan = search(job, pins, 30.0, certify=False).plan
    programs = verify_plan(plan)
    phases = layer_blocks(program, programs[0], "layers.1.")
    if name != "talking heads":
        for phase, most in zip("FB", MEGATRON[sp], strict=True):
            assert collectives(phases[phase]) <= most, phase
    assert_told(plan, programs)
    trainer = InProcessTrainer(plan, programs, [build_modules(each) for each in programs], model)
    assert float(abs(trainer.step(batch) - expected.loss) / abs(expected.loss)) <= 1e-12
    assert relative_error(trainer.grads(), expected.grads) <= 1e-9
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)
    trainer.step(batch)
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)
    predicted = [entry.key for entry in entries(programs[0])]
    peak = max(simulate_plan(plan, programs).peak_bytes)
    for rank in range(ranks):
        assert [entry.key for entry in trainer.entries(rank)] == predicted
        assert 1.0 <= peak / trainer.peak_bytes(rank) <= 1.02


def test_queries_go_by_rows_while_heads_are_mixed() -> None:
    """Scores of all heads would be gathered, or summed, were the mix split as a linear layer is."""
    with torch.device("meta"):
        model = Stack("talking heads", hidden=1024, heads=16, sequence=2048, vocab=1024)
    ids = torch.zeros((4, 2048), dtype=torch.int64, device="meta")
    program = capture(model, {"ids": ids, "labels": ids}, precision="bf16")
    plan = planned(program, "4xH100", Constraints(dp=1, tp=4, microbatches=1, recompute="none"))
    phases = layer_blocks(program, lower(plan)[0], "layers.1.")
    scores = 2 * 4 * 16 * 2048**2
    activations = 2 * 4 * 2048 * 1024
    for phase in "FB":
        assert activations < given_bytes(phases[phase]) < 8 * activations < scores
