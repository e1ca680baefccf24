"""Plans whose states are on other tiers: small models, how they are planned, and what one device makes of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import msgspec
import torch
from torch import Tensor, nn

from benchmarks.zoo import build
from paraplan.capture import capture
from paraplan.capture.reference import run_step
from paraplan.codegen import build_modules
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer
from tests.captures import program_of

PINS = {
    "one": (1, Constraints()),
    "dp": (2, Constraints(dp=2, zero=0)),
    "zero1": (2, Constraints(dp=2, zero=1)),
    "zero3": (2, Constraints(dp=2, zero=3, microbatches=2)),
    "tp": (2, Constraints(tp=2)),
    "pp": (2, Constraints(pp=2, microbatches=2)),
}


STEPS = 3


@cache
def captured(name: str, precision: str = "fp64") -> tuple[nn.Module, Program, dict[str, Tensor]]:
    small = build(name, 0.0)
    if precision == "fp64":
        return small.model, program_of(name, 0.0), small.batch
    return small.model, capture(small.model, small.batch, precision=precision), small.batch


def job(program: Program, devices: int, optimizer: str = "adamw") -> Job:
    return Job(program, ClusterSpec.local(devices), OPTIMIZERS[optimizer], ModelRef(display="small"), {})


@cache
def planned(name: str, pin: str, states: str = "host", optimizer: str = "adamw", precision: str = "fp64") -> Plan:
    devices, pins = PINS[pin]
    pins = msgspec.structs.replace(pins, offload_states=states)
    return search(job(captured(name, precision)[1], devices, optimizer), pins, certify=False).plan


def trained(plan: Plan, name: str, cls: type[torch.optim.Optimizer], **options: float) -> InProcessTrainer:
    programs = verify_plan(plan)
    model, _, batch = captured(name)
    trainer = InProcessTrainer(plan, programs, [build_modules(p) for p in programs], model)
    for _ in range(STEPS):
        trainer.step(batch)
        trainer.clip_grad_norm_(0.5)
        trainer.apply_optimizer(cls, **options)
    return trainer


@cache
def single(name: str) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """The first loss and gradients, and the parameters after some clipped steps of SGD with momentum."""
    model, program, batch = captured(name)
    named = dict(model.named_parameters(remove_duplicate=False))
    params = {key: nn.Parameter(named[key].detach().double().clone()) for key in program.params}
    optimizer = torch.optim.SGD(params.values(), lr=0.05, momentum=0.9)
    first: tuple[float, dict[str, Tensor]] | None = None
    for _ in range(STEPS):
        values = {key: value.detach() for key, value in params.items()}
        loss, grads, _ = run_step(program, values, dict(model.named_buffers()), batch, 0)
        if first is None:
            first = float(loss), {key: grad.clone() for key, grad in grads.items() if grad is not None}
        for key, param in params.items():
            param.grad = grads[key]
        nn.utils.clip_grad_norm_(params.values(), 0.5)
        optimizer.step()
    assert first is not None
    return *first, {key: value.detach() for key, value in params.items()}


def moved(plan: Plan, every: int, states_alone: bool = False) -> Plan:
    """The plan with every so-manieth parameter's states on the host, it too if it lies alike (unless states are to go
    alone); nothing else changed."""
    (stage,) = plan.stages
    params = dict(stage.params)
    for index, (name, layouts) in enumerate(stage.params.items()):
        tier = "" if index % every else "host"
        stored = tier if layouts.stored == layouts.state and not states_alone else ""
        params[name] = msgspec.structs.replace(layouts, state_tier=tier, stored_tier=stored, ahead=False)
    return msgspec.structs.replace(plan, stages=(msgspec.structs.replace(stage, params=params),))


def squares(out: Tensor, _: object) -> Tensor:
    return out.square().mean()


def updated_at(host_rate: float, given: Job) -> Job:
    """The job where the host updates at a rate."""
    (group,) = given.cluster.groups
    group = msgspec.structs.replace(group, host_memory_bytes_per_s=host_rate)
    return replace(given, cluster=msgspec.structs.replace(given.cluster, groups=(group,)))


def in_runs(plan: Plan, most_bytes: int = 2048) -> Plan:
    """The plan with small bundles, so that states come in many runs."""
    return msgspec.structs.replace(plan, bundle_bytes=most_bytes)


def with_host(given: Job, nbytes: int) -> Job:
    (group,) = given.cluster.groups
    group = msgspec.structs.replace(group, host_memory_bytes=nbytes)
    return replace(given, cluster=msgspec.structs.replace(given.cluster, groups=(group,)))
