"""Which segments of a program are one layer of the model.

A layer is an element of a list of modules ("h.3" in "transformer.h.3.ln_1.weight") with the segments that read its
parameters, one after another, and those between them that read none; parameters that several segments share say
nothing, unless all do. Where lists stand in lists (stages of blocks, blocks of sublayers) the outermost list counts of
which two elements have equal kinds. A model without lists has no layers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from paraplan.ir.model.program import Program

_ELEMENT = re.compile(r"\.\d+(?=\.)")


def layers_of(program: Program, bounds: Iterable[int] = ()) -> tuple[range, ...]:
    """The layers as runs of segments, in order.

    Args:
        program: captured.
        bounds: where no layer may go on: it ends there, and what is left of it begins another.
    """
    count = Counter(name for segment in program.segments for name in set(segment.params))
    own = [tuple(name for name in segment.params if count[name] == 1) for segment in program.segments]
    candidates = [_elements(mine or each.params) for mine, each in zip(own, program.segments, strict=True)]
    chosen = _chosen(program, candidates)
    elements = _filled([next((text for text in each if _template(text) in chosen), "") for each in candidates], program)
    ends, found = set(bounds), list[range]()
    before, read = "", set[str]()
    for index, (segment, element) in enumerate(zip(program.segments, elements, strict=True)):
        if element and element == before and index not in ends and read.isdisjoint(segment.params):
            found[-1] = range(found[-1].start, index + 1)
            read.update(segment.params)
        elif element:
            found.append(range(index, index + 1))
            read = set(segment.params)
        before = element
    return tuple(found)


def _filled(elements: list[str], program: Program) -> list[str]:
    """Segments without parameters belong to the layer before them that goes on after them."""
    found, last = list(elements), -1
    for index, segment in enumerate(program.segments):
        if segment.params:
            if last >= 0 and elements[last] == elements[index]:
                found[last + 1 : index] = [elements[index]] * (index - last - 1)
            last = index
    return found


def _elements(params: Sequence[str]) -> tuple[str, ...]:
    """The elements of lists that all of some parameters belong to, the outermost first."""
    every = [tuple(name[: match.end()] for match in _ELEMENT.finditer(name)) for name in params]
    return tuple(text for text in every[0] if all(text in each for each in every)) if every else ()


def _template(element: str) -> str:
    """The list an element is of, whatever lists that is in."""
    return _ELEMENT.sub(".*", f"{element}.")


def _chosen(program: Program, candidates: Sequence[tuple[str, ...]]) -> frozenset[str]:
    """The lists whose elements are layers."""
    kinds: dict[str, list[int]] = {}
    for segment, elements in zip(program.segments, candidates, strict=True):
        for element in elements:
            kinds.setdefault(element, []).append(segment.kind)
    equal: dict[str, list[tuple[int, ...]]] = {}
    for element, of in kinds.items():
        equal.setdefault(_template(element), []).append(tuple(of))
    repeated = {template for template, of in equal.items() if len(set(of)) < len(of)}
    chosen = set()
    for elements in candidates:
        templates = [_template(element) for element in elements]
        if templates:
            chosen.add(next((template for template in templates if template in repeated), templates[0]))
    return frozenset(chosen)
