"""Cuts the forward graph into segments where few main values are live.

A position is a cut where exactly one main value is live (the residual stream); inside stretches without one that
hold much work, where two are, then three, then four (skips). Values read far from where they are made (an encoder's
output, which every layer of the decoder reads) are not counted, so that layers are cut alike up to the last. Pieces
without real work (a norm, a dropout) are merged into a neighbour, so that repeated layers stay equal: the longest
periodic run of pieces is found first, merging stays inside it, and what is left over at its ends never joins it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import pairwise

from torch import Tensor, fx

from paraplan.capture.canonical import autograd, experts
from paraplan.capture.cutting.flow import aten_name, is_heavy
from paraplan.capture.cutting.order import hoist_reductions
from paraplan.capture.cutting.segments import ForwardGraph, make_piece, signature
from paraplan.capture.substituting.substitute_tensor import is_piece

MAX_LIVE = 4
MAX_WORK = 8  # a gated attention block has seven matmuls and attentions
MAX_PERIOD = 32
_LIGHT = frozenset({"sort", "topk"})  # dear to clone, but no work
FAR_WORK = 16  # more than lies between a value and its last reader within any one layer


def cut(forward: ForwardGraph, tail: Set[fx.Node] = frozenset()) -> list[list[fx.Node]]:
    """Main nodes of each segment, in order; those of the tail are the last one."""
    nodes = [node for node in forward.graph.nodes if forward.is_main(node)]
    ends = [[node for node in nodes if node in tail]] if tail else []
    return [*_cut_main(forward, [node for node in nodes if node not in tail]), *ends]


def _cut_main(forward: ForwardGraph, nodes: list[fx.Node]) -> list[list[fx.Node]]:
    main = hoist_reductions(nodes, _is_work)
    work = [0]
    for node in main:
        work.append(work[-1] + _is_work(node))
    live = _live_counts(main, work)
    ends = sorted({*_cuts(live, work, 0, len(main), 1), len(main)})
    pieces = [main[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return _merge(forward, pieces)


def _is_work(node: fx.Node) -> bool:
    """Whether a node makes its piece worth a segment (the loss does not: it joins the head)."""
    if node.target in (autograd.embedding, experts.embedding_tables):
        return True
    light = node.target in (autograd.cross_entropy_sum, autograd.dropout) or aten_name(node.target) in _LIGHT
    return is_heavy(node.target) and not light


def _live_counts(main: Sequence[fx.Node], work: Sequence[int]) -> list[int]:
    """After each main node, how many main values are still read, at least one; many where one is no tensor.

    What only waits to be collected with many others (the states of a recurrent layer) does not count.
    """
    place = {node: index for index, node in enumerate(main)}
    collectors = {node for node in main if sum(source in place for source in node.all_input_nodes) > MAX_LIVE}
    change = [0] * (len(main) + 1)
    for index, node in enumerate(main):
        last = max((place[user] for user in node.users if user in place and user not in collectors), default=index)
        weight = 1 if isinstance(node.meta["val"], Tensor) else MAX_LIVE + 1
        if weight == 1 and (is_piece(node) or work[last] - work[index + 1] > FAR_WORK):
            weight = 0
        change[index] += weight
        change[last] -= weight
    counts, total = [], 0
    for index in range(len(main)):
        total += change[index]
        counts.append(max(total, 1))
    return counts


def _cuts(live: Sequence[int], work: Sequence[int], start: int, end: int, width: int) -> list[int]:
    """Positions to cut main[start:end] at: after index i means position i + 1."""
    here = [i + 1 for i in range(start, end - 1) if live[i] == width]
    if width == MAX_LIVE:
        return here
    found = list(here)
    bounds = [start, *here, end]
    for left, right in pairwise(bounds):
        if work[right] - work[left] > MAX_WORK:
            found += _cuts(live, work, left, right, width + 1)
    return found


def _merge(forward: ForwardGraph, pieces: list[list[fx.Node]]) -> list[list[fx.Node]]:
    works = [any(_is_work(node) for node in piece) for piece in pieces]
    kinds = [signature(forward, make_piece(forward, piece)) for piece in pieces]
    joined: list[list[fx.Node]] = []
    for start, end in _stretches(kinds, works, 0, len(pieces)):
        joined += _merge_stretch(pieces[start:end], works[start:end])
    return joined


def _merge_stretch(pieces: list[list[fx.Node]], works: list[bool]) -> list[list[fx.Node]]:
    """Pieces without work join the one before; leading ones the first that works."""
    joined: list[list[fx.Node]] = []
    worked = False
    for piece, work in zip(pieces, works, strict=True):
        if joined and (not work or not worked):
            joined[-1] = joined[-1] + piece
        else:
            joined.append(list(piece))
        worked = worked or work
    return joined


def _stretches(kinds: Sequence[str], works: Sequence[bool], start: int, end: int) -> list[tuple[int, int]]:
    """[start, end) as periodic runs and what lies between them."""
    run = _longest_run(kinds, works, start, end)
    if run is None:
        return [(start, end)] if start < end else []
    left, right, period = run
    while left + period < right and not works[left]:  # a run starts at a piece that works
        left += 1
    inner = [(left, right)]
    return _stretches(kinds, works, start, left) + inner + _stretches(kinds, works, right, end)


def _longest_run(kinds: Sequence[str], works: Sequence[bool], start: int, end: int) -> tuple[int, int, int] | None:
    """(left, right, period) of the longest stretch with kinds[i] == kinds[i + period], at least two periods long."""
    best: tuple[int, int, int] | None = None
    for period in range(1, min(MAX_PERIOD, (end - start) // 2) + 1):
        left = start
        for i in range(start, end - period + 1):
            if i < end - period and kinds[i] == kinds[i + period]:
                continue
            right = i + period
            long_enough = i - left >= period and any(works[left:right])
            if long_enough and (best is None or right - left > best[1] - best[0]):
                best = (left, right, period)
            left = i + 1
    return best
