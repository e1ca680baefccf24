"""Finding the sets of values an op is linear in by running it: those may be partial sums together.

An op is linear in a set of inputs where f(x + x', rest) = f(x, rest) + f(x', rest).
"""

from __future__ import annotations

import itertools

import torch

from paraplan.capture.discovery.discover_draws import close
from paraplan.capture.discovery.discover_run import Bench


def find_linear(bench: Bench) -> tuple[tuple[int, ...], ...]:
    """The smallest sets of values the op is linear in: every output then is the sum of what the addends give."""
    probe = bench.probe
    outs = [spec for index, spec in enumerate(probe.outs) if spec is not None and index not in probe.unread]
    floats = [value for value, spec in enumerate(probe.specs) if spec.is_float]
    if not outs or not all(spec.is_float for spec in outs):
        return ()
    narrowest = min(spec.real_bytes for spec in outs)
    floats = [v for v in floats if probe.specs[v].real_bytes <= narrowest]
    found: list[tuple[int, ...]] = []
    counts = range(1, len(floats) + 1) if len(floats) <= 4 else (1, 2, len(floats))
    for count in counts:
        for group in itertools.combinations(floats, count):
            if not any(set(smaller) <= set(group) for smaller in found) and is_linear(bench, group):
                found.append(group)
    return tuple(found)


def is_linear(bench: Bench, group: tuple[int, ...]) -> bool:
    """Whether f(x + x', rest) = f(x, rest) + f(x', rest) for the values of the group, on all draws but the first.

    A result that another x leaves as it is on every draw is no evidence.
    """
    smallest = min((size for shape in bench.sizing.shapes for size in shape if size > 1), default=2)
    args, kwargs = bench.sizing.args, bench.sizing.kwargs
    unmoved = {index for index, out in enumerate(bench.draws[-1].whole) if out is not None and out.numel()}
    unmoved -= bench.probe.unread
    for draw in bench.draws[1:]:
        other = bench.fresh_draw(smallest)
        second = [other[value] if value in group else x for value, x in enumerate(draw.tensors)]
        joined = [x + other[value] if value in group else x for value, x in enumerate(draw.tensors)]
        right, whole = bench.run(second, args, kwargs), bench.run(joined, args, kwargs)
        if right is None or whole is None:
            return False
        for index, (a, b, c) in enumerate(zip(draw.whole, right, whole, strict=True)):
            if a is not None and not (b is not None and c is not None and close(a + b, c)):
                return False
            if a is not None and b is not None and not torch.equal(a, b):
                unmoved.discard(index)
    return not unmoved
