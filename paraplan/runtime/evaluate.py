"""Evaluations: the forward of a plan alone, over the tensors a trainer holds.

The program is `lowering.lower_evaluation`'s, run by an executor of its own that shares the trainer's parameters and
buffers, so an evaluation between a step and its update disturbs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from paraplan.ir.errors import PlanMismatchError, RuntimeFailure
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.machine.mesh import Layout, Shard, local_shape, parse_layout
from paraplan.ir.plan import Plan
from paraplan.lowering import lower_evaluation
from paraplan.runtime.batch import ShardedBatch, check_values, microbatches
from paraplan.runtime.executing.executor import Executor, Modules
from paraplan.runtime.ragged import RowPadding, rows_of
from paraplan.runtime.rank import Rank
from paraplan.runtime.state.params import Dims, own_part

Build = Callable[[RankProgram], Modules]
Wanted = Literal["global", "local"] | None


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation gives.

    Attributes:
        loss: of the whole batch (0-dim), the same on every rank.
        metrics: each of several losses, by name, likewise.
        outputs: what the model returns beside them, by name ("logits"). "global": whole, on every rank. "local":
            this rank's part, its microbatches one after another along the batch dim, as `Trainer.cut` cuts inputs.
        layouts: how the local parts lie on the mesh.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)


class Evaluations:
    """The evaluation programs of a plan, lowered and built on first use, by the outputs they compute."""

    def __init__(self, plan: Plan, build: Build | None) -> None:
        self.plan, self._build = plan, build
        self._made: dict[tuple[str, ...], tuple[tuple[RankProgram, ...], dict[int, Modules]]] = {}

    def names(self, wanted: Wanted, names: Sequence[str] | None) -> tuple[str, ...]:
        """The outputs to compute.

        Raises:
            PlanMismatchError: `wanted` is no way to give outputs.
        """
        if wanted is None:
            return ()
        if wanted not in ("global", "local"):
            raise PlanMismatchError(f"outputs={wanted!r}: say 'global', 'local' or None")
        return tuple(self.plan.program.outputs if names is None else names)

    def get(self, names: tuple[str, ...], rank_class: int) -> tuple[RankProgram, Modules]:
        """The program and modules of a rank class.

        Raises:
            ConstraintError: an output cannot be computed; says why.
            RuntimeFailure: the trainer was made without a way to build modules.
        """
        if self._build is None:
            raise RuntimeFailure("this trainer was made without build=, so it has no modules to evaluate with")
        programs, modules = self._made.setdefault(names, (lower_evaluation(self.plan, names), {}))
        if rank_class not in modules:
            modules[rank_class] = self._build(programs[rank_class])
        return programs[rank_class], modules[rank_class]


def bind(executor: Executor, rank: Rank, batch: ShardedBatch) -> None:
    """Give an evaluation its rank's tensors and a batch.

    Args:
        executor: of the evaluation.
        rank: whose tensors.
        batch: cut for it.
    """
    executor.outer.clear()
    executor.bind(rank.tensors)
    executor.bind(microbatches(rank.plan, rank.stage, batch, executor.program.outer, rank.device))


def collect(
    executors: Sequence[Executor], wanted: Wanted, whole: Callable[[Dims, Layout, Sequence[Tensor]], Tensor]
) -> Evaluation:
    """What an evaluation left, taken from the ranks of this process (the first one's parts where they are local).

    Args:
        executors: after their last step; emptied.
        wanted: how outputs are given.
        whole: joins the ranks' parts (one per executor) of a tensor of some shape, which lie in a layout.
    """
    first = executors[0]
    program = first.program
    metrics = {name: first.outer[outer].clone() for name, outer in program.metrics.items()}
    outputs, layouts = {}, {}
    for name, place in program.outputs.items():
        along, *layout = parse_layout(place.layout)
        layouts[name] = tuple(layout)
        shape = local_shape(place.spec.shape, (along,), (program.num_microbatches,))
        parts = [
            own_part(first.outer[local], shape, tuple(layout), program.mesh_shape, first.coordinates)
            if wanted == "local"
            else whole(shape, tuple(layout), [e.outer[local] for e in executors])
            for local in place.names
        ]
        outputs[name] = _joined(parts, along)
    found = Evaluation(first.outer[program.loss].clone(), metrics, outputs, layouts)
    for executor in executors:
        executor.outer.clear()
    return found


def _joined(parts: list[Tensor], along: object) -> Tensor:
    if isinstance(along, Shard) and len(parts) > 1:
        return torch.cat(parts, along.dim)
    return parts[0].clone()


def metrics_of(executor: Executor) -> Mapping[str, Tensor]:
    """Each of several losses after a training step."""
    return {name: executor.outer[outer].clone() for name, outer in executor.program.metrics.items()}


def missing_rows(plan: Plan, batch: Mapping[str, Tensor]) -> int | None:
    """Rows a smaller batch has; None where it has all."""
    check_values(plan, batch)
    rows = rows_of(plan.program, batch)
    return None if rows == plan.program.rows else rows


def without_padding(padding: RowPadding, found: Evaluation, rows: int | None) -> Evaluation:
    """Whole outputs without the rows that were added.

    Args:
        padding: of the batch.
        found: of the padded batch.
        rows: those given; None where none were added.
    """
    if rows is None:
        return found
    dims = padding.how.row_dims
    outputs = {name: x.narrow(dims[name], 0, rows) if name in dims else x for name, x in found.outputs.items()}
    return replace(found, outputs=outputs)
