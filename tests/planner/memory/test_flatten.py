"""A lowered program flattened: its own order has the simulator's time and peak, byte for byte."""

from __future__ import annotations

import pytest

from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.predict import plan_costs, simulate_plan
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.lowering import lower
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.memory.flatten import flatten
from paraplan.planner.memory.memory_schedule import evaluate, freeing
from paraplan.planner.memory.problem import verify_problem
from paraplan.planner.search import search
from tests.captures import program_of


@pytest.mark.parametrize(
    ("name", "microbatches"),
    [("mlp", 1), ("bert", 2), ("gpt2", 1), ("resnet", 1), ("unet", 1), ("gpt2_lora", 2)],
)
def test_its_own_order_is_the_simulators(name: str, microbatches: int) -> None:
    job = Job(program_of(name, 0.1), parse_cluster("1xH100"), OPTIMIZERS["adamw"], ModelRef(display=name), {})
    plan = search(job, Constraints(mesh=(1,), microbatches=microbatches), certify=False).plan
    programs = lower(plan)
    trace = simulate_plan(plan, programs).traces[0]
    flat = flatten(programs[0], plan_costs(plan)[0])
    verify_problem(flat.problem)
    found = evaluate(flat.problem, flat.actions)
    assert found.peak_bytes == trace.peak_bytes
    assert found.step_s == pytest.approx(trace.step_s, rel=1e-12)
    soonest = evaluate(flat.problem, freeing(flat.problem, tuple(range(len(flat.problem.ops)))))
    assert soonest.peak_bytes <= found.peak_bytes and soonest.step_s == pytest.approx(found.step_s)
    again = [op for op in flat.problem.ops if op.repeatable]
    assert not any(op.name in ("update", "accumulate", "paraplan.write") for op in again) and len(again) > 5
