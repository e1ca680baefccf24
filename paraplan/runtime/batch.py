"""A global batch and the part of it a rank reads.

The batch is cut into microbatches first (contiguous blocks of the batch dim), each then over the mesh by the
stage's layout: the microbatch index is the outermost axis.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor

from paraplan.capture.exporting.fake import not_dense, overrides_functions, own_functions
from paraplan.ir.errors import PlanMismatchError
from paraplan.ir.execution import names as outer_names
from paraplan.ir.execution.name import Name
from paraplan.ir.machine.mesh import Layout, R, S, local_shape, parse_layout
from paraplan.ir.machine.rank_groups import Holding
from paraplan.ir.model.program import given_inputs
from paraplan.ir.plan import Plan
from paraplan.runtime.ragged import RowPadding
from paraplan.runtime.state.params import Dims, cut, pad


class ShardedBatch(dict[str, Tensor]):
    """One rank's part of a global batch: per input, its microbatches one after another along a new dim 0.

    For CUDA in the host's pinned memory, unless the global batch was on the device.
    """


def shard_batch(
    plan: Plan,
    stage: Holding,
    coordinates: Dims,
    batch: Mapping[str, Tensor],
    device: str = "cpu",
    padding: RowPadding | None = None,
) -> ShardedBatch:
    """Cut a global batch; one with fewer rows is padded first, where that changes nothing (see `ragged`).

    Args:
        plan: the plan.
        stage, coordinates: what the rank holds, and its place.
        batch: by input.
        device: of the rank.
        padding: of the plan, where there is one.
    Raises:
        PlanMismatchError: inputs are missing, unknown or no dense tensors, or have another dtype or another shape than
            the plan was made for.
    """
    check_values(plan, batch)
    batch = (padding or RowPadding(plan)).pad(batch)
    _check_shapes(plan, batch)
    found, given = ShardedBatch(), plan.program.step_batch
    for name, text in stage.batch.items():
        layout: Layout = (_along(plan, name), *parse_layout(text))
        shape = (plan.num_microbatches, *stage.mesh.shape)
        dtype = getattr(torch, plan.program.batch[name].spec.dtype)
        local = local_shape(given[name].spec.shape, layout, shape)
        parts = [pad(cut(batch[name], layout, shape, (m, *coordinates)), local) for m in range(plan.num_microbatches)]
        found[name] = _within_reach(parts, device, dtype)
    return found


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory of the host that a device copies from while the host goes on."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def _within_reach(parts: Sequence[Tensor], device: str, dtype: torch.dtype) -> Tensor:
    """Microbatches as one tensor on the device; for CUDA, what is in the host's memory is copied once to memory of its
    own there, pinned, so that no copy of it blocks and nobody else writes to what is still to be copied."""
    if device != "cuda" or parts[0].is_cuda:
        return torch.stack(list(parts)).to(device, dtype)
    held = pinned((len(parts), *parts[0].shape), dtype)
    for mine, part in zip(held, parts, strict=True):
        mine.copy_(part)
    return held


def _along(plan: Plan, name: str):  # type: ignore[no-untyped-def]
    dim = plan.program.batch[name].batch_dim
    return S(dim) if plan.num_microbatches > 1 and dim is not None else R


def _check_names(plan: Plan, batch: Mapping[str, Tensor]) -> None:
    if not isinstance(batch, Mapping):
        raise PlanMismatchError(
            f"a batch is a mapping from input name to tensor, not {type(batch).__name__}; "
            f"inputs: {', '.join(given_inputs(plan.program))}"
        )
    missing = [name for name in plan.program.batch if name not in batch]
    unknown = [name for name in batch if name not in plan.program.batch]
    if missing or unknown:
        raise PlanMismatchError(
            f"batch inputs missing: {missing}, unknown: {unknown}; the plan reads {list(given_inputs(plan.program))}"
        )


def check_values(plan: Plan, batch: Mapping[str, Tensor]) -> None:
    """Refuse a batch without the plan's inputs, or with what is no dense tensor of their dtype.

    Raises:
        PlanMismatchError: names the input, what it is, and what to give.
    """
    _check_names(plan, batch)
    for name, entry in plan.program.step_batch.items():
        x, spec = batch[name], entry.spec
        if not isinstance(x, Tensor):
            raise PlanMismatchError(
                f"batch input {name} is a {type(x).__module__}.{type(x).__qualname__}, the plan reads a tensor "
                f"({spec}); give torch.as_tensor(...) of it"
            )
        refuse_not_dense(name, x)
        if overrides_functions(x):
            raise PlanMismatchError(f"batch input {name} {own_functions(x)}")
        if x.device.type == "meta":
            raise PlanMismatchError(f"batch input {name} is on meta and has no values; give a tensor that has ({spec})")
        refuse_dtype(name, x.dtype, getattr(torch, spec.dtype), "the plan was made for", plan.program.precision)


def refuse_not_dense(name: str, x: Tensor) -> None:
    """Refuse a sparse, nested or quantized input.

    Raises:
        PlanMismatchError: names the input, and what to give.
    """
    if said := not_dense(name, x):
        raise PlanMismatchError(f"batch input {name} is {said}")


def refuse_dtype(name: str, given: torch.dtype, wanted: torch.dtype, captured: str, precision: str) -> None:
    """Refuse numbers that eager would compute with by other rules, or not at all: float64 for float32, integers for
    floats ...

    Signed integers are widened, and under fp64 floats, which it widens the captured batch's to as well.

    Args:
        name: of the input.
        given: its dtype in this batch.
        wanted: that the program reads.
        captured: words for where the other dtype is from, for the error.
        precision: of the program.
    Raises:
        PlanMismatchError: names the input and both dtypes.
    """
    real = not any(x.is_floating_point or x.is_complex or x == torch.bool for x in (given, wanted))
    widened = real and given.is_signed and wanted.is_signed and given.itemsize <= wanted.itemsize
    widened = widened or (precision == "fp64" and given.is_floating_point and wanted == torch.float64)
    if given != wanted and not widened:
        raise PlanMismatchError(
            f"batch input {name} is {given}, {captured} {wanted}; give {name}.to({wanted}) if that is what is meant, "
            "or plan again with such inputs"
        )


def _check_shapes(plan: Plan, batch: Mapping[str, Tensor]) -> None:
    for name, entry in plan.program.step_batch.items():
        shape = tuple(batch[name].shape)
        if shape != entry.spec.shape:
            raise PlanMismatchError(
                f"batch input {name} has shape {shape}, the plan was made for the global batch {entry.spec.shape}; "
                "give one whole global batch, or plan again with this shape"
            )


def microbatches(
    plan: Plan,
    stage: Holding,
    batch: ShardedBatch,
    outer: Container[Name],
    device: str = "cpu",
    homes: Mapping[Name, Tensor] | None = None,
) -> dict[Name, Tensor]:
    """Microbatches by outer name, each with storage of its own on the device, of those a program reads (`outer`).

    Those with a home are copied there. Copies to CUDA are begun and not waited for.

    Args:
        plan: whose batch.
        stage: what the rank holds.
        batch: cut for the rank.
        outer: names that its program reads.
        device: of the rank.
        homes: where a step reads its batch, if anywhere.
    Raises:
        PlanMismatchError: it was cut for another number of microbatches.
    """
    found = {}
    for name in stage.batch:
        parts = batch[name]
        if parts.shape[0] != plan.num_microbatches:
            raise PlanMismatchError(
                f"batch input {name} was cut into {parts.shape[0]} microbatches, the plan has {plan.num_microbatches}"
            )
        for m in range(plan.num_microbatches):
            value = outer_names.batch(name, m)
            if homes and value in homes:
                found[value] = homes[value].copy_(parts[m], non_blocking=device == "cuda")
            elif value in outer:
                found[value] = parts[m].to(
                    device, non_blocking=device == "cuda", copy=True, memory_format=torch.contiguous_format
                )
    return found
