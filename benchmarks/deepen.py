"""A program of more layers from one of few: what a deeper model's capture would be, without exporting every layer.

Problem: `torch.export` visits every layer, so capturing a model of a hundred layers costs a hundred times what one
layer costs, though all its layers are segments of the same kinds. Method: capture three layers; the middle one's
segments are repeated under further names (parameters "h.1.", "h.2.", ...; values "s3.0", "s4.0", ...). Limits: layers
are numbered in the names of their parameters, of equal kinds, and read values of their own or the layer before alone;
anything else is refused. Outputs beside the loss are dropped, and the fingerprint stays the shallow model's: this is
for pricing. A test holds it against real captures.
"""

from __future__ import annotations

import re

import msgspec

from paraplan.ir.errors import CaptureError
from paraplan.ir.model.program import ParamSpec, Program, Segment

CAPTURED = 3
"""Layers to capture: a first, a last, and one between them."""

_LAYER = re.compile(r"\.(\d+)\.")
_VALUE = re.compile(r"s(\d+)([.+]\d+)")


def deepen(program: Program, layers: int) -> Program:
    """The program with so many layers.

    Args:
        program: of `CAPTURED` layers.
        layers: at least as many.
    Raises:
        CaptureError: its layers are not alike, or read far away.
    """
    of = [_layer_of(segment) for segment in program.segments]
    old = _places(of, CAPTURED)
    kinds = {tuple(program.segments[index].kind for index in place) for place in old}
    if layers < CAPTURED or program.buffer_updates or len(kinds) != 1:
        raise CaptureError(f"{program.name} cannot be made {layers} layers deep: give {CAPTURED} layers of equal kinds")
    head, tail = old[0][0], len(of) - 1 - old[-1][-1]
    order = [(index, 0) for index in range(head)]  # (segment repeated, layer it stands for)
    for layer in range(layers):
        order += [(index, layer) for index in old[_model(layer, layers)]]
    order += [(len(of) - tail + index, 0) for index in range(tail)]
    segments = tuple(
        _moved(program.segments[index], index, place, layer, head, len(old[0]))
        for place, (index, layer) in enumerate(order)
    )
    shift = len(segments) - len(of)
    loss = tuple(msgspec.structs.replace(term, numerator=_renamed(term.numerator, shift)) for term in program.loss)
    return msgspec.structs.replace(
        program, segments=segments, seeds=len(segments), params=_params(program, layers), loss=loss, outputs={}
    )


def _model(layer: int, layers: int) -> int:
    """The captured layer that a layer is made from."""
    if layer == 0:
        return 0
    return CAPTURED - 1 if layer == layers - 1 else 1


def _layer_of(segment: Segment) -> int | None:
    found = {int(match[1]) for name in segment.params if (match := _LAYER.search(name))}
    return found.pop() if len(found) == 1 else None


def _places(of: list[int | None], layers: int) -> list[list[int]]:
    """The segments of every layer, which follow one another."""
    places = [[index for index, layer in enumerate(of) if layer == wanted] for wanted in range(layers)]
    flat = [index for place in places for index in place]
    known = all(layer in (None, *range(layers)) for layer in of)
    if not known or not flat or flat != list(range(flat[0], flat[-1] + 1)):
        raise CaptureError(f"layers are not numbered one after another in the names of parameters: {of}")
    return places


def _moved(segment: Segment, index: int, place: int, layer: int, head: int, period: int) -> Segment:
    """A segment at another place; after the first layer, what it reads must be as near as the layer before."""
    shift = place - index
    for name in segment.inputs:
        found = _VALUE.fullmatch(name)
        if found and index >= head + period and index - int(found[1]) > period:
            raise CaptureError(f"segment {index} reads {name}, made far before it: depth cannot be added between")
    return msgspec.structs.replace(
        segment,
        params=tuple(_LAYER.sub(f".{layer}.", name, count=1) for name in segment.params),
        inputs=tuple(_renamed(name, shift) for name in segment.inputs),
        outputs=tuple(_renamed(name, shift) for name in segment.outputs),
        asides=tuple(_renamed(name, shift) for name in segment.asides),
        seeds=tuple(number + shift for number in segment.seeds),
    )


def _renamed(value: str, shift: int) -> str:
    found = _VALUE.fullmatch(value)
    return f"s{int(found[1]) + shift}{found[2]}" if found else value


def _params(program: Program, layers: int) -> dict[str, ParamSpec]:
    """Parameters in the model's order: what precedes layers, layer by layer, what follows."""
    numbered = {name: int(match[1]) if (match := _LAYER.search(name)) else None for name in program.params}
    first = next(index for index, layer in enumerate(numbered.values()) if layer is not None)
    items = list(program.params.items())
    made = dict(items[:first])
    for layer in range(layers):
        for name, spec in items[first:]:
            if numbered[name] == _model(layer, layers):
                made[_LAYER.sub(f".{layer}.", name, count=1)] = spec
    return made | {name: spec for name, spec in items[first:] if numbered[name] is None}
