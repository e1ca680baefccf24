"""Context parallelism as a layout: small models with the sequence sharded on an axis, attention in each of its ways.

Values in float64 against the single device, every rank's record against the prediction, and the measured peak of live
bytes against the predicted one. Llama is causal with grouped queries; BERT has a padding mask and so no causal one.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from benchmarks.zoo.language import transformer
from benchmarks.zoo.small import Small
from paraplan.capture import capture
from paraplan.capture.reference import StepResult, run_step
from paraplan.codegen import build_modules
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.errors import ConstraintError
from paraplan.ir.execution.rank_program import InstrKind, RankProgram
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import check_constraints
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer
from tests.numerics import relative_error
from tests.told import assert_told

torch.set_num_threads(1)
KEY = {"gather": "s", "alltoall": "h", "ring": "ring", "stripes": "stripes"}


@cache
def captured(name: str, dropout: float) -> tuple[Small, Program, StepResult]:
    """A model, its program, and one step of it on one device."""
    small = transformer(name, dropout, batch=4, seq=16)
    if name == "bert":
        lengths = torch.tensor([16, 3, 9, 7]).unsqueeze(-1)
        small = Small(name, small.model, {**small.batch, "attention_mask": (torch.arange(16) < lengths).long()})
    program = capture(small.model, small.batch, precision="fp64")
    tensors = dict(small.model.named_parameters(remove_duplicate=False))
    params = {key: tensors[key].detach() for key in program.params}
    buffers = {key: b.double() if b.is_floating_point() else b for key, b in small.model.named_buffers()}
    return small, program, run_step(program, params, buffers, small.batch, 0)


def planned(name: str, dropout: float, ranks: int, constraints: Constraints) -> tuple[Plan, tuple[RankProgram, ...]]:
    program = captured(name, dropout)[1]
    job = Job(program, ClusterSpec.local(ranks), OPTIMIZERS["adamw"], ModelRef(display=name), {})
    plan = search(job, constraints, 30.0, certify=False).plan
    return plan, verify_plan(plan)


def collectives(program: RankProgram) -> Counter[str]:
    """Collectives that serve attention, by kind, in one call of every block."""
    found: Counter[str] = Counter()
    for block in program.blocks.values():
        of_attention = {i.origin for i in block.instrs if i.target.startswith("paraplan.attention")} - {-1}
        found.update(i.target for i in block.instrs if i.kind is InstrKind.COLLECTIVE and i.origin in of_attention)
    return found


def attention_keys(plan: Plan) -> set[str]:
    pairs = zip(plan.stages[0].choices, plan.program.kinds, strict=True)
    ops = [pair for choice, kind in pairs for pair in zip(choice.ops, kind.graph.ops, strict=True)]
    return {key for key, op in ops if op.target.startswith("paraplan.attention")}


@pytest.mark.parametrize(
    ("name", "dropout", "ranks", "pins"),
    [
        ("llama", 0.0, 2, {"cp": 2, "cp_mode": "alltoall"}),
        ("llama", 0.1, 2, {"cp": 2, "cp_mode": "ring"}),
        ("llama", 0.1, 4, {"cp": 4, "cp_mode": "gather"}),
        ("llama", 0.0, 4, {"cp": 2, "dp": 2, "cp_mode": "ring", "microbatches": 2}),
        ("llama", 0.0, 4, {"cp": 4, "cp_mode": "stripes"}),
        ("gpt2", 0.1, 4, {"cp": 2, "dp": 2, "cp_mode": "stripes", "microbatches": 2}),
        ("bert", 0.1, 4, {"cp": 4, "cp_mode": "ring"}),
        ("bert", 0.1, 4, {"cp": 4, "cp_mode": "alltoall"}),
    ],
)
def test_a_sharded_sequence(name: str, dropout: float, ranks: int, pins: dict[str, object]) -> None:
    small, _, expected = captured(name, dropout)
    plan, programs = planned(name, dropout, ranks, Constraints(**pins))  # type: ignore[arg-type]
    axis = plan.stages[0].mesh.axes.index("cp")
    assert {key.split("|")[axis] for key in attention_keys(plan)} == {KEY[pins["cp_mode"]]}  # type: ignore[index]
    assert {layout.split(",")[axis] for layout in plan.stages[0].batch.values()} == {"S1"}
    assert_told(plan, programs)
    trainer = InProcessTrainer(plan, programs, [build_modules(p) for p in programs], small.model)
    assert float(abs(trainer.step(small.batch) - expected.loss) / abs(expected.loss)) <= 1e-12
    assert relative_error(trainer.grads(), expected.grads) <= 1e-9
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)
    trainer.step(small.batch)
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)
    predicted = [entry.key for entry in entries(programs[0])]
    peak = max(simulate_plan(plan, programs).peak_bytes)
    for rank in range(ranks):
        assert [entry.key for entry in trainer.entries(rank)] == predicted
        assert 1.0 <= peak / trainer.peak_bytes(rank) <= 1.02


def test_each_mode_communicates_in_its_own_way() -> None:
    """Per layer of Llama on two ranks: what brings attention its inputs; results leave by what reads them."""
    found = {
        mode: collectives(planned("llama", 0.0, 2, Constraints(cp=2, cp_mode=mode))[1][0])
        for mode in ("gather", "alltoall", "ring", "stripes")
    }
    # one forward and one backward block: keys and values are gathered in each
    assert found["gather"] == {"all_gather": 4}
    # queries, keys, values, which are kept as they arrive; backward the gradient: never gathered and sliced
    assert found["alltoall"] == {"all_to_all": 4}
    # one turn of keys and values in each phase, two turns of their gradients
    assert found["ring"] == {"permute": 8}
    # keys and values gathered in each phase, and their gradients scattered; queries and results, and backward these,
    # their sums, the gradient and what becomes of it
    assert found["stripes"] == {"all_gather": 4, "reduce_scatter": 2, "all_to_all": 3 + 5}


def test_heads_that_do_not_divide_are_named() -> None:
    with pytest.raises(ConstraintError, match="2 key/value heads do not divide over 4 ranks"):
        planned("llama", 0.0, 4, Constraints(cp=4, cp_mode="alltoall"))


class WrittenOut(nn.Module):
    """Attention by hand, or none."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.attends, self.proj = attends, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.proj(x)
        if self.attends:
            q = torch.softmax(q @ x.transpose(1, 2), -1) @ x
        return q.square().mean()


@pytest.mark.parametrize("mode", ["gather", "alltoall", "ring", "stripes"])
@pytest.mark.parametrize("attends", [True, False])
def test_a_mode_that_no_attention_takes_is_refused(mode: str, attends: bool) -> None:
    program = capture(WrittenOut(attends), {"x": torch.randn(4, 16, 8)})
    job = Job(program, ClusterSpec.local(2), OPTIMIZERS["sgd"], ModelRef(display="model"), {})
    with pytest.raises(ConstraintError, match=f"cp_mode={mode}.* 0 were found.*leave cp_mode out") as caught:
        search(job, Constraints(cp=2, cp_mode=mode), certify=False)
    assert ("test_context_parallel.py" in str(caught.value)) == attends, "the softmax of attention by hand is named"
    search(job, Constraints(cp=2), certify=False)


def test_features_are_no_sequence() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    program = capture(model, {"input": torch.randn(8, 16)}, loss_fn=lambda out, _: out.square().mean())
    job = Job(program, ClusterSpec.local(2), OPTIMIZERS["sgd"], ModelRef(display="model"), {})
    with pytest.raises(ConstraintError, match=r"cp=2: dim 1 of the batch \(input \[8, 16\]\) is no sequence.*leave cp"):
        search(job, Constraints(cp=2), certify=False)


def test_a_ring_over_a_sequence_that_does_not_divide_is_named() -> None:
    with pytest.raises(ConstraintError, match="a sequence of 16 does not divide over 3"):
        planned("llama", 0.0, 3, Constraints(cp=3, cp_mode="ring"))


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"cp": 2, "cp_mode": "zigzag"}, "one of gather, alltoall, ring, stripes"),
        ({"cp_mode": "ring"}, "give cp as well"),
        ({"cp": 3}, "cp=3 does not divide the cluster's 4 devices"),
        ({"cp": 2, "dp": 4}, "dp=4 times cp=2 is 8"),
        ({"cp": 2, "tp": 4}, "tp=4 times cp=2 is 8"),
        ({"cp": 2, "mesh": (2, 2)}, "give the mesh or the degrees"),
        ({"cp": 2, "tp": 2, "zero": 3}, "tp=2, cp=2 leaves none of 4 devices"),
    ],
)
def test_contradictions(pins: dict[str, object], message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        check_constraints(Constraints(**pins), 4)  # type: ignore[arg-type]
