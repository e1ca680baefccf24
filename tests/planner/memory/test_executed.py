"""Schedules of models within budgets, executed: their peaks to the byte, and the single device's numbers."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from benchmarks.zoo import build
from paraplan.capture.reference import run_step
from paraplan.codegen import build_modules
from paraplan.cost_models.predict import plan_costs, simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.execution.memory_actions import Act, format_actions
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.lowering import lower
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.memory.flatten import flatten
from paraplan.planner.memory.memory_schedule import evaluate, freeing
from paraplan.planner.memory.plan_memory import MemoryLimits, plan_memory
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer
from tests.captures import program_of
from tests.numerics import relative_error

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("name", "microbatches", "shares"),
    [("mlp", 1, (1.0,)), ("gpt2", 1, (0.7, 0.5)), ("gpt2", 2, (0.6,)), ("resnet", 1, (0.7,)), ("unet", 1, (0.5,))],
)
def test_a_planned_schedule_runs_as_priced(name: str, microbatches: int, shares: tuple[float, ...]) -> None:
    small = build(name, 0.1)
    program = program_of(name, 0.1)
    job = Job(program, ClusterSpec.local(1), OPTIMIZERS["sgd"], ModelRef(display=name), {})
    plan = search(job, Constraints(mesh=(1,), microbatches=microbatches)).plan
    problem = flatten(lower(plan)[0], plan_costs(plan)[0]).problem
    most = evaluate(problem, freeing(problem, tuple(range(len(problem.ops))))).peak_bytes - problem.base_bytes
    tensors = dict(small.model.named_parameters(remove_duplicate=False))
    params = {key: tensors[key].detach() for key in program.params}
    buffers = {key: b.double() if b.is_floating_point() else b for key, b in small.model.named_buffers()}
    wanted = run_step(program, params, buffers, small.batch, 0)
    reruns = 0
    for share in shares:
        budget = problem.base_bytes + int(most * share)
        answer = plan_memory(problem, budget, MemoryLimits(time_s=4))
        reruns += sum(action.act is Act.RUN for action in answer.actions) - len(problem.ops)
        bound = replace(plan, memory_actions=format_actions(answer.actions), prediction=None, certificate=None)
        programs = verify_plan(bound)
        trace = simulate_plan(bound, programs).traces[0]
        assert trace.peak_bytes == answer.evaluation.peak_bytes <= budget
        assert trace.step_s == pytest.approx(answer.evaluation.step_s, rel=1e-9)
        trainer = InProcessTrainer(bound, programs, [build_modules(p) for p in programs], small.model, seed=0)
        assert abs(float(trainer.step(small.batch) - wanted.loss)) <= 1e-12
        assert relative_error(trainer.grads(), wanted.grads) <= 1e-9
        updated = {key: tensors[key].detach() - 0.1 * grad for key, grad in wanted.grads.items() if grad is not None}
        trainer.apply_optimizer(torch.optim.SGD, lr=0.1)
        assert relative_error({key: trainer.params()[key] for key in updated}, updated) <= 1e-9
        assert trainer.peak_bytes(0) == trace.peak_bytes
        assert [entry.key for entry in trainer.entries(0)] == [entry.key for entry in entries(programs[0])]
    assert reruns > 0 or name == "mlp"
