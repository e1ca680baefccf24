"""A memory schedule executed: a model's small twin, at the same share of its own peak, run and measured in float64."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from benchmarks.table import Row
from benchmarks.zoo.sized import reference_cluster
from benchmarks.zoo.twins import twin
from paraplan.capture import capture
from paraplan.capture.reference import StepResult, run_step
from paraplan.codegen import build_modules
from paraplan.ir.errors import InfeasibleError, NoPlanError
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.jobs.checking.check import max_error
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.memory.plan_memory import MemoryLimits
from paraplan.planner.memory.single_device import memory_problem, peak_without, schedule_memory
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer

EQUAL = 1e-9


def executed(name: str, share: float, time_s: float) -> Row:
    """What was measured of a model's twin at a budget: columns of `benchmarks.memory`."""
    words, model, batch, plan, wanted = _planned(name)
    problem = memory_problem(plan)
    most = peak_without(problem) - problem.base_bytes
    try:
        made = schedule_memory(plan, problem.base_bytes + int(share * most), MemoryLimits(time_s=time_s))
    except NoPlanError as fault:
        return {"twin": f"{words}: {'infeasible' if isinstance(fault, InfeasibleError) else 'limit'}"}
    trainer = InProcessTrainer(made.plan, made.programs, [build_modules(p) for p in made.programs], model, seed=0)
    trainer.step(batch)
    expected = {key: grad for key, grad in wanted.grads.items() if grad is not None}
    error = max_error(trainer.grads(), expected)[0]
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3, foreach=False)
    trainer.step(batch)
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3, foreach=False)
    measured = trainer.peak_bytes(0)  # of a step with the optimizer's states there
    return {
        "twin": words,
        "measured_peak": measured,
        "simulated_peak": made.simulation.peak_bytes[0] / measured,
        "gradient_error": error,
        "gradients_equal": error <= EQUAL,
    }


@cache
def _planned(name: str) -> tuple[str, nn.Module, dict[str, Tensor], Plan, StepResult]:
    """A twin, planned with everything kept, and its step on one device as captured."""
    words, model, batch = twin(name)
    program = capture(model, batch, precision="fp64")
    job = Job(program, reference_cluster(), OPTIMIZERS["adamw"], ModelRef(display=name), {})
    plan = search(job, Constraints(mesh=(1,), microbatches=1)).plan
    tensors = dict(model.named_parameters(remove_duplicate=False))
    params = {key: tensors[key].detach() for key in program.params}
    return words, model, batch, plan, run_step(program, params, dict(model.named_buffers()), batch, 0)
