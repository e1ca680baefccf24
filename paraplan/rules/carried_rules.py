"""Definitions of ops that carry their rule (`ir.model.op_rule`): discovered, registered, or known to be missing."""

from __future__ import annotations

from collections.abc import Sequence

from paraplan.ir.execution.rank_program import LocalValue
from paraplan.ir.machine.mesh import Layout, Shard
from paraplan.ir.model.graph import Arg, Op
from paraplan.ir.model.op_rule import ArgPath, OpRule, amount_of, faults
from paraplan.ir.model.scan import SCAN
from paraplan.ir.model.tensor import TensorSpec
from paraplan.rules.dims import OpDef, OpDims, Specs, op_def
from paraplan.rules.loop_dims import local_scan
from paraplan.rules.workspace import loop_workspace


def definition_of(op: Op) -> OpDef | None:
    """What the program knows of an op: its own rule, else the one written for its target, else nothing."""
    return op_def(op.target) if op.rule is None else _definition(op.rule)


def _definition(rule: OpRule) -> OpDef:
    def dims(op: Op, inputs: Specs, outputs: tuple[TensorSpec | None, ...]) -> OpDims:
        return OpDims(
            inputs=rule.inputs,
            outputs=rule.outputs,
            sizes=dict(rule.sizes),
            contracted=dict(rule.contracted),
            linear=rule.linear,
            addends=rule.addends,
        )

    def workspace(inputs: Sequence[LocalValue], outputs: object, args: tuple[Arg, ...]) -> int:
        shares = rule.shares(tuple(value.shape for value in inputs))
        return max((round(amount_of(moment, shares)) for moment in rule.workspace), default=0)

    return OpDef(dims=dims, workspace=workspace)


def rule_fault(op: Op, values: dict[str, TensorSpec]) -> str:
    """What is wrong with the rule an op carries, for its shapes and arguments; "" if nothing is."""
    rule = op.rule
    if rule is None:
        return ""
    shapes = tuple(values[name].shape for name in op.tensors)
    fault = faults(rule, shapes, tuple(None if name is None else values[name].shape for name in op.outs))
    if fault:
        return fault
    for dim, paths in rule.size_args.items():
        for path in paths:
            number = _at(op, path)
            if dim not in rule.sizes or not isinstance(number, int) or number % rule.sizes[dim]:
                return f"argument {'.'.join(map(str, path))} does not count {dim}"
    return ""


def _at(op: Op, path: ArgPath) -> Arg:
    """The argument a path leads to; None if it leads nowhere."""
    first = path[0] if path else -1
    inside = isinstance(first, str) or first in range(len(op.args))
    arg: Arg = None if not inside else op.kwargs.get(first) if isinstance(first, str) else op.args[first]
    for index in path[1:]:
        arg = arg[index] if isinstance(arg, tuple) and isinstance(index, int) and index < len(arg) else None
    return arg


def local_args(
    rule: OpRule,
    args: tuple[Arg, ...],
    kwargs: dict[str, Arg],
    layouts: tuple[Layout, ...],
    mesh_shape: tuple[int, ...],
) -> tuple[tuple[Arg, ...], dict[str, Arg]]:
    """Arguments with every size of a sharded dim divided by its number of shards.

    Args:
        rule: says which arguments count which dim.
        args, kwargs: the op's, with global sizes.
        layouts: of each tensor input.
        mesh_shape: sizes of the axes the layouts are over.
    """
    for dim, paths in rule.size_args.items():
        parts = _parts(rule, dim, layouts, mesh_shape)
        if parts > 1:
            args, kwargs = divide_args(args, kwargs, paths, parts)
    return args, kwargs


def _parts(rule: OpRule, dim: str, layouts: tuple[Layout, ...], mesh_shape: tuple[int, ...]) -> int:
    for names, layout in zip(rule.inputs, layouts, strict=True):
        if dim in names:
            position, parts = names.index(dim), 1
            for placement, size in zip(layout, mesh_shape, strict=True):
                parts *= size if placement == Shard(dim=position) else 1
            return parts
    return 1


def divide_args(
    args: tuple[Arg, ...], kwargs: dict[str, Arg], paths: Sequence[ArgPath], parts: int
) -> tuple[tuple[Arg, ...], dict[str, Arg]]:
    """Arguments, some of whose numbers are divided.

    Args:
        args, kwargs: of an op.
        paths: to the numbers.
        parts: what they are divided by.
    """
    for first, *rest in paths:
        if isinstance(first, int):
            args = (*args[:first], _divide(args[first], rest, parts), *args[first + 1 :])
        else:
            kwargs = {**kwargs, first: _divide(kwargs[first], rest, parts)}
    return args, kwargs


def _divide(arg: Arg, path: Sequence[int | str], parts: int) -> Arg:
    if not path:
        return arg // parts
    index = int(path[0])
    return (*arg[:index], _divide(arg[index], path[1:], parts), *arg[index + 1 :])


def registered_work(op: Op, local_inputs: Sequence[tuple[int, ...]]) -> tuple[float, float] | None:
    """(flops, bytes moved) of one rank by the registered cost, of a loop over time those of its steps; None where there
    is none.

    Bytes are -1.0 where only flops are registered.
    """
    if op.target == SCAN:
        return loop_workspace.work(local_scan(str(op.args[3]), tuple(local_inputs)))
    rule = op.rule
    if rule is None or not (rule.flops or rule.traffic_bytes):
        return None
    shares = rule.shares(tuple(local_inputs))
    moved = amount_of(rule.traffic_bytes, shares) if rule.traffic_bytes else -1.0
    return amount_of(rule.flops, shares), moved
