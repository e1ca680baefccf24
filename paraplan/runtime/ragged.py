"""A batch with fewer rows than the plan was made for: padded with rows that count for nothing.

Padding rows repeat the first row, but for inputs that say what counts (labels, masks, weights of samples), which hold a
number there with which the row counts for nothing. Which inputs and numbers do that is tried: `padded` says of each try
whether all numerators and denominators of the loss, and so all gradients, are those of the other rows. Where none does
(a plain mean, whose divisor is written in the program), and where an op mixes samples, the batch is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from paraplan.ir.errors import ConstraintError, PlanMismatchError
from paraplan.ir.machine.mesh import Shard
from paraplan.ir.model.graph import Phase, target_parts
from paraplan.ir.model.program import Program
from paraplan.ir.model.tensor import FLOATS
from paraplan.ir.plan import Plan
from paraplan.rules.time_axis import ProgramMicro, graph_micro, program_micro
from paraplan.runtime.padded import Rows

MAX_TRIES = 400
_COMPARISONS = tuple(f"aten.{name}.Scalar" for name in ("eq", "ne", "lt", "le", "gt", "ge"))
_NLL = frozenset(f"aten.nll_loss{of}" for of in ("", "_forward", "_nd", "2d", "2d_forward"))
_MOVES = ("aten.add.Tensor", "aten.sub.Tensor", "aten.add.Scalar", "aten.sub.Scalar", "aten.rsub.Scalar")


@dataclass(frozen=True)
class Padding:
    """How a program's batch is padded.

    Attributes:
        labels: batch input -> the number with which a row counts for nothing.
        reason: why it cannot be; "" where it can.
        row_dims: output -> its batch dim.
    """

    labels: dict[str, float] = field(default_factory=dict)
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


class RowPadding:
    """Pads the batches of a plan; how is found out where the first rows are missing."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @cached_property
    def how(self) -> Padding:
        """How, or why a batch cannot be padded."""
        return _padding(self.plan.program)

    def pad(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The batch with as many rows as the plan's; itself where nothing is missing.

        Raises:
            PlanMismatchError: rows are missing, and padding would change the loss; says why.
        """
        program = self.plan.program
        rows = rows_of(program, batch)
        missing = program.rows - rows
        if not missing:
            return batch
        if self.how.reason:
            raise PlanMismatchError(
                f"the batch has {rows} rows, the plan was made for {program.rows}, and it cannot be padded: "
                f"{self.how.reason}. Drop the loader's last batch, or plan again for {rows} rows"
            )
        found, labels = {}, self.how.labels
        for name, entry in program.batch.items():
            x, dim = batch[name], entry.batch_dim
            if dim is None:
                found[name] = x
                continue
            more = x.narrow(dim, 0, 1).repeat_interleave(missing, dim)
            found[name] = torch.cat([x, more.fill_(labels[name]) if name in labels else more], dim)
        return found


def _padding(program: Program) -> Padding:
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
    labels, fault = _fills(program, micro)
    if fault:
        return Padding(reason=fault)
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


def _fills(program: Program, micro: ProgramMicro) -> tuple[dict[str, float], str]:
    """What padding rows hold so that they count for nothing; and, where nothing does, why."""
    fault = "no input says which rows count in the loss"
    for index, tried in enumerate(itertools.islice(_tries(program), MAX_TRIES)):
        found = Rows(program, micro, tried).fault()
        if not found:
            return tried, ""
        fault = fault if index else found
    return {}, fault


def _tries(program: Program) -> Iterator[dict[str, float]]:
    """Inputs that may say what counts, with the numbers they are compared with and around them: fewest inputs first,
    and those that a denominator counts."""
    counted = {source for each in program.denominators for source in each.inputs}
    last = {source for term in program.loss for source in _beside(program, term.numerator)}
    names = [
        name
        for name, entry in program.batch.items()
        if entry.batch_dim is not None and f"batch:{name}" in {*counted, *last}
    ]
    names.sort(key=lambda name: f"batch:{name}" not in counted)
    numbers = _numbers(program)
    for count in range(1, min(len(names), 3) + 1):
        for chosen in itertools.combinations(names, count):
            for values in itertools.product(*(_fitting(program, name, numbers) for name in chosen)):
                yield dict(zip(chosen, values, strict=True))


def _beside(program: Program, numerator: str) -> tuple[str, ...]:
    return next((segment.inputs for segment in program.segments if numerator in segment.outputs), ())


def _numbers(program: Program) -> list[float]:
    """Numbers that labels are compared with, and what becomes one of them by adding or subtracting another."""
    graphs = [each.graph for each in program.denominators] + [
        program.kinds[segment.kind].graph
        for segment in program.segments
        if any(term.numerator in segment.outputs for term in program.loss)
    ]
    ops = [op for graph in graphs for op in graph.ops if op.phase is Phase.FORWARD]
    written = {x for op in ops for x in op.args[1:] if isinstance(x, (int, float)) and not isinstance(x, bool)}
    compared = {op.args[-1] for op in ops if op.target == "paraplan.ce_loss"}
    compared |= {op.args[4] for op in ops if target_parts(op.target).base in _NLL}
    compared |= {op.args[1] for op in ops if op.target in _COMPARISONS and op.args[1] in written}
    moved = {op.args[1] for op in ops if op.target in _MOVES and op.args[1] in written}
    around = [x + sign * by for x in sorted(compared) for by in sorted(moved) for sign in (-1, 1)]
    return list(dict.fromkeys([*sorted(compared), 0, *around, 1, *sorted(x for x in written if abs(x) < 1e6)]))


def _fitting(program: Program, name: str, numbers: list[float]) -> list[float]:
    """Of these, what an input can hold."""
    dtype = program.batch[name].spec.dtype
    if dtype == "bool":
        return [0, 1]
    return numbers if dtype in FLOATS else [x for x in numbers if x == int(x)]
