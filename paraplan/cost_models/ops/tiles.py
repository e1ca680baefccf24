"""How full a matrix product keeps a device: output tiles, in waves over its multiprocessors.

A product of matrices is cut into tiles of its result, each a multiprocessor's; where their count is no multiple of the
multiprocessors, the last wave leaves some idle, and where edges are none of the tile's, parts of tiles are for nothing
(NVIDIA, Matrix Multiplication Background User's Guide, "tile quantization", "wave quantization"). Small tiles and few
steps of the inner dim load more for what they multiply: Hockney's half length of each. Where tiles are fewer than
multiprocessors, the inner dim is parted as well (split-K). A library takes the best, and so is it here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from paraplan.ir.process.memo import SESSION

TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
"""Rows and columns of what cuBLAS and CUTLASS cut results into (the guide's list)."""
PARTS = (1, 2, 4, 8, 16, 32)
"""Into how many parts the inner dim goes."""


class Product(NamedTuple):
    """A matrix product.

    Attributes:
        flops: its operations.
        narrow: its narrowest dim.
        shape: how many products, rows and columns of each result, the inner dim; () where that is not known.
    """

    flops: int
    narrow: int
    shape: tuple[int, ...] = ()


def product_of(rows: int, columns: int, depth: int, count: int = 1) -> Product:
    """Products of matrices of these sizes.

    Args:
        rows, columns, depth: of one product: [rows, depth] times [depth, columns].
        count: of products.
    """
    return Product(2 * count * rows * columns * depth, min(rows, columns, depth), (count, rows, columns, depth))


@SESSION.cached(1 << 16)
def filled(shape: tuple[int, ...], multiprocessors: int, half: int) -> float:
    """Share of its rate that a product of a shape reaches on a device, at most 1.

    Args:
        shape: how many products, rows and columns of each result, the inner dim.
        multiprocessors: of the device.
        half: the tile edge, and the inner dim, at which the rate is half.
    """
    count, rows, columns, depth = shape
    if min(shape) < 1:
        return 1.0
    best = 0.0
    for high, wide in TILES:
        edge = 2 / (1 / high + 1 / wide)
        rate = edge / (edge + half) / _largest(half)
        tiles = count * math.ceil(rows / high) * math.ceil(columns / wide)
        for parts in PARTS if tiles < multiprocessors else (1,):
            waves = math.ceil(tiles * parts / multiprocessors)
            useful = count * rows * columns * parts / (waves * multiprocessors * high * wide)
            best = max(best, rate * useful * (depth / parts) / (depth / parts + half))
    return best


def _largest(half: int) -> float:
    """What the largest tile reaches, which a device's rate of products is of."""
    edge = max(2 / (1 / high + 1 / wide) for high, wide in TILES)
    return edge / (edge + half)
