"""Offload the inputs of layers while they run forward, and bring them back one layer ahead of their backward.

For every forward op (of the chosen class), each tensor it reads that the backward reads too is copied out while the
last forward op that reads it runs, which waits for the copy's end and frees it. Its copy back begins when the op before
its first backward reader begins. vdnn-all takes the inputs of all ops, vdnn-conv those of convolutions (ops named
"conv").

Source: Rhu, Gimelshein, Clemons, Zulfiqar & Keckler 2016 (vDNN, MICRO). One plan each, whatever the
budget; a tier that is full takes no more. Limits: a layer is an op; the choice of convolution algorithms is not part of
a step here. "conv" is read from op names.
"""

from __future__ import annotations

import re

from paraplan.baselines.chains.chain_blocks import split_backward
from paraplan.baselines.common import Limits, answer, check_budget, tier_of
from paraplan.baselines.swapping.swap_writing import Gap, Spans, Swap, within_capacity, written
from paraplan.ir.errors import ConstraintError
from paraplan.planner.memory.answer import MemoryAnswer
from paraplan.planner.memory.problem import MemoryProblem

NO_CONVOLUTION = {"bn", "pad", "padding", "relu", "norm", "pool", "act"}
"""Words of names like "conv1_bn", which are no convolutions."""


def is_conv(problem: MemoryProblem, op: int) -> bool:
    """Whether a forward op is a convolution, by its name."""
    name = problem.ops[op].name.lower()
    words = set(re.split(r"[^a-z]+", name))
    return not problem.ops[op].backward and "conv" in name and words.isdisjoint(NO_CONVOLUTION)


def vdnn_all(problem: MemoryProblem, budget_bytes: int, limits: Limits) -> MemoryAnswer:
    """Inputs of all forward ops."""
    return _offloaded(problem, budget_bytes, "vdnn-all", frozenset(range(len(problem.ops))))


def vdnn_conv(problem: MemoryProblem, budget_bytes: int, limits: Limits) -> MemoryAnswer:
    """Inputs of convolutions.

    Raises:
        ConstraintError: no op is named a convolution.
    """
    end = split_backward(problem, "vdnn-conv")
    convolutions = frozenset(op for op in range(end) if is_conv(problem, op))
    if not convolutions:
        raise ConstraintError('vdnn-conv: no forward op has "conv" in its name: take vdnn-all, or name the ops')
    return _offloaded(problem, budget_bytes, "vdnn-conv", convolutions)


def _offloaded(problem: MemoryProblem, budget_bytes: int, strategy: str, layers: frozenset[int]) -> MemoryAnswer:
    check_budget(problem, budget_bytes)
    tier = tier_of(problem, strategy)
    first_backward = split_backward(problem, strategy)
    ops = tuple(range(len(problem.ops)))
    gaps = []
    for gap in (gap for tensor in range(len(problem.tensors)) for gap in Spans(problem, ops).gaps(tensor)):
        inputs_of = [reader for reader in problem.readers[gap.tensor] if reader < first_backward]
        if gap.after < first_backward <= gap.before and inputs_of and layers.intersection(inputs_of):
            gaps.append(gap)
    gaps = within_capacity(problem, sorted(gaps, key=lambda g: (g.after, g.tensor)), tier)
    swaps = [_one_layer_ahead(gap, first_backward) for gap in gaps]
    notes = (f"{len(swaps)} tensors to {tier.name}",)
    return answer(problem, written(problem, ops, swaps, tier), notes=notes)


def _one_layer_ahead(gap: Gap, first_backward: int) -> Swap:
    ahead = max(gap.before - 1, first_backward, gap.after + 1)
    return Swap(gap, out_at=gap.after, free_at=gap.after + 1, back_at=min(ahead, gap.before))
