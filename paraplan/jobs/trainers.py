"""From a plan and a model to this rank's trainer, refusing what does not belong together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paraplan.capture.python_state.dynamic import attributes_set
from paraplan.capture.python_state.reading import Reads
from paraplan.codegen import build_modules
from paraplan.cost_models.simulator.graph_memory import graphs_bytes
from paraplan.ir.errors import ConstraintError, PlanMismatchError
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.rank_groups import holdings
from paraplan.ir.plan import Plan
from paraplan.ir.sizes import say_size
from paraplan.jobs.model_identity import check_model
from paraplan.jobs.run_options import ExecutionOptions
from paraplan.runtime.buckets import BucketTrainer
from paraplan.runtime.executing.compiled import Compilation
from paraplan.runtime.executing.executor import Modules
from paraplan.runtime.executing.graphs import CudaGraphs, refuse_graphs
from paraplan.runtime.trainer import Trainer, TrainerOptions
from paraplan.runtime.transport.distributed import DistributedTransport
from paraplan.runtime.transport.launch import init_distributed
from paraplan.runtime.transport.process_groups import check_timeout
from paraplan.runtime.transport.tier_copies import Copier


def make_trainer(
    plan: Plan,
    programs: Sequence[RankProgram],
    model: nn.Module,
    how: ExecutionOptions | None = None,
    *,
    share: Trainer | None = None,
    reads: Reads | None = None,
) -> Trainer:
    """This rank's trainer; see `Plan.executable`.

    Args:
        plan, programs, model: what is executed.
        how: its options; left out, the defaults.
        share: a trainer whose parameters and states it shares.
        reads: what was read while capturing, if that was done here.
    """
    how = how or ExecutionOptions()
    _check_makes(plan, programs, model, how)
    backend = plan.cluster.backend
    if "RANK" in os.environ or dist.is_initialized():
        init_distributed("nccl" if backend == "cuda" else "gloo", how.timeout_s)
    check_world(plan)
    transport = DistributedTransport(*(holding.mesh for holding in holdings(plan)), device=backend)
    pace = (lambda tier, nbytes: plan.cluster.copy_s(tier, transport.rank, nbytes)) if how.paced else None

    def build(program: RankProgram) -> Modules:
        return build_modules(program, transport.groups, transport.device)

    options = TrainerOptions(
        seed=how.seed,
        record=how.record,
        compilation=Compilation(
            phases=("F", "B") if how.compile or plan.compiled else (),
            backend="inductor" if isinstance(how.compile, bool) else how.compile,
            strict=how.compile_strict,
        ),
        build=build,
        weights=how.weights,
        copier=Copier(transport.device, True, pace, how.offload_folder, transport.rank),
    )
    modules = build(programs[plan.schedule.rank_class[transport.rank]])
    trainer = Trainer(plan, programs, modules, model, transport, options, share=share, reads=reads)
    if how.cuda_graphs:
        trainer.replay(CudaGraphs())
    return trainer


def _check_makes(plan: Plan, programs: Sequence[RankProgram], model: nn.Module, how: ExecutionOptions) -> None:
    """Refuse a model, options and a machine that do not belong to the plan."""
    if not isinstance(model, nn.Module):
        raise PlanMismatchError(
            f"model is {model!r:.80}, a {type(model).__name__}: give the nn.Module that the plan was made for "
            f"({plan.model.display})"
        )
    if how.timeout_s is not None:
        check_timeout(how.timeout_s)
    if how.cuda_graphs:
        check_graphs(plan, programs, how.record)
    check_model(plan, model, how.loss_fn)
    check_devices(plan.cluster)


def make_bucket_trainer(
    plans: Sequence[tuple[Plan, Sequence[RankProgram], Reads | None]],
    model: nn.Module,
    attributes: Sequence[Mapping[str, Any]] = (),
    how: ExecutionOptions | None = None,
) -> BucketTrainer:
    """This rank's trainer for the shapes of several plans; see `Buckets.executable`.

    Args:
        plans: of every shape: the plan, its programs, and what was read while capturing.
        model: that all of them were made for.
        attributes: per plan, those its shape sets on the model.
        how: as of `make_trainer`; CUDA graphs are refused.
    """
    if how is not None and how.cuda_graphs:
        raise ConstraintError("trainers of several shapes have no CUDA graphs: plan one shape, or leave them out")
    trainers: list[Trainer] = []
    for index, (plan, programs, reads) in enumerate(plans):
        share = trainers[0] if trainers else None
        with attributes_set((model,), attributes[index] if attributes else {}):
            trainers.append(make_trainer(plan, programs, model, how, share=share, reads=reads))
    return BucketTrainer(trainers)


def check_graphs(plan: Plan, programs: Sequence[RankProgram], record: bool = False) -> None:
    """Refuse a plan whose steps cannot be CUDA graphs.

    Args:
        plan, programs: whose steps.
        record: whether all of them are to be recorded.
    Raises:
        ConstraintError: the host decides within a step, nothing would be replayed, or the graphs' memory does not fit.
    """
    refuse_graphs(plan, programs)
    if record:
        raise ConstraintError(
            "record=True takes every step instruction by instruction, so no CUDA graph would be replayed; leave one of "
            "them out"
        )
    most = max(map(graphs_bytes, programs), key=lambda each: each.peak)
    room = plan.cluster.memory_bytes(tuple(device for stage in plan.stages for device in stage.mesh.devices))
    if most.peak > room:
        raise ConstraintError(
            f"CUDA graphs need {say_size(most.peak)} of a device's {say_size(room)}: {say_size(most.still)} of "
            f"parameters, states and the batch, {say_size(most.pool)} for the graphs' pool and {say_size(most.update)} "
            "for the update, which an eager step does not have all at once; plan with a larger reserve, or leave CUDA "
            "graphs out"
        )


def check_devices(cluster: ClusterSpec) -> None:
    """Refuse a machine without the plan's kind of device.

    Raises:
        PlanMismatchError: the plan is for GPUs and there is none.
    """
    if cluster.backend == "cuda" and not torch.cuda.is_available():
        raise PlanMismatchError(
            f"the plan is for {cluster.name} ({cluster.num_devices} x {cluster.groups[0].device.kind}), "
            "this machine has no GPU; "
            "run it there, or plan again for local:<processes>"
        )


def check_world(plan: Plan) -> None:
    """Refuse another number of processes.

    Raises:
        PlanMismatchError: the job has more or fewer processes than the plan has devices.
    """
    have = dist.get_world_size() if dist.is_initialized() else 1
    need = plan.cluster.num_devices
    if have != need:
        raise PlanMismatchError(
            f"the plan is for {need} devices ({plan.cluster.name}), "
            f"this job has {have} process{'es' if have > 1 else ''}; "
            f"start it with torchrun and {need} in all, or plan again for {have}"
        )
