"""Bytes that a step of a loop over time allocates and drops, and what the loop computes and launches."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paraplan.ir.execution.rank_program import LocalValue
from paraplan.ir.model.graph import Arg, Op
from paraplan.ir.model.scan import Scan, scan_of
from paraplan.ir.model.strides import contiguous_strides
from paraplan.ir.model.tensor import TensorSpec
from paraplan.rules.dims import op_def

_INNER = {
    "paraplan.linear": (0, -1),
    "paraplan.linear_grad_input": (0, -1),
    "paraplan.batched_product": (-2, -1),
    "aten.mm.default": (0, -1),
    "aten.bmm.default": (0, -1),
    "aten.addmm.default": (1, -1),
    "aten.baddbmm.default": (1, -1),
}
"""Products: the operand and its dim that is contracted."""


def scan(inputs: Sequence[LocalValue], outputs: object, args: tuple[Arg, ...]) -> int:
    """The most that is alive within a step, the carries before and after it included; the last of a loop's carries are
    copied to its outputs."""
    loop = scan_of(args)
    values = {name: _value(name, spec) for name, spec in loop.body.values.items()}
    views = {op.outs[0] for op in loop.body.ops if _is_view(op)}
    last = {name: number for number, op in enumerate(loop.body.ops) for name in (*op.tensors, *filter(None, op.outs))}
    bases = _bases(loop)
    kept = {bases[name] for name in loop.outs}
    dies: dict[str, int] = {}
    for name, number in last.items():
        dies[bases[name]] = max(number, dies.get(bases[name], 0))
    outside = {*loop.input_names, *loop.constant_names}
    live = sum(values[name].nbytes for name in loop.carry_names)
    peak = live
    for number, op in enumerate(loop.body.ops):
        live += sum(values[out].nbytes for out in op.outs if out is not None and out not in views)
        peak = max(peak, live + _inside(op, values))
        live -= sum(
            values[name].nbytes for name, end in dies.items() if end == number and name not in (*kept, *outside)
        )
    return peak


def _bases(loop: Scan) -> dict[str, str]:
    """The value whose storage each one shares; its own name where it has one."""
    bases = {name: name for name in loop.body.inputs}
    for op in loop.body.ops:
        for out in op.outs:
            if out is not None:
                bases[out] = bases[op.tensors[0]] if _is_view(op) else out
    return bases


def _is_view(op: Op) -> bool:
    definition = op_def(op.target)
    return definition is not None and definition.strides == "view" and bool(op.tensors)


def _value(name: str, spec: TensorSpec) -> LocalValue:
    strides = contiguous_strides(spec.shape)
    return LocalValue(dtype=spec.dtype, shape=spec.shape, strides=strides, base=name, storage_bytes=spec.nbytes)


def _inside(op: Op, values: dict[str, LocalValue]) -> int:
    definition = op_def(op.target)
    if definition is None or definition.workspace is None:
        return 0
    made = [None if out is None else values[out] for out in op.outs]
    return definition.workspace([values[name] for name in op.tensors], made, op.args)


def work(loop: Scan) -> tuple[float, float]:
    """Floating-point operations of its products, and bytes that all its steps move."""
    flops = moved = 0
    values = loop.body.values
    for op in loop.body.ops:
        if not _is_view(op):
            made = [values[out] for out in op.outs if out is not None]
            moved += sum(spec.nbytes for spec in (*(values[name] for name in op.tensors), *made))
            flops += _flops(op, values)
    written = (*loop.result_names, *(loop.next_names[index] for index in loop.histories))
    moved += sum(2 * values[name].nbytes for name in written) + sum(
        3 * values[name].nbytes for name in loop.addend_names
    )
    return float(flops * loop.steps), float(moved * loop.steps)


def _flops(op: Op, values: dict[str, TensorSpec]) -> int:
    made = values[op.outs[0]] if op.outs[0] is not None else None
    if made is None:
        return 0
    if op.target == "paraplan.linear_grad_weight":
        return 2 * made.numel * math.prod(values[op.tensors[0]].shape[:-1])
    if op.target not in _INNER:
        return 0
    operand, dim = _INNER[op.target]
    return 2 * made.numel * values[op.tensors[operand]].shape[dim]


def launches(loop: Scan) -> int:
    """Kernels launched, one an op."""
    inside = sum(not _is_view(op) for op in loop.body.ops)
    return loop.steps * (inside + loop.results + len(loop.histories) + len(loop.addend_names)) + loop.carries
