"""A batch with fewer rows than the plan was made for: padded with rows that count for nothing.

That is exact where every term of the loss is a sum of cross-entropies over a count of valid labels, and no op mixes
samples: padding rows repeat the first row, with ignored labels, so they add zero to both. Any other loss (a plain
mean, whose divisor is written in the program) is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from paraplan.ir.errors import ConstraintError, PlanMismatchError
from paraplan.ir.graph import Op, Phase
from paraplan.ir.mesh import Shard
from paraplan.ir.micro import graph_micro, program_micro
from paraplan.ir.plan import Plan
from paraplan.ir.program import LossTerm, Program

_SCALINGS = ("aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.neg.default")


@dataclass(frozen=True)
class Padding:
    """How a program's batch is padded.

    Attributes:
        labels: batch input -> the label that is ignored.
        reason: why it cannot be; "" where it can.
        row_dims: output -> its batch dim.
    """

    labels: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    row_dims: dict[str, int] = field(default_factory=dict)


def rows_of(program: Program, batch: Mapping[str, Tensor]) -> int:
    """Rows of a batch that differs from the plan's in nothing else; the plan's own number otherwise."""
    found = set()
    for name, entry in program.step_batch.items():
        shape = tuple(batch[name].shape)
        dim = entry.batch_dim
        if dim is None:
            continue
        if len(shape) != len(entry.spec.shape):
            return program.rows
        if shape[:dim] + shape[dim + 1 :] != entry.spec.shape[:dim] + entry.spec.shape[dim + 1 :]:
            return program.rows
        found.add(shape[dim])
    (rows,) = found if len(found) == 1 else (program.rows,)
    return rows if 0 < rows < program.rows else program.rows


def pad(plan: Plan, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The batch with as many rows as the plan's; itself where nothing is missing.

    Raises:
        PlanMismatchError: rows are missing, and padding would change the loss; says why.
    """
    program = plan.program
    rows = rows_of(program, batch)
    missing = program.rows - rows
    if not missing:
        return batch
    how = padding(_Key(plan))
    if how.reason:
        raise PlanMismatchError(
            f"the batch has {rows} rows, the plan was made for {program.rows}, and it cannot be padded: "
            f"{how.reason}. Drop the loader's last batch, or plan again for {rows} rows"
        )
    found = {}
    for name, entry in program.batch.items():
        x, dim = batch[name], entry.batch_dim
        if dim is None:
            found[name] = x
            continue
        more = x.narrow(dim, 0, 1).repeat_interleave(missing, dim)
        found[name] = torch.cat([x, more.fill_(how.labels[name]) if name in how.labels else more], dim)
    return found


def row_dims(plan: Plan) -> dict[str, int]:
    """The batch dim of every output that has one row per sample."""
    return padding(_Key(plan)).row_dims


class _Key:
    """A plan as a key: by the identity of its program."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __hash__(self) -> int:
        return id(self.plan.program)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.plan.program is other.plan.program


@lru_cache(maxsize=16)
def padding(key: _Key) -> Padding:
    """How a plan's batch is padded, or why it cannot be."""
    program = key.plan.program
    if program.apart > 1:
        return Padding(reason=f"each of its {program.apart} microbatches is a batch by itself (per_microbatch)")
    try:
        micro = program_micro(program, program.batch_size)
    except ConstraintError as fault:
        return Padding(reason=str(fault))
    if micro.has_tail:
        return Padding(reason=f"{micro.mixes} mixes samples, so that padding would count in it")
    if program.buffer_updates:
        return Padding(reason=f"the model keeps statistics of the batch ({next(iter(program.buffer_updates))})")
    labels: dict[str, int] = {}
    for term in program.loss:
        ignored = _ignored(program, term)
        if ignored is None:
            return Padding(
                reason=f"the loss{f' {term.name!r}' if term.name else ''} is no sum of cross-entropies over the number "
                "of valid labels, so that padding would count in it"
            )
        for source in program.denominators[term.denominator or 0].inputs:
            if not source.startswith("batch:"):
                continue
            name = source.removeprefix("batch:")
            if labels.setdefault(name, ignored) != ignored:
                return Padding(reason=f"{name} is ignored at {labels[name]} by one loss and at {ignored} by another")
    values = dict(micro.values)
    for segment, found in zip(program.segments, micro.segments, strict=True):
        kind = program.kinds[segment.kind]
        values |= {outer: found.placements[local] for outer, local in zip(segment.asides, kind.asides, strict=True)}
    row_dims = {}
    for name, output in program.outputs.items():
        given = {n: values[o] for n, o in zip(output.graph.inputs, output.inputs, strict=True) if o in values}
        try:
            place = graph_micro(output.graph, given, {}, program.batch_size, name).placements[
                str(output.graph.outputs[0])
            ]
        except ConstraintError:
            continue
        if isinstance(place, Shard):
            row_dims[name] = place.dim
    return Padding(labels=labels, row_dims=row_dims)


def _ignored(program: Program, term: LossTerm) -> int | None:
    """The label a term ignores, where its numerator sums cross-entropies and its denominator counts valid labels."""
    if term.denominator is None:
        return None
    denominator = program.denominators[term.denominator]
    compared = [op.args[1] for op in denominator.graph.ops if op.target == "aten.ne.Scalar"]
    integers = all(
        source.startswith("batch:") and denominator.graph.values[local].dtype in ("int64", "int32")
        for local, source in zip(denominator.graph.inputs, denominator.inputs, strict=True)
    )
    if len(set(compared)) != 1 or not integers:
        return None
    op = _maker(program, term.numerator)
    if op is not None and op.target == "paraplan.ce_loss" and op.args[-1] == compared[0]:
        return int(compared[0])
    return None


def _maker(program: Program, value: str) -> Op | None:
    """The op behind a numerator, scalings by numbers left out."""
    for segment in program.segments:
        if value in segment.outputs:
            kind = program.kinds[segment.kind]
            made = {out: op for op in kind.graph.ops if op.phase is Phase.FORWARD for out in op.outs if out}
            op = made.get(kind.outputs[segment.outputs.index(value)])
            while op is not None and op.target in _SCALINGS and len(op.tensors) == 1:
                op = made.get(op.tensors[0])
            return op
    return None
