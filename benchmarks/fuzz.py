"""Any legal plan against the single device: values, recorded sequence and peak memory.

Every model on 2, 4 and 8 ranks in this process: the planner's own choice with everything free, the same in three
quarters of the memory that takes, pipelines of a degree, mesh, schedule and number of stages drawn at random, and plans
that draw their mesh, microbatches, every op's strategy and every layout at random, with dropout on in half of them and
states and parameters on the host or on disk in two thirds, some updated late. Own choices, pipelines, plans that update
late and every fifth run five steps, the others two, of SGD with momentum (under Adam, which divides by it, a parameter
whose gradient is nothing but rounding noise tells of the noise). Held against the captured program on one device by the
numerics contract's measure: the loss and every gradient of each step, every parameter and buffer after the last. The
last step is recorded: what each rank did against the prediction, entry by entry; the measured peaks of live bytes
against the predicted ones. `eager` is the captured program against the user's model, dropout replayed (1e-5 where it
has fp32 islands). A plan that crashes or breaks a bound is named by its seed under `failures`, and the others go on.

    python -m benchmarks.fuzz [--only "gpt2 8"] [--json FILE [--resume]]

PLANS=50 random plans a model and PIPELINES=3 on as many ranks (environment).
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial

import msgspec
import torch
from torch import Tensor

from benchmarks.table import Row, main
from benchmarks.zoo import NAMES, Small, build
from paraplan.capture import capture
from paraplan.codegen import build_modules
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.errors import ConstraintError, NoPlanError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.jobs.checking.against_eager import ISLANDS, AgainstEager
from paraplan.jobs.checking.check import Captured, max_error, relative
from paraplan.jobs.checking.eager import ModelCall
from paraplan.jobs.models import Made
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.joint.combinations import Combination, combinations
from paraplan.planner.pipeline.cuts.stage_cuts import cut_evenly
from paraplan.planner.sampling import random_plan
from paraplan.planner.schedules.named import NAMED
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer

PLANS = int(os.environ.get("PLANS", "50"))
PIPELINES = int(os.environ.get("PIPELINES", "3"))
TIGHT = 0.75
MICROBATCHES = {2: 4, 4: 2, 8: 2}
"""Ranks -> the most microbatches drawn: a step's work is the product of both."""

STEPS, FEW, LR = 5, 2, 0.05
TOLERANCE, PEAK_RATIO = 1e-9, 1.02
COLUMNS = (
    *("case", "plans", "worst_loss", "worst_grad", "worst_param", "eager", "entries_equal", "peak_ratio_min"),
    *("peak_ratio_max", "failures"),
)


@dataclass(frozen=True)
class Reference:
    """One device's steps: per step the loss and gradients, and parameters and buffers after it."""

    losses: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    params: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class Subject:
    """A model with and without dropout, as all its plans share it."""

    name: str
    small: dict[float, Small]
    program: dict[float, Program]

    @cache  # noqa: B019  (one subject lives at a time)
    def reference(self, dropout: float) -> Reference:
        """The captured program trained on one device."""
        return self.trained(dropout, random_plan(self.job(dropout, 2), 0))

    def trained(self, dropout: float, plan: Plan) -> Reference:
        """The same where what a plan updates late is updated late."""
        small, program = self.small[dropout], self.program[dropout]
        device = Captured(plan, small.model, partial(torch.optim.SGD, lr=LR, momentum=0.9), 0)
        found = Reference()
        for _ in range(STEPS):
            loss, grads = device.step(small.batch, None)
            found.losses.append(loss)
            found.grads.append(grads)
            found.params.append({name: device.masters[name].detach().clone() for name in device.trained})
            found.buffers.append({name: device.buffers[name].clone() for name in program.buffer_updates})
        return found

    def job(self, dropout: float, ranks: int) -> Job:
        """What its plans are made for."""
        optimizer, model = OPTIMIZERS["momentum"], ModelRef(display=self.name)
        return Job(self.program[dropout], ClusterSpec.local(ranks), optimizer, model, {})

    __hash__ = object.__hash__

    @cache  # noqa: B019
    def eager_error(self) -> float:
        """The captured program against the user's model, which draws the same random numbers."""
        small, program = self.small[0.1], self.program[0.1]
        plan = random_plan(self.job(0.1, 2), 0)
        device = Captured(plan, small.model, partial(torch.optim.SGD, lr=LR), 0)
        against = AgainstEager(ModelCall.of(Made(small.model, small.batch, small.loss_fn), program), program)
        taken, seeds = partial(device.outcome, small.batch), device.seeds()
        found = taken(program, seeds)
        verdict = against.compare(small.batch, device.masters, device.buffers, seeds, found, taken)
        return float("inf") if verdict.cannot else verdict.error


@dataclass
class Seen:
    """The errors of one plan, or the largest over several."""

    loss: float = 0.0
    grad: float = 0.0
    param: float = 0.0
    equal: bool = True
    least_ratio: float = float("inf")
    most_ratio: float = 0.0

    def fault(self) -> str:
        """What breaks a bound; empty where nothing does."""
        faults = [
            f"{what} {getattr(self, what):.1e}"
            for what in ("loss", "grad", "param")
            if not getattr(self, what) <= TOLERANCE
        ]
        faults += [] if self.equal else ["entries differ"]
        if not (1.0 <= self.least_ratio and self.most_ratio <= PEAK_RATIO):
            faults.append(f"peak ratio {self.least_ratio:.4f} to {self.most_ratio:.4f}")
        return ", ".join(faults)

    def widened(self, other: Seen) -> Seen:
        """The worse of both in everything."""
        return Seen(
            max(self.loss, other.loss),
            max(self.grad, other.grad),
            max(self.param, other.param),
            self.equal and other.equal,
            min(self.least_ratio, other.least_ratio),
            max(self.most_ratio, other.most_ratio),
        )


def captured(small: Small) -> Program:
    """Its program in float64."""
    return capture(small.model, small.batch, loss_fn=small.loss_fn, precision="fp64", batch_dims=small.batch_dims)


@lru_cache(maxsize=1)
def subject(name: str) -> Subject:
    """A model and its captures, kept while its cases run."""
    small = {dropout: build(name, dropout) for dropout in (0.0, 0.1)}
    program = {dropout: captured(made) for dropout, made in small.items()}
    gc.collect()
    gc.freeze()  # half a million objects that stay: walking them again and again took a quarter of every step
    return Subject(name, small, program)


def run_plan(plan: Plan, small: Small, wanted: Reference, steps: int) -> Seen:
    """Run a plan beside the reference; what differs."""
    seen = Seen()
    programs = verify_plan(plan)
    trainer = InProcessTrainer(plan, programs, [build_modules(program) for program in programs], small.model)
    for step in range(steps):
        trainer.record = step == steps - 1
        seen.loss = max(seen.loss, relative(float(trainer.step(small.batch)), wanted.losses[step]))
        seen.grad = max(seen.grad, max_error(trainer.grads(), wanted.grads[step])[0])
        trainer.apply_optimizer(torch.optim.SGD, lr=LR, momentum=0.9)
    seen.param = max_error(trainer.params(), wanted.params[steps - 1])[0]
    traces = simulate_plan(plan, programs).traces
    predicted = [[entry.key for entry in entries(program)] for program in programs]
    buffers, missing = wanted.buffers[steps - 1], set(wanted.buffers[steps - 1])
    for rank, index in enumerate(plan.schedule.rank_class):
        written: Mapping[str, Tensor] = trainer.buffers(rank)  # those of its stages
        seen.param = max(
            seen.param, max_error(written, {name: buffers[name] for name in written if name in buffers})[0]
        )
        missing -= set(written)
        seen.equal &= [entry.key for entry in trainer.entries(rank)] == predicted[index]
        ratios = [traces[index].peak_bytes / trainer.peak_bytes(rank)]
        ratios += [traces[index].tier_peak_bytes[tier] / size for tier, size in trainer.tier_peak_bytes(rank).items()]
        seen.least_ratio, seen.most_ratio = min(seen.least_ratio, *ratios), max(seen.most_ratio, *ratios)
    if missing:
        seen.param = float("inf")
    return seen


def plans(of: Subject, ranks: int, count: int) -> Iterator[tuple[str, Callable[[], Plan], float, int]]:
    """The planner's choice, and these ranks' share of random plans: name, what makes it, its dropout, its steps."""
    index = list(MICROBATCHES).index(ranks)
    dropout = 0.1 if index % 2 else 0.0
    own = cache(lambda: searched(of.job(dropout, ranks), Constraints()))
    yield "own", own, dropout, STEPS

    def tight() -> Plan:
        prediction = own().prediction
        assert prediction is not None
        memory = int(TIGHT * max(prediction.peak_bytes))
        with suppress(NoPlanError):
            return searched(of.job(dropout, ranks), Constraints(memory_bytes=memory, reserve_bytes=0))
        return own()

    yield f"own in {TIGHT:.0%} of its memory", tight, dropout, STEPS
    listed = [each for each in combinations(of.job(dropout, ranks), Constraints()) if each.pp > 1 and is_whole(each)]
    draw = random.Random(f"{of.name} {ranks}")
    for combination in draw.sample(listed, min(PIPELINES, len(listed))):
        yield combination.text, partial(pipeline, of.job(dropout, ranks), combination), dropout, STEPS
    for seed in range(count):
        if seed // 2 % len(MICROBATCHES) == index:
            drawn = partial(random_plan, seed=seed, max_microbatches=MICROBATCHES[ranks], states_leave=True)
            job = of.job(0.1 if seed % 2 else 0.0, ranks)
            yield f"seed {seed}", partial(drawn, job), 0.1 if seed % 2 else 0.0, FEW if seed % 5 else STEPS


def searched(job: Job, constraints: Constraints) -> Plan:
    """The planner's choice."""
    return search(job, constraints, certify=False).plan


def is_whole(combination: Combination) -> bool:
    """Whether its schedule takes its microbatches."""
    try:
        return bool(combination.orders())
    except ConstraintError:
        return False


def pipeline(job: Job, combination: Combination) -> Plan:
    """A combination planned, its stages cut evenly where they are more than its schedule needs."""
    pinned = combination.pinned(Constraints())
    if combination.each > NAMED[combination.schedule].stages:
        bounds = cut_evenly([1.0] * len(job.program.segments), combination.num_stages, len(job.program.segments))
        pinned = msgspec.structs.replace(pinned, stages=bounds)
    return searched(job, pinned)


def fuzz(name: str, ranks: int) -> Row:
    """All plans of one model on some ranks."""
    torch.set_num_threads(1)
    of = subject(name)
    worst, count, equal, failures = Seen(), 0, 0, []
    for which, make, dropout, steps in plans(of, ranks, PLANS):
        count += 1
        try:
            plan = make()
            late = plan.delayed_update is not None  # which tells only after some steps
            wanted = of.trained(dropout, plan) if late else of.reference(dropout)
            seen = run_plan(plan, of.small[dropout], wanted, STEPS if late else steps)
        except Exception as fault:  # noqa: BLE001  (a finding like any other; the other plans go on)
            failures.append(f"{which}: {type(fault).__name__}: {fault}")
            continue
        worst, equal = worst.widened(seen), equal + seen.equal
        failures += [f"{which}: {seen.fault()}"] if seen.fault() else []
    if not of.eager_error() <= ISLANDS:
        failures.append(f"the captured program against the user's model: {of.eager_error():.1e}")
    return {
        "plans": count,
        "worst_loss": worst.loss,
        "worst_grad": worst.grad,
        "worst_param": worst.param,
        "eager": of.eager_error(),
        "entries_equal": f"{equal}/{count}",
        "peak_ratio_min": worst.least_ratio,
        "peak_ratio_max": worst.most_ratio,
        "failures": failures,
    }


CASES: dict[str, Callable[[], Row]] = {
    f"{name} {ranks}": partial(fuzz, name, ranks) for name in NAMES for ranks in MICROBATCHES
}


if __name__ == "__main__":
    raise SystemExit(main("fuzz", CASES, COLUMNS))
