"""How a loop over time may be sharded, from the rules of its body's ops.

Dims of the body's values that an op's rule calls by one name are one dim of the loop, and so are those of a carried
value before and after a step. It may be sharded where every op leaves it so: an op that must have it whole, or sums
over it on the way to a carried value, forbids it, since a step has no collectives. A sum over it that reaches only sums
over steps (or results) leaves these partial. Time is never sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from paraplan.ir.machine.mesh import Layout, R, S, local_shape
from paraplan.ir.model.graph import Arg, Graph, Op
from paraplan.ir.model.scan import Scan, parse_scan
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.process.memo import SESSION
from paraplan.rules.dims import WHOLE, DimNames, LocalContext, OpDims, op_def, replicated

Place = tuple[str, int]
"""A value of a body and one of its dims."""


@dataclass(frozen=True)
class LoopDims:
    """The dims of a loop's body.

    Attributes:
        names: of every value's dims; `_` for one that must be whole.
        sizes: of the named dims.
        partial: per dim, the values that are partial sums where it is sharded.
    """

    names: dict[str, DimNames]
    sizes: dict[str, int]
    partial: dict[str, frozenset[str]]


class _Classes:
    """Dims that are one (union-find)."""

    def __init__(self) -> None:
        self._parent: dict[Place, Place] = {}

    def find(self, place: Place) -> Place:
        while (parent := self._parent.setdefault(place, place)) != place:
            place = parent
        return place

    def join(self, one: Place, other: Place) -> None:
        self._parent[self.find(other)] = self.find(one)


@SESSION.cached(256)
def loop_dims(text: str) -> LoopDims:
    """The dims of a loop, given as its text."""
    scan = parse_scan(text)
    body, classes = scan.body, _Classes()
    rules = [_dims_of(op, body) for op in body.ops]
    whole: set[Place] = set()
    for op, dims in zip(body.ops, rules, strict=True):
        first: dict[str, Place] = {}
        for value, dim, name in _places(op, dims):
            if name == WHOLE or dims.sizes.get(name) != body.values[value].shape[dim]:
                whole.add((value, dim))
            if name != WHOLE:
                classes.join(first.setdefault(name, (value, dim)), (value, dim))
    for before, after in zip(scan.carry_names, scan.next_names, strict=True):
        for dim in range(len(body.values[before].shape)):
            classes.join((before, dim), (after, dim))
    places = [(name, dim) for name, spec in body.values.items() for dim in range(len(spec.shape))]
    shut = {classes.find(place) for place in whole}
    members: dict[Place, list[Place]] = {}
    for place in places:
        members.setdefault(classes.find(place), []).append(place)
    found = LoopDims({name: (WHOLE,) * len(spec.shape) for name, spec in body.values.items()}, {}, {})
    for root, group in members.items():
        sizes = {body.values[value].shape[dim] for value, dim in group}
        if root in shut or len(sizes) > 1 or 1 in sizes or len({value for value, _ in group}) < len(group):
            continue
        partial = _partial(scan, rules, set(group))
        if partial is None:
            continue
        name = f"l{len(found.sizes)}"
        tried = _named(found, name, group, sizes.pop(), partial)
        if _localises(scan, tried, name):
            found = tried
    return found


def _dims_of(op: Op, body: Graph) -> OpDims:
    inputs = tuple(body.values[name] for name in op.tensors)
    outputs = tuple(None if name is None else body.values[name] for name in op.outs)
    definition = op_def(op.target)
    return replicated(inputs, outputs) if definition is None else definition.dims(op, inputs, outputs)


def _named(found: LoopDims, name: str, group: Sequence[Place], size: int, partial: frozenset[str]) -> LoopDims:
    names = dict(found.names)
    for value, dim in group:
        names[value] = (*names[value][:dim], name, *names[value][dim + 1 :])
    return LoopDims(names, {**found.sizes, name: size}, {**found.partial, name: partial})


def _places(op: Op, dims: OpDims) -> Iterator[tuple[str, int, str]]:
    """Value, dim and name of every dim of an op's tensors."""
    outs = [(out, names) for out, names in zip(op.outs, dims.outputs, strict=True) if out is not None]
    for value, names in (*zip(op.tensors, dims.inputs, strict=True), *outs):
        for place, name in enumerate(names or ()):
            yield value, place, name


def _partial(scan: Scan, rules: Sequence[OpDims], group: set[Place]) -> frozenset[str] | None:
    """The values that are partial sums where a dim is sharded; None where it must not be."""
    holds = {value for value, _ in group}
    partial: set[str] = set()
    for op, dims in zip(scan.body.ops, rules, strict=True):
        given = frozenset(index for index, value in enumerate(op.tensors) if value in partial)
        names = {name for value, place, name in _places(op, dims) if (value, place) in group}
        outs = [out for out in op.outs if out is not None]
        if given:
            if names or given not in map(frozenset, dims.linear):
                return None
            partial.update(outs)
        elif names:
            lacking = [out for out in outs if out not in holds]
            if lacking and (dims.addends or any(dims.contracted.get(name) != "sum" for name in names)):
                return None
            partial.update(lacking)
    ends = (*scan.result_names, *scan.addend_names)
    told = all(value in holds or value in partial for value in ends)
    return frozenset(partial) if told and all(value in holds for value in scan.next_names) else None


def _localises(scan: Scan, dims: LoopDims, name: str) -> bool:
    """Whether a body's arguments say of no rank which it is, a dim sharded as far as it goes."""
    try:
        local = _local(scan, dims, {name: dims.sizes[name]})
    except (AssertionError, ValueError):
        return False
    return not any(_has_offset(arg) for op in local.body.ops for arg in op.args)


def _has_offset(arg: Arg) -> bool:
    return any(map(_has_offset, arg)) if isinstance(arg, tuple) else isinstance(arg, str) and arg.startswith("#")


@SESSION.cached(1024)
def local_scan(text: str, shapes: tuple[tuple[int, ...], ...]) -> Scan:
    """One rank's loop.

    Args:
        text: the loop over global shapes.
        shapes: local ones of the op's tensors.
    """
    scan, dims = parse_scan(text), loop_dims(text)
    parts: dict[str, int] = {}
    for index, (name, shape) in enumerate(zip(scan.body.inputs, shapes, strict=True)):
        own = shape[1:] if index < scan.inputs else shape
        for dim, size in zip(dims.names[name], own, strict=True):
            if dim != WHOLE and size < dims.sizes[dim]:
                parts[dim] = dims.sizes[dim] // size
    return _local(scan, dims, parts) if parts else scan


def _local(scan: Scan, dims: LoopDims, parts: dict[str, int]) -> Scan:
    """A loop with some dims in so many parts, each along an axis of its own."""
    body, axes = scan.body, tuple(parts)
    mesh = tuple(parts[axis] for axis in axes)
    layouts: dict[str, Layout] = {
        value: tuple(S(names.index(axis)) if axis in names else R for axis in axes)
        for value, names in dims.names.items()
    }
    values = {
        name: TensorSpec(dtype=spec.dtype, shape=local_shape(spec.shape, layouts[name], mesh))
        for name, spec in body.values.items()
    }

    def context(op: Op) -> LocalContext:
        return LocalContext(
            inputs=tuple(body.values[name] for name in op.tensors),
            outputs=tuple(None if name is None else body.values[name] for name in op.outs),
            in_layouts=tuple(layouts[name] for name in op.tensors),
            out_layouts=tuple(None if name is None else layouts[name] for name in op.outs),
            mesh_shape=mesh,
            offset=lambda spec, layout, dim: "#" if S(dim) in layout else "#0",
            local_inputs=tuple(values[name].shape for name in op.tensors),
            local_outputs=tuple(() if name is None else values[name].shape for name in op.outs),
        )

    ops = []
    for op in body.ops:
        definition = op_def(op.target)
        localise = None if definition is None else definition.localise
        ops.append(op if localise is None else msgspec.structs.replace(op, args=localise(op.args, context(op))))
    graph = Graph(inputs=body.inputs, outputs=body.outputs, values=values, ops=tuple(ops))
    return msgspec.structs.replace(scan, body=graph)
