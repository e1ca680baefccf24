"""Emitting an op whose rule it carries: nothing is known of its kernel but what running it has shown.

Its inputs are made row-major, the order its results are known for. A result that shares an input's storage is
copied at once, so that what follows owns what it reads; so is one that is part of a larger storage, which nobody need
keep.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paraplan.ir.execution.rank_program import Instr, LocalValue
from paraplan.ir.machine.mesh import Layout
from paraplan.ir.model.graph import Arg, Op
from paraplan.ir.model.op_rule import ALIAS, ELEMENTWISE, PART, ROWS, OpRule, amount_of, storage_order
from paraplan.ir.model.strides import contiguous_strides, elementwise_strides, is_contiguous
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.laid_values import LaidValues
from paraplan.rules.carried_rules import definition_of, registered_work

Dims = tuple[int, ...]


def row_major(emitter: LaidValues, op: Op, names: dict[tuple[str, Layout], str]) -> dict[tuple[str, Layout], str]:
    """The op's inputs, copied where they do not lie as the op wants them.

    Args:
        emitter: the block's.
        op: that reads them.
        names: (value, layout) -> local name.
    """
    if op.rule is None or not op.rule.row_major_inputs:
        return names
    found = {}
    for key, local in names.items():
        value = emitter.values[local]
        if not is_contiguous(value.shape, value.strides):
            local = emitter.copy_rows(local, emitter._unique(f"{local}^rows"))
        found[key] = local
    return found


def emit_carried(
    emitter: LaidValues,
    op: Op,
    args: tuple[Arg, ...],
    kwargs: dict[str, Arg],
    outs: tuple[str | None, ...],
    specs: Sequence[TensorSpec | None],
    inputs: list[str],
) -> None:
    """The op's instruction, then copies of the results that share an input's storage or are part of a larger one.

    Args:
        emitter: the block's.
        op: carries its rule.
        args, kwargs: with local names and sizes.
        outs, specs: local names and specs of its results; None for absent ones.
        inputs: local names of its tensors, in order.
    """
    rule = op.rule
    assert rule is not None
    sources = [emitter.values[name] for name in inputs]
    made: list[str | None] = []
    copies: list[tuple[str, str]] = []
    for index, (local, spec) in enumerate(zip(outs, specs, strict=True)):
        if local is None or spec is None:
            made.append(None)
            continue
        owner = local if rule.lies[index] not in (ALIAS, PART) else _unowned(emitter, rule, index, local, spec, sources)
        if owner is local:
            emitter._fresh(local, spec.dtype, spec.shape, _strides(rule, index, spec.shape, sources))
        else:
            copies.append((owner, local))
        made.append(owner)
    definition = definition_of(op)
    assert definition is not None and definition.workspace is not None
    emitter._add(
        Instr(
            target=op.target,
            args=args,
            kwargs=kwargs,
            outs=tuple(made),
            origin=emitter._origin,
            workspace_bytes=definition.workspace(sources, None, args),
            work=registered_work(op, [value.shape for value in sources]),
        )
    )
    for shared, local in copies:
        emitter.copy_rows(shared, local)


def _unowned(
    emitter: LaidValues, rule: OpRule, index: int, local: str, spec: TensorSpec, sources: list[LocalValue]
) -> str:
    """The local name of a result that shares an input's storage or is part of a larger one, until it is copied."""
    if rule.lies[index] == ALIAS:
        name, nbytes = emitter._unique(f"{local}^shared"), 0
        base = sources[rule.alias_of[index]].base
    else:
        name = base = emitter._unique(f"{local}^part")
        nbytes = round(amount_of(rule.storages[index], rule.shares(tuple(value.shape for value in sources))))
    strides = contiguous_strides(spec.shape)
    emitter.values[name] = LocalValue(
        dtype=spec.dtype, shape=spec.shape, strides=strides, base=base, storage_bytes=nbytes
    )
    return name


def _strides(rule: OpRule, index: int, shape: Dims, sources: list[LocalValue]) -> Dims:
    lie = rule.lies[index]
    if lie == ELEMENTWISE:
        return elementwise_strides(shape, [(value.shape, value.strides) for value in sources])
    if lie == ROWS:
        return contiguous_strides(shape)
    strides, step = [0] * len(shape), 1
    for dim in reversed(storage_order(lie)):
        strides[dim] = step
        step *= math.prod(shape[dim : dim + 1])
    return tuple(strides)
