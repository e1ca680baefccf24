"""What waits between the halves of a backward, against what a simulated pipeline releases after the second."""

from __future__ import annotations

import pytest

from paraplan.ir.model.graph import Phase
from paraplan.planner.assemble import Decisions, decided
from paraplan.planner.constraints import Constraints
from paraplan.planner.joint.planned_again import planned_again
from paraplan.planner.pipeline.prices.stage_prices import Sharding
from paraplan.planner.pipeline.searched_schedule import stage_costs
from paraplan.planner.pipeline.stage_sharding import Shardings
from paraplan.planner.recompute.split_backward import handed_on
from paraplan.planner.search import search
from tests.captures import program_of, zoo_job


def test_what_is_handed_on_needs_nothing_of_what_makes_weights_gradients() -> None:
    for kind in program_of("llama", 0.0, "fp32").kinds:
        first = handed_on(kind)
        made = {out for at in first for out in kind.graph.ops[at].outs}
        assert {name for name in kind.input_grads if name is not None} <= made | set(kind.tangents)
        for at in first:
            for name in kind.graph.ops[at].tensors:
                maker = next((i for i, op in enumerate(kind.graph.ops) if name in op.outs), None)
                assert maker is None or maker in first or kind.graph.ops[maker].phase is Phase.FORWARD
        weights = [i for i, op in enumerate(kind.graph.ops) if set(op.outs) & (set(kind.param_grads) - {None})]
        assert not kind.input_grads or any(i not in first for i in weights)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_as_much_waits_as_the_second_half_gives_up(name: str) -> None:
    job = zoo_job(name, 2)
    plan = search(job, Constraints(pp=2, schedule="zb-h1", microbatches=4), certify=False).plan
    part = search(zoo_job(name, 1), Constraints(pp=1, microbatches=4, recompute="none"), certify=False).plan
    options = Sharding(zoo_job(name, 1), decided(part, part.stages[0].mesh)).options
    deferred = [kind[0].deferred_bytes for kind in options]
    for costs, stage in zip(stage_costs(plan, ()), plan.stages, strict=True):
        said = sum(deferred[segment.kind] for segment in plan.program.segments[stage.first : stage.stop])
        assert 0.98 * costs.weight_grad_bytes < said < 1.02 * costs.weight_grad_bytes


def test_a_plan_is_decided_as_it_was() -> None:
    job = zoo_job("gpt2", 2)
    plan = search(job, Constraints(pp=1, dp=2, microbatches=2, recompute="none"), certify=False).plan
    found = decided(plan, plan.stages[0].mesh)
    again = Sharding(job, found).whole
    assert isinstance(found, Decisions)
    assert (again.stages[0].params, again.stages[0].batch) == (plan.stages[0].params, plan.stages[0].batch)
    assert [choice.ops for choice in again.stages[0].choices] == [choice.ops for choice in plan.stages[0].choices]


def test_a_pipeline_planned_again_for_less_keeps_its_sharding() -> None:
    job = zoo_job("gpt2", 4)
    pins = Constraints(pp=2, mesh=(2,), schedule="1f1b", microbatches=4)
    plan = search(job, pins, certify=False).plan
    assert plan.prediction is not None
    asked = Shardings(lambda *_: pytest.fail("the sharding is known"))
    fewer = Constraints(
        pp=2, mesh=(2,), schedule="1f1b", microbatches=4, memory_bytes=max(plan.prediction.peak_bytes) - 1
    )
    again = planned_again(job, fewer, plan, asked)
    assert again.prediction is not None and max(again.prediction.peak_bytes) < max(plan.prediction.peak_bytes)
    assert again.stages[0].params.keys() == plan.stages[0].params.keys()
    kinds = {c.kind: c.ops for stage in plan.stages for c in stage.choices}
    assert {c.kind: c.ops for stage in again.stages for c in stage.choices} == kinds
