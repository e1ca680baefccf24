"""Budgets below what one segment needs: it is run in chunks, as is cheaper than recomputing all the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from paraplan.cost_models.predict import plan_costs, simulate_plan
from paraplan.ir.errors import NoPlanError, SolverLimitError
from paraplan.ir.execution.rank_program import GROW, PUT
from paraplan.lowering import lower
from paraplan.planner.constraints import Constraints
from paraplan.planner.memory.flatten import flatten
from paraplan.planner.memory.memory_schedule import evaluate
from paraplan.planner.memory.plan_memory import MemoryLimits, plan_memory
from paraplan.planner.recompute import split as split_module
from paraplan.planner.recompute.split import finer, fit_split
from paraplan.planner.recompute.stage_recompute import Fitted, Unfit
from paraplan.planner.search import search
from tests.conftest import Tiny, captured
from tests.lowering.lockstep import run_plan


@pytest.fixture(scope="module")
def wide() -> Tiny:
    """A vocabulary beside which two layers are little."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=4,
        vocab_size=2000,
        n_positions=16,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    generator = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(0, 2000, (8, 16), generator=generator) for _ in range(2))
    labels[0, :5] = -100
    return captured(lambda: transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": labels})


def test_a_budget_below_the_head_is_met_in_chunks(wide: Tiny) -> None:
    job = wide.job(1, optimizer="sgd")
    pins = Constraints(microbatches=1)
    kept = search(job, pins, certify=False).plan
    assert kept.prediction is not None
    budget = int(0.6 * max(kept.prediction.peak_bytes))
    with pytest.raises(SolverLimitError, match=r"ce_grad of segment 3 .* in \d+ chunks it would be"):
        search(job, Constraints(microbatches=1, recompute="full", memory_bytes=budget))
    plan = search(job, Constraints(microbatches=1, memory_bytes=budget)).plan
    assert plan.prediction is not None and plan.certificate is not None
    assert max(plan.prediction.peak_bytes) <= budget
    assert plan.certificate.bound_s <= plan.prediction.step_s <= 1.5 * kept.prediction.step_s
    (split,) = {choice.split for choice in plan.stages[0].choices if choice.split is not None}
    assert split.at_once, "the loss is differentiated chunk by chunk: nothing is computed twice"
    assert wide.worst_error(*run_plan(plan, wide.params, wide.buffers, wide.batch)) <= 1e-9


def test_chunks_double_along_the_first_dim_that_divides(wide: Tiny) -> None:
    plan = search(wide.job(1), Constraints(microbatches=1), certify=False).plan
    kind, seen = plan.program.segments[-1].kind, []
    split = finer(plan, kind, None)
    while split is not None:
        seen.append((split.dim, split.chunks))
        assert plan.program.kinds[kind].graph.ops[split.op].target == "paraplan.linear"
        split = finer(plan, kind, split)
    assert seen == [("a", 2), ("a", 4), ("a", 8), ("b", 16)]


def test_op_by_op_the_chunked_program_is_one_like_any_other(wide: Tiny) -> None:
    """Its own order has the simulator's peak; what grows in place is not made again; memory goes lower than whole."""
    plan = search(wide.job(1), Constraints(microbatches=1), certify=False).plan
    kind, (stage,) = plan.program.segments[-1].kind, plan.stages
    split = finer(plan, kind, finer(plan, kind, None))
    choices = tuple(replace(choice, split=split) if choice.kind == kind else choice for choice in stage.choices)
    chunked = replace(plan, stages=(replace(stage, choices=choices),))
    least = []
    for each in (plan, chunked):
        (program,), costs = lower(each), plan_costs(each)[0]
        flat = flatten(program, costs)
        simulated = simulate_plan(each, (program,))
        assert evaluate(flat.problem, flat.actions).peak_bytes == simulated.peak_bytes[0]
        written = [op for op in flat.problem.ops if op.name in (PUT, GROW)]
        assert bool(written) == (each is chunked) and not any(op.repeatable for op in written)
        budget = int(0.65 * simulate_plan(plan, lower(plan)).peak_bytes[0])
        try:
            least.append(plan_memory(flat.problem, budget, MemoryLimits(time_s=10.0)).evaluation.peak_bytes <= budget)
        except NoPlanError:
            least.append(False)
    assert least == [False, True]


@pytest.mark.parametrize("is_hopeless", [False, True])
def test_what_is_slow_for_what_it_makes_again_may_be_quick_in_chunks(
    monkeypatch: pytest.MonkeyPatch, is_hopeless: bool
) -> None:
    """What peaks in one segment has all others made again for it; cut finer it needs none of that. What is slow with
    everything kept stays so."""
    unfit, tried = Unfit(Any, 2.0, None, is_slow=True, is_hopeless=is_hopeless), list[object]()  # type: ignore[arg-type]

    def fit(_job: object, decisions: object, *_: object) -> Fitted | Unfit:
        tried.append(decisions)
        whole = SimpleNamespace(stages=[SimpleNamespace(choices=[])])
        return unfit if decisions == "whole" else Fitted(whole, SimpleNamespace(step_s=1.0), 0.0, None)  # type: ignore[arg-type]

    monkeypatch.setattr(split_module, "fit", fit)
    monkeypatch.setattr(split_module, "split_where_it_peaks", lambda *_: "in chunks")
    found = fit_split(None, "whole", 1.0)  # type: ignore[arg-type]
    assert tried == ["whole"] + ["in chunks"] * (not is_hopeless) and isinstance(found, Unfit) == is_hopeless
