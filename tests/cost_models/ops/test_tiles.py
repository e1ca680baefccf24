"""Tiles over multiprocessors against what NVIDIA's guide works out by hand, and against taking every tile in turn."""

from __future__ import annotations

import math
import random

import pytest

from paraplan.cost_models.ops.tiles import PARTS, TILES, filled

SMS = 108
"""Of an A100, as in the guide's examples."""


def test_one_tile_more_than_fits_takes_another_wave() -> None:
    """The guide's example: results of 256 x 128 tiles, one wave of 108, then one tile beside it. (Smaller tiles soften
    the step: what is left of it is theirs.)"""
    full, over = (filled((1, 256, 128 * tiles, 1 << 20), SMS, 64) for tiles in (108, 109))
    assert full == pytest.approx(1.0, abs=1e-3)
    assert over < 0.8


def test_edges_that_fill_no_tile_are_for_nothing() -> None:
    aligned, wasted = (filled((1, 1 << 14, columns, 1 << 14), SMS, 64) for columns in (1 << 14, (1 << 14) + 1))
    assert 0.98 * aligned < wasted < aligned
    assert filled((1, 1, 1 << 14, 1 << 14), SMS, 64) < 1 / 32, "one row of the smallest tile's 64"


def test_products_of_few_tiles_part_their_inner_dim() -> None:
    alone = 0.7 * 1 / SMS
    assert filled((1, 64, 64, 1 << 16), SMS, 64) > 20 * alone
    assert filled((1, 64, 64, 64), SMS, 64) < alone, "there is nothing to part"


@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_every_way(seed: int) -> None:
    draw = random.Random(seed)
    count, rows, columns, depth = draw.randint(1, 96), *(draw.randint(1, 5000) for _ in range(3))
    times = []
    for high, wide in TILES:
        tiles = count * -(-rows // high) * -(-columns // wide)
        for parts in PARTS if tiles < SMS else [1]:
            # Seconds in units of the device's rate, were every tile as good as the largest.
            edge, largest = (2 * a * b / (a + b) for a, b in ((high, wide), (256, 128)))
            worse = (largest / (largest + 64)) / (edge / (edge + 64))
            steps = depth / parts + 64
            times.append(math.ceil(tiles * parts / SMS) * high * wide * steps * worse * SMS)
    assert filled((count, rows, columns, depth), SMS, 64) == pytest.approx(count * rows * columns * depth / min(times))
