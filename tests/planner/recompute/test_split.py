"""Budgets below what one segment needs: it is run in chunks, as is cheaper than recomputing all the others."""

from __future__ import annotations

import pytest
import torch

from paraplan.ir.errors import SolverLimitError
from paraplan.planner.constraints import Constraints
from paraplan.planner.recompute.split import finer
from paraplan.planner.search import search
from tests.conftest import Tiny, captured
from tests.ir.lockstep import run_plan


@pytest.fixture(scope="module")
def wide() -> Tiny:
    """A vocabulary beside which two layers are little."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=2000, n_positions=16, resid_pdrop=0.1, embd_pdrop=0.1,
        attn_pdrop=0.1, bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(0, 2000, (8, 16), generator=generator) for _ in range(2))
    labels[0, :5] = -100
    return captured(lambda: transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": labels})


def test_a_budget_below_the_head_is_met_in_chunks(wide: Tiny) -> None:
    job = wide.job(1, optimizer="sgd")
    pins = Constraints(microbatches=1)
    kept = search(job, pins).plan
    assert kept.prediction is not None
    budget = int(0.6 * max(kept.prediction.peak_bytes))
    with pytest.raises(SolverLimitError, match=r"ce_grad of segment 5 .* in \d+ chunks it would be"):
        search(job, Constraints(microbatches=1, recompute="full", memory_bytes=budget))
    plan = search(job, Constraints(microbatches=1, memory_bytes=budget)).plan
    assert plan.prediction is not None and plan.certificate is not None
    assert max(plan.prediction.peak_bytes) <= budget
    assert plan.certificate.bound_s <= plan.prediction.step_s <= 1.5 * kept.prediction.step_s
    (split,) = {choice.split for choice in plan.stages[0].choices if choice.split is not None}
    assert split.at_once, "the loss is differentiated chunk by chunk: nothing is computed twice"
    assert wide.worst_error(*run_plan(plan, wide.params, wide.buffers, wide.batch)) <= 1e-9


def test_chunks_double_along_the_first_dim_that_divides(wide: Tiny) -> None:
    plan = search(wide.job(1), Constraints(microbatches=1)).plan
    kind, seen = plan.program.segments[-1].kind, []
    split = finer(plan, kind, None)
    while split is not None:
        seen.append((split.letter, split.chunks))
        assert plan.program.kinds[kind].graph.ops[split.op].target == "paraplan.linear"
        split = finer(plan, kind, split)
    assert seen == [("a", 2), ("a", 4), ("a", 8), ("b", 16)]
