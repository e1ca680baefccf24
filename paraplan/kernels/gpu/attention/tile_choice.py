"""Sizes of the tiles of our attention: the quickest measured of those that fit a device's shared memory."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """Sizes of a kernel's tiles, and how it is compiled.

    Attributes:
        m, n: queries and keys of a tile.
        warps: of a program.
        stages: tiles of its loop in flight at once.
    """

    m: int
    n: int
    warps: int
    stages: int


class Operands(NamedTuple):
    """What the choice of tiles depends on.

    Attributes:
        widths: of a row of queries or keys, and of values, padded.
        element_bytes, mask_bytes: of an element of them, and of the mask; 0 where there is none.
        is_split: whether products in float32 read two parts of their operands from shared memory.
    """

    widths: tuple[int, int]
    element_bytes: int
    mask_bytes: int
    is_split: bool = False


Sizes = dict[str, tuple[tuple[int, int, int, int], ...]]
"""By kernel, those to be preferred first: queries, keys, warps, stages."""

NARROW: Sizes = {
    "forward": ((64, 64, 4, 3), (64, 64, 4, 2)),
    "key_grads": ((32, 128, 4, 3), (64, 64, 4, 2)),
    "query_grads": ((64, 64, 4, 3), (64, 64, 4, 2)),
    "mask_grad": ((64, 64, 4, 2),),
}
"""Half precision, rows of at most 64."""
WIDE: Sizes = {
    "forward": ((64, 64, 4, 3), (64, 64, 4, 2)),
    "key_grads": ((64, 128, 8, 3), (64, 64, 4, 2)),
    "query_grads": ((128, 64, 8, 3), (64, 64, 4, 2)),
    "mask_grad": ((128, 64, 8, 2), (64, 64, 4, 2)),
}
"""Rows of at most 128."""
WIDEST: Sizes = {
    "forward": ((64, 32, 4, 2),),
    "key_grads": ((32, 64, 8, 2),),
    "query_grads": ((64, 64, 8, 2),),
    "mask_grad": ((64, 64, 4, 2),),
}
"""Wider rows; not measured: those with the fewest spilled registers."""
SPLIT: Sizes = {
    "forward": ((64, 64, 4, 2),),
    "key_grads": ((32, 32, 4, 2),),
    "query_grads": ((64, 32, 4, 2),),
    "mask_grad": ((64, 32, 4, 2),),
}
"""Float32 in products of three in TF32 from compute capability 9 on: the largest without spilled registers, at 64."""
SMALL: Sizes = {
    "forward": ((64, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1)),
    "key_grads": ((32, 64, 4, 2), (32, 32, 4, 2), (16, 32, 4, 1), (16, 16, 4, 1)),
    "query_grads": ((64, 32, 4, 2), (32, 32, 4, 2), (32, 16, 4, 1), (16, 16, 4, 1)),
    "mask_grad": ((64, 32, 4, 2), (32, 32, 4, 2), (32, 16, 4, 1), (16, 16, 4, 1)),
}
"""All else, and where none of those fit."""
HOPPER_BYTES = 232448


def shared_bytes(kernel: str, tiles: Tiles, of: Operands) -> int:
    """An upper bound of the shared memory that Triton gives a kernel.

    Its own rows, the rows of every stage of its loop, the mask's tile likewise, one tile of scores (two in float32) and
    what it holds of every row; in float32 its own rows and one stage's once more, else half a stage's.

    Args:
        kernel: "forward", "key_grads", "query_grads" or "mask_grad".
        tiles: its tiles.
        of: what it works on.
    """
    row = sum(of.widths) * of.element_bytes
    own, loop = {
        "forward": (tiles.m * of.widths[0] * of.element_bytes, tiles.n * row),
        "key_grads": (tiles.n * row, tiles.m * row),
        "query_grads": (tiles.m * row, tiles.n * row),
        "mask_grad": (0, (tiles.m + tiles.n) * row),
    }[kernel]
    if of.element_bytes == 4:  # split into parts in TF32, and turned, for products take either only one way round
        own = 2 * own + loop
    else:
        own += loop // 2
    scores = (tiles.m + 8) * (tiles.n + 8) * (8 if of.element_bytes == 4 else 4)
    return own + tiles.stages * (loop + tiles.m * tiles.n * of.mask_bytes + 8 * tiles.m) + scores + 2048


def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that a program may have on a device; Hopper's where there is none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return HOPPER_BYTES
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def choose_tiles(kernel: str, limit: int, of: Operands) -> Tiles:
    """The first tiles of a kernel that fit a device's shared memory; the last where none do.

    Args:
        kernel: "forward", "key_grads", "query_grads" or "mask_grad".
        limit: bytes of shared memory that a program may have (`shared_limit`).
        of: what the kernel works on.
    """
    if of.element_bytes == 4:
        preferred = SPLIT[kernel] if of.is_split else ()
    else:
        widest = max(of.widths)
        preferred = (NARROW if widest <= 64 else WIDE if widest <= 128 else WIDEST)[kernel]
    found = [Tiles(*each) for each in (*preferred, *SMALL[kernel])]
    return next((each for each in found if shared_bytes(kernel, each, of) <= limit), found[-1])
