"""Any legal plan against the single device: values, recorded sequence and peak memory.

Every model on 2, 4 and 8 ranks in this process: the planner's own choice, and plans that draw their mesh, microbatches,
every op's strategy and every layout at random, with dropout on in half of them. Own choices and every fifth plan run
five steps, the others two, of SGD with momentum (under Adam, which divides by it, a parameter whose gradient is nothing
but rounding noise tells of the noise). Held against the captured program on one device by the numerics contract's
measure: the loss and every gradient of each step, every parameter and buffer after the last; what each rank did against
the prediction, entry by entry; the measured peak of live bytes against the predicted one. `eager` is the user's model
against the captured program, dropout off (1e-5 where it has fp32 islands).

    python -m benchmarks.fuzz [--only gpt2] [--json FILE]      PLANS=50 plans a model (environment)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.table import Row, main
from benchmarks.zoo import NAMES, Small, build
from paraplan.codegen import build_modules
from paraplan.cost_models.memory import entries
from paraplan.cost_models.predict import simulate_plan
from paraplan.ir.cluster import ClusterSpec
from paraplan.ir.plan import OPTIMIZERS, ModelRef, Plan
from paraplan.ir.program import Program
from paraplan.ir.trace import capture
from paraplan.ir.verify import verify_plan
from paraplan.jobs.check import Captured, Eager, max_error, relative
from paraplan.jobs.models import Made
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.sampling import random_plan
from paraplan.planner.search import search
from paraplan.runtime.local import InProcessTrainer

PLANS = int(os.environ.get("PLANS", "50"))
RANKS = (2, 4, 8)
STEPS, FEW, LR = 5, 2, 0.05
COLUMNS = (
    *("case", "plans", "worst_loss", "worst_grad", "worst_param", "eager", "entries_equal", "peak_ratio_min"),
    "peak_ratio_max",
)


@dataclass(frozen=True)
class Reference:
    """One device's steps: per step the loss and gradients, and parameters and buffers after it."""

    losses: list[float]
    grads: list[dict[str, Tensor]]
    params: list[dict[str, Tensor]]
    buffers: list[dict[str, Tensor]]


@dataclass
class Worst:
    """What was seen over all plans."""

    loss: float = 0.0
    grad: float = 0.0
    param: float = 0.0
    plans: int = 0
    equal: int = 0
    least_ratio: float = float("inf")
    most_ratio: float = 0.0


def reference(plan: Plan, small: Small, steps: int) -> Reference:
    """The captured program trained on one device."""
    device = Captured(plan, small.model, partial(torch.optim.SGD, lr=LR, momentum=0.9), 0)
    found = Reference([], [], [], [])
    for _ in range(steps):
        loss, grads = device.step(small.batch, None)
        found.losses.append(loss)
        found.grads.append(grads)
        found.params.append({name: device.masters[name].detach().clone() for name in device.trained})
        found.buffers.append({name: device.buffers[name].clone() for name in device.program.buffer_updates})
    return found


def run_plan(plan: Plan, small: Small, wanted: Reference, steps: int, worst: Worst) -> None:
    """Run a plan beside the reference and note what differs."""
    programs = verify_plan(plan)
    trainer = InProcessTrainer(plan, programs, [build_modules(program) for program in programs], small.model)
    for step in range(steps):
        worst.loss = max(worst.loss, relative(float(trainer.step(small.batch)), wanted.losses[step]))
        worst.grad = max(worst.grad, max_error(trainer.grads(), wanted.grads[step])[0])
        trainer.apply_optimizer(torch.optim.SGD, lr=LR, momentum=0.9)
    worst.param = max(worst.param, max_error(trainer.params(), wanted.params[steps - 1])[0])
    same, peak = True, simulate_plan(plan, programs).peak_bytes
    for rank, index in enumerate(plan.schedule.rank_class):
        written: Mapping[str, Tensor] = trainer.buffers(rank)
        worst.param = max(worst.param, max_error(written, wanted.buffers[steps - 1])[0])
        same &= [entry.key for entry in trainer.entries(rank)] == [entry.key for entry in entries(programs[index])]
        ratio = peak[index] / trainer.peak_bytes(rank)
        worst.least_ratio, worst.most_ratio = min(worst.least_ratio, ratio), max(worst.most_ratio, ratio)
    worst.plans += 1
    worst.equal += same


def plans(name: str, captured: Mapping[float, Program]) -> Iterator[tuple[Plan, float, int]]:
    """The planner's choices and the random plans of a model, with the dropout they are for and how long they run."""
    for index, ranks in enumerate(RANKS):
        dropout = 0.1 if index % 2 else 0.0
        yield search(_job(name, captured[dropout], ranks), Constraints()).plan, dropout, STEPS
    for seed in range(PLANS):
        dropout = 0.1 if seed % 2 else 0.0
        job = _job(name, captured[dropout], RANKS[seed // 2 % len(RANKS)])
        yield random_plan(job, seed, max_microbatches=4), dropout, FEW if seed % 5 else STEPS


def _job(name: str, program: Program, ranks: int) -> Job:
    return Job(program, ClusterSpec.local(ranks), OPTIMIZERS["momentum"], ModelRef(display=name), {})


def fuzz_model(name: str) -> Row:
    """All plans of one model."""
    torch.set_num_threads(1)
    small = {dropout: build(name, dropout) for dropout in (0.0, 0.1)}
    captured = {dropout: capture(made.model, made.batch, precision="fp64") for dropout, made in small.items()}
    wanted: dict[float, Reference] = {}
    worst = Worst()
    for plan, dropout, steps in plans(name, captured):
        if dropout not in wanted:
            wanted[dropout] = reference(plan, small[dropout], STEPS)
        run_plan(plan, small[dropout], wanted[dropout], steps, worst)
    eager = Eager(Made(small[0.0].model), captured[0.0])
    loss, grads = eager.step(small[0.0].batch, {name: p.detach() for name, p in eager.params.items()})
    off = max(relative(wanted[0.0].losses[0], loss), max_error(wanted[0.0].grads[0], grads)[0])
    return {
        "plans": worst.plans, "worst_loss": worst.loss, "worst_grad": worst.grad, "worst_param": worst.param,
        "eager": off, "entries_equal": f"{worst.equal}/{worst.plans}", "peak_ratio_min": worst.least_ratio,
        "peak_ratio_max": worst.most_ratio,
    }  # fmt: skip


CASES: dict[str, Callable[[], Row]] = {name: partial(fuzz_model, name) for name in NAMES}


if __name__ == "__main__":
    raise SystemExit(main("fuzz", CASES, COLUMNS))
