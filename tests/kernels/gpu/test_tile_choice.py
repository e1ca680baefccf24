"""Tiles of attention fit the shared memory of every device of the catalog."""

from __future__ import annotations

import itertools

import pytest

from paraplan.kernels.gpu.attention.tile_choice import HOPPER_BYTES, SMALL, Operands, choose_tiles, shared_bytes

LIMITS = {8.0: 166912, 8.9: 101376, 9.0: HOPPER_BYTES, 10.0: 232448}
"""Bytes a program may have, by compute capability (CUDA's programming guide)."""


@pytest.mark.parametrize("kernel", SMALL)
@pytest.mark.parametrize("limit", LIMITS.values())
def test_tiles_fit(kernel: str, limit: int) -> None:
    """Whatever the widths, the dtype and the mask; the smallest tiles are said to take more than they do."""
    for width, other, element, mask in itertools.product((16, 64, 128, 256), (16, 64, 128, 256), (2, 4), (0, 1, 4)):
        of = Operands((width, other), element, mask, element == 4)
        tiles = choose_tiles(kernel, limit, of)
        assert shared_bytes(kernel, tiles, of) <= limit or tiles == SMALL[kernel][-1], (width, other, element, mask)
