"""Pipelines of small models, run in this process and held against one device and the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paraplan.codegen import build_modules
from paraplan.cost_models.memory import entries
from paraplan.cost_models.predict import simulate_plan
from paraplan.ir.cluster import ClusterSpec
from paraplan.ir.plan import OPTIMIZERS, ModelRef, Plan
from paraplan.ir.program import Program
from paraplan.ir.seeds import segment_seed
from paraplan.ir.trace.reference import run_step
from paraplan.ir.verify import verify_plan
from paraplan.jobs.check import max_error
from paraplan.planner.assemble import Job
from paraplan.planner.pipeline import pipelined
from paraplan.planner.schedules.named import named_orders
from paraplan.planner.schedules.transfers import complete
from paraplan.runtime.local import InProcessTrainer

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
    at = {action.stage: position for position, order in enumerate(orders) for action in order}
    cluster = ClusterSpec.local(num_positions * one.stages[0].mesh.size)
    return pipelined(one, cluster, bounds, complete(schedule, orders), [at[stage] for stage in range(len(bounds))])


def run(plan: Plan, model: nn.Module, batch: dict[str, Tensor], steps: int = 2, clip: float | None = None) -> float:
    """Train some steps; the worst error of loss, gradients and written buffers against the captured program.

    Every rank's loss counts, entries must equal those predicted, and the peak of some rank, the optimizer's slack
    aside, the predicted one.
    """
    program = plan.program
    programs = verify_plan(plan)
    simulation = simulate_plan(plan, programs)
    trainer = InProcessTrainer(plan, programs, [build_modules(each) for each in programs], model)
    given = {name: batch[name].to(getattr(torch, entry.spec.dtype)) for name, entry in program.batch.items()}
    worst = 0.0
    for step in range(steps):
        params, buffers = trainer.params(), trainer.buffers()
        params = {name: params[name].clone() for name in program.params}
        seeds = [torch.tensor(segment_seed(0, step, index)) for index in range(len(program.segments))]
        loss, grads, written = run_step(program, params, dict(buffers), given, seeds, 1.0)
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
    ratios = []
    for rank, index in enumerate(plan.schedule.rank_class):
        expected = [entry.key for entry in entries(programs[index])]
        assert [entry.key for entry in trainer.entries(rank)] == expected
        ratios.append(trainer.peak_bytes(rank) / simulation.peak_bytes[index])
    assert 0.98 <= min(ratios) <= max(ratios) <= 1.0, ratios
    return worst
