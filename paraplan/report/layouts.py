"""Layouts in words: what is split over which mesh axis, and which parameters are ZeRO-sharded.

A parameter's stored, gradient and state layouts are read together with the layout its ops use it in: stored
in shards but used whole is ZeRO-3, used in shards is tensor parallelism.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence

import msgspec

from paraplan.ir.machine.mesh import Layout, Mesh, Partial, Placement, R, Replicate, Shard, local_shape, parse_layout
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.model.graph import Graph, Phase, target_parts
from paraplan.ir.model.program import Program, SegmentKind
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.param_layouts import ParamLayouts
from paraplan.ir.plan import KindChoice, Stage
from paraplan.ir.struct import Value
from paraplan.lowering.blocks.remat import RECOMPUTE, recomputable, remat_of
from paraplan.rules.choices import axis_parts
from paraplan.rules.dims import op_def
from paraplan.rules.strategies import choices_named

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class ParamRow(Value, frozen=True, kw_only=True):
    """Equal parameters of a kind.

    Attributes:
        name: with `*` for the instance's number.
        count: how many parameters the row stands for.
        shape: global shape.
        nbytes: stored bytes per rank, all of them.
        words: how they lie, in words.
        stored, grad, state: layouts in text form.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    nbytes: int
    words: str
    stored: str
    grad: str
    state: str


class KindRow(Value, frozen=True, kw_only=True):
    """A segment kind under one choice.

    Attributes:
        name: the kind's.
        label: what it holds, from its parameters' names.
        instances: how many segments take this choice.
        params: its parameters.
        outputs: how the values it hands on lie, in words.
        recomputed: the ops its backward executes again, in words; "" for none.
        away: what its backward has from the host or the disk, likewise.
        chunks: what of it runs in chunks, likewise.
    """

    name: str
    label: str
    instances: int
    params: tuple[ParamRow, ...]
    outputs: tuple[str, ...]
    recomputed: str = ""
    away: str = ""
    chunks: str = ""


_WHOLE = "whole on every rank"


def layout_words(layout: Layout, mesh: Mesh) -> str:
    """`S0,R` on (dp, tp) as "split over dp (dim 0)"."""
    found = [
        words for placement, axis in zip(layout, mesh.axes, strict=True) if (words := _placement_words(placement, axis))
    ]
    return " and ".join(found) if found else _WHOLE


def _placement_words(placement: Placement, axis: str) -> str:
    if isinstance(placement, Shard):
        return f"split over {axis} (dim {placement.dim})"
    if isinstance(placement, Partial):
        return f"partial sums over {axis}"
    return ""


def param_words(layouts: ParamLayouts, used: Layout | None, mesh: Mesh) -> str:
    """A parameter's three layouts in one phrase: "split over tp (dim 0) and ZeRO-3 over dp and pod".

    Args:
        layouts: of the parameter.
        used: the layout its ops read it in; None where no op reads it.
        mesh: of its stage.
    """
    stored, grad, state = (parse_layout(text) for text in (layouts.stored, layouts.grad, layouts.state))
    found: dict[str, list[str]] = {}
    for index, axis in enumerate(mesh.axes):
        use = used[index] if used is not None else stored[index]
        if isinstance(use, Shard):
            found.setdefault("split over ", []).append(f"{axis} (dim {use.dim})")
            if stored[index] != use:
                found.setdefault("stored ", []).append(_placement_words(stored[index], axis) or f"whole along {axis}")
        elif isinstance(stored[index], Shard):
            found.setdefault("ZeRO-3 over ", []).append(axis)
        elif isinstance(state[index], Shard):
            found.setdefault(f"ZeRO-{2 if isinstance(grad[index], Shard) else 1} over ", []).append(axis)
    words = [how + " and ".join(where) for how, where in found.items()] or [_WHOLE]
    if layouts.ahead:
        words.append("gathered once a step")
    if layouts.state_tier or layouts.stored_tier:
        where = TIERS[layouts.stored_tier or layouts.state_tier].where
        what = where if layouts.stored_tier else f"states {where}"
        what += ", gradients too" if layouts.grad_tier else ""
        words.append(what + (", fetched to be updated" if layouts.fetched else ""))
    return " and ".join(words)


def used_layouts(graph: Graph, choice: KindChoice) -> dict[str, Layout]:
    """For every value the forward reads, the layout its first reader wants; what is cast to float8 is its cast's."""
    found: dict[str, Layout] = {}
    casts: dict[str, str] = {}
    for op, key in zip(graph.ops, choice.ops, strict=True):
        if op.phase is not Phase.FORWARD or op.target == "paraplan.float8_scale":
            continue
        if op.target in ("paraplan.float8_cast", "paraplan.float8_cast_both") and op.outs[0] is not None:
            casts[op.tensors[0]] = op.outs[0]
            continue
        parts = choices_named(op, graph.values, key)
        for position, name in enumerate(op.tensors):
            found.setdefault(name, tuple(part.inputs[position] for part in parts))
    return {name: found[cast] for name, cast in casts.items() if cast in found} | found


def float8_params(program: Program) -> tuple[str, ...]:
    """Parameters whose products are in float8, in the model's order."""
    found = set()
    for segment in program.segments:
        kind = program.kinds[segment.kind]
        cast = {op.tensors[0] for op in kind.graph.ops if op.target == "paraplan.float8_cast"}
        found |= {name for local, name in zip(kind.params, segment.params, strict=True) if local in cast}
    return tuple(name for name in program.params if name in found)


def made_layouts(graph: Graph, choice: KindChoice) -> dict[str, Layout]:
    """For every value an op makes, how it lies afterwards."""
    found: dict[str, Layout] = {}
    for op, key in zip(graph.ops, choice.ops, strict=True):
        parts, said = choices_named(op, graph.values, key), axis_parts(key)
        for position, name in enumerate(op.outs):
            if name is not None:
                found[name] = tuple(
                    parse_layout(read.reduced_to)[0] if read.reduced_to else part.outputs[position] or R
                    for part, read in zip(parts, said, strict=False)
                )
    return found


def generic_name(name: str) -> str:
    """`h.3.mlp.weight` as "h.*.mlp.weight"."""
    return _NUMBER.sub("*", name)


def kind_rows(program: Program, stage: Stage) -> tuple[KindRow, ...]:
    """One row per choice of the stage, in order of first use."""
    members: dict[int, list[int]] = {}
    for offset, chosen in enumerate(stage.segment_choice):
        members.setdefault(chosen, []).append(stage.first + offset)
    return tuple(_kind_row(program, stage, chosen, segments) for chosen, segments in members.items())


def merged_rows(program: Program, stages: Sequence[Stage]) -> tuple[KindRow, ...]:
    """As `kind_rows`, of several stages: kinds in the same layouts, of which the same is recomputed, are one row."""
    found: dict[Hashable, list[KindRow]] = {}
    for stage in stages:
        for row in kind_rows(program, stage):
            held = tuple((generic_name(param.name), param.shape, param.words) for param in row.params)
            found.setdefault((row.name, held, row.recomputed, row.away, row.chunks), []).append(row)
    return tuple(rows[0] if len(rows) == 1 else _merged(rows) for rows in found.values())


def _merged(rows: Sequence[KindRow]) -> KindRow:
    params = tuple(
        msgspec.structs.replace(
            alike[0],
            name=generic_name(alike[0].name),
            count=sum(each.count for each in alike),
            nbytes=sum(each.nbytes for each in alike),
        )
        for alike in zip(*(row.params for row in rows), strict=True)
    )
    label, instances = _label(tuple(each.name for each in params)), sum(row.instances for row in rows)
    return msgspec.structs.replace(rows[0], label=label or rows[0].label, instances=instances, params=params)


def _kind_row(program: Program, stage: Stage, chosen: int, segments: list[int]) -> KindRow:
    choice = stage.choices[chosen]
    kind = program.kinds[choice.kind]
    used, made = used_layouts(kind.graph, choice), made_layouts(kind.graph, choice)
    rows = []
    for slot, local in enumerate(kind.params):
        alike: dict[ParamLayouts, list[str]] = {}
        for name in dict.fromkeys(program.segments[index].params[slot] for index in segments):
            alike.setdefault(stage.params[name], []).append(name)
        for layouts, names in alike.items():
            spec = program.params[names[0]].spec
            held = TensorSpec(spec.dtype, local_shape(spec.shape, parse_layout(layouts.resting), stage.mesh.shape))
            rows.append(
                ParamRow(
                    name=generic_name(names[0]) if len(names) > 1 else names[0],
                    count=len(names),
                    shape=spec.shape,
                    nbytes=len(names) * held.nbytes,
                    words=param_words(layouts, used.get(local), stage.mesh),
                    stored=layouts.stored,
                    grad=layouts.grad,
                    state=layouts.state,
                )
            )
    outputs = tuple(
        f"{kind.graph.values[name]} {layout_words(made[name], stage.mesh)}" for name in kind.outputs if name in made
    )
    if stage.stop - stage.first < len(program.segments):  # of a pipeline
        rows = [msgspec.structs.replace(row, words=row.words.replace(_WHOLE, f"{_WHOLE} of its stage")) for row in rows]
    label = _label(tuple(row.name for row in rows)) or ", ".join(
        dict.fromkeys(target_parts(op.target).name for op in kind.graph.ops[:3])
    )
    return KindRow(
        name=kind.name,
        label=label,
        instances=len(segments),
        params=tuple(rows),
        outputs=outputs,
        recomputed=_recomputed(kind, choice),
        away=_away(kind, choice),
        chunks=_chunks(kind, choice),
    )


def _recomputed(kind: SegmentKind, choice: KindChoice) -> str:
    """`gelu, layer_norm, dropout`, `all of it` (that the backward needs, or to the end); views are not worth a word."""
    remat = remat_of(kind, choice.activations)
    again = (*remat.again, *remat.rerun)
    if remat.again and {*remat_of(kind, dict.fromkeys(recomputable(kind), RECOMPUTE)).again} <= {*again}:
        return "all of it, to the end" if remat.rerun else "all of it"
    dear = [kind.graph.ops[index].target for index in again]
    dear = [target for target in dear if (found := op_def(target)) is None or found.strides != "view"]
    names = Counter(target_parts(target).word for target in dear)
    return ", ".join(f"{count} {name}" if count > 1 else name for name, count in names.items()) or (
        "views" if again else ""
    )


def _chunks(kind: SegmentKind, choice: KindChoice) -> str:
    """`8 from linear on, with the backward`."""
    if choice.split is None:
        return ""
    begins = target_parts(kind.graph.ops[choice.split.op].target).name
    return f"{choice.split.chunks} from {begins} on" + (", with the backward" if choice.split.at_once else "")


def _away(kind: SegmentKind, choice: KindChoice) -> str:
    """`3 of 7 saved values on host`."""
    remat = remat_of(kind, choice.activations)
    tiers = Counter(tier for _, tier in remat.offloaded)
    return ", ".join(f"{count} of {len(remat.saved)} saved values on {tier}" for tier, count in sorted(tiers.items()))


def _label(names: tuple[str, ...]) -> str:
    """`h.*.ln.weight`, `h.*.mlp.fc.weight` as "h.*: ln, mlp.fc"."""
    modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    if len(modules) < 2:
        return modules[0] if modules else ""
    split = [module.split(".") for module in modules]
    depth = 0
    while all(len(parts) > depth + 1 for parts in split) and len({parts[depth] for parts in split}) == 1:
        depth += 1
    prefix = ".".join(split[0][:depth])
    inner = ", ".join(".".join(parts[depth:]) for parts in split)
    return f"{prefix}: {inner}" if prefix else inner


def is_whole(layout: Layout) -> bool:
    """Whether every rank holds all of it."""
    return all(isinstance(placement, Replicate) for placement in layout)
