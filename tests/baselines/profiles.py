"""Profiles of layers that were never measured, for planners' searches to be held against every choice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from paraplan.baselines.planners.layer_profile import LayerProfile


def made_profile(layers: int, seed: int = 0, count: int = 4, output_bytes: int = 1 << 20) -> LayerProfile:
    """Layers of random seconds and bytes; a recomputed one keeps a tenth, for its forward's time."""
    draw = random.Random(seed)
    forward_s = tuple(draw.uniform(1e-3, 4e-3) for _ in range(layers))
    saved = tuple(draw.randrange(1 << 24, 1 << 26) for _ in range(layers))
    stored = tuple(draw.randrange(1 << 22, 1 << 24) for _ in range(layers))
    return LayerProfile(
        size=1,
        samples=1,
        count=count,
        forward_s=forward_s,
        backward_s=tuple(2 * each for each in forward_s),
        stored_bytes=stored,
        grad_bytes=stored,
        state_bytes=tuple(2 * each for each in stored),
        saved_bytes=saved,
        again_s={"none": (0.0,) * layers, "selective": (0.0,) * layers, "full": forward_s},
        remade_bytes={"none": saved, "selective": saved, "full": tuple(each // 10 for each in saved)},
        output_bytes=tuple(draw.randrange(output_bytes // 4, output_bytes) for _ in range(layers)),
        workspace_bytes=1 << 20,
        reduce_s=0.0,
    )


def every_cut(layers: int, stages: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every way to cut a chain."""
    for ends in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(itertools.pairwise((0, *ends, layers)))
