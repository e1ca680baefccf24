"""Pipelines of small models, run in this process and held against one device and the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor, nn

from paraplan.capture.reference import run_step
from paraplan.codegen import build_modules
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.execution.schedule import spread
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.model.seeds import segment_seed
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.jobs.checking.check import max_error
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.pipeline.pipeline import cut_stages, pipelined
from paraplan.planner.schedules.complete import complete
from paraplan.planner.schedules.named import NAMED, named_orders
from paraplan.planner.schedules.schedule_problem import holders_of
from paraplan.runtime.in_process import InProcessTrainer
from paraplan.runtime.state.params import full_tensors

Bounds = Sequence[tuple[int, int]]


def job_of(program: Program, num_devices: int, optimizer: str = "adamw") -> Job:
    """A planning job on local processes."""
    return Job(program, ClusterSpec.local(num_devices), OPTIMIZERS[optimizer], ModelRef(display="tiny"), {})


def cut(num_segments: int, num_stages: int, uneven: bool = False) -> list[tuple[int, int]]:
    """Stages of equal numbers of segments, or of one each but for the last."""
    points = [round(index * num_segments / num_stages) for index in range(num_stages + 1)]
    if uneven:
        points = [*range(num_stages), num_segments]
    return list(itertools.pairwise(points))


def pipeline_of(one: Plan, schedule: str, num_positions: int, bounds: Bounds) -> Plan:
    """A plan of one stage as a pipeline."""
    orders = named_orders(schedule, num_positions, one.num_microbatches, len(bounds) // num_positions)
    cluster = ClusterSpec.local(num_positions * one.stages[0].mesh.size)
    whole = complete(schedule, orders, num_replicas=NAMED[schedule].num_replicas)
    return pipelined(one, cluster, bounds, whole, holders_of(orders))


@dataclass(frozen=True)
class Account:
    """What a run was like: the worst error, whether entries were those predicted, measured over predicted peak of every
    rank, and the first rank's bubble as a share of the simulated step."""

    error: float
    entries_equal: bool
    peaks: tuple[float, ...]
    bubble: float


def account(
    plan: Plan, model: nn.Module, batch: dict[str, Tensor], steps: int = 2, clip: float | None = None
) -> Account:
    """Train some steps; errors of every rank's loss, gradients, their norm and written buffers against one device."""
    program = plan.program
    programs = verify_plan(plan)
    simulation = simulate_plan(plan, programs)
    trainer = InProcessTrainer(plan, programs, [build_modules(each) for each in programs], model)
    given = {name: batch[name].to(getattr(torch, entry.spec.dtype)) for name, entry in program.batch.items()}
    whole = full_tensors(program, model)
    still = {name: whole[f"param:{name}"] for name in program.params}
    worst = 0.0
    for step in range(steps):
        params = still | {name: value.clone() for name, value in trainer.params().items()}
        buffers = {name: whole[f"buffer:{name}"] for name in program.buffers} | trainer.buffers()
        seeds = [torch.tensor(segment_seed(0, step, index)) for index in range(len(program.segments))]
        loss, grads, written = run_step(program, params, buffers, given, seeds, 1.0)
        wanted = {name: grad for name, grad in grads.items() if grad is not None}
        trainer.step(batch)
        found = trainer.grads()
        assert set(found) == set(wanted)
        worst = max(worst, max_error(found, wanted)[0], max_error(trainer.buffers(), written)[0])
        worst = max(worst, *(abs(float(mine - loss)) / abs(float(loss)) for mine in trainer.losses()))
        if clip is not None:
            norm = torch.stack([grad.norm() for grad in wanted.values()]).norm()
            worst = max(worst, abs(float(trainer.clip_grad_norm_(clip) - norm)) / float(norm))
        trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2)
    classes = plan.schedule.rank_class
    expected = [[entry.key for entry in entries(each)] for each in programs]
    return Account(
        worst,
        all([entry.key for entry in trainer.entries(rank)] == expected[at] for rank, at in enumerate(classes)),
        tuple(trainer.peak_bytes(rank) / simulation.peak_bytes[at] for rank, at in enumerate(classes)),
        simulation.traces[0].bubble_s / simulation.step_s,
    )


def run(plan: Plan, model: nn.Module, batch: dict[str, Tensor], clip: float | None = None) -> float:
    """The worst error; entries must equal those predicted, and peaks be at most and nearly the predicted ones."""
    found = account(plan, model, batch, clip=clip)
    assert found.entries_equal
    assert 0.98 <= min(found.peaks) <= max(found.peaks) <= 1.0, found.peaks
    return found.error


def mixed(ones: Sequence[Plan], schedule: str, bounds: Bounds) -> Plan:
    """A pipeline whose positions' stages come from plans of one stage each, on meshes of any shapes."""
    first, meshes, positions = 0, [], []
    for index, one in enumerate(ones):
        mesh = one.stages[0].mesh
        meshes.append(mesh.over(range(first, first + mesh.size)))
        positions += [index] * mesh.size
        first += mesh.size
    orders = named_orders(schedule, len(ones), ones[0].num_microbatches, len(bounds) // len(ones))
    stages = [
        stage
        for bound, (at,) in zip(bounds, holders_of(orders), strict=True)
        for stage in cut_stages(ones[at].program, ones[at].stages[0], [bound], [meshes[at]])
    ]
    return msgspec.structs.replace(
        ones[0],
        cluster=ClusterSpec.local(first),
        stages=tuple(stages),
        schedule=spread(complete(schedule, orders), tuple(positions)),
        prediction=None,
    )
