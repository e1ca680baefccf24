"""Shared memory that Triton gives our attention, compiled for devices that are not there: what those have, at most."""

from __future__ import annotations

import pytest

from tests.kernels.gpu.compiling import compiled

pytest.importorskip("triton")

_COMPILE = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from paraplan.kernels.gpu.attention import tiled
from paraplan.kernels.gpu.attention.tile_choice import choose_tiles, shared_bytes
from paraplan.kernels.gpu.triton_launch import Prepared

class Absent:
    def get_current_target(self):
        return GPUTarget("cuda", {capability}, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0
    def get_active_torch_device(self):
        return torch.device("meta")

def choose(kernel, limit, of):
    tiles = choose_tiles(kernel, limit, of)
    bounds[kernel] = shared_bytes(kernel, tiles, of)
    return tiles
def launch(prepared, *tensors):
    options = dict(num_stages=prepared.stages) if prepared.stages else dict()
    made = prepared.kernel.warmup(*tensors, *prepared.rest, grid=prepared.grid, num_warps=prepared.warps, **options)
    name = prepared.kernel.fn.__name__[1:]
    assert made.metadata.shared <= bounds.get(name, {limit}), (name, prepared.rest[-1], made.metadata.shared, bounds)
    print(name, made.metadata.shared)

bounds = dict()
tiled.choose_tiles, Prepared.__call__ = choose, launch
tiled.shared_limit = lambda device: {limit}
driver.set_active(Absent())
dtype, b, h, g, s, (d, e) = torch.{dtype}, 2, 4, 2, 512, {widths}
q, k, v, grad, out = (torch.empty(b, s, heads, width, dtype=dtype, device="meta").transpose(1, 2)
                      for heads, width in ((h, d), (g, d), (g, e), (h, e), (h, e)))
seed, lse = torch.empty((), dtype=torch.int64, device="meta"), torch.empty(b, h, s, device="meta")
mask = torch.empty(1, h, s, s, dtype=torch.float32, device="meta") if {masked} else None
rest = 0.1, 3, True, 0.25, (b, h, s, s), (0, 0, 0, 0)
tiled.attention(q, k, v, mask, seed, *rest)
tiled.attention_grad(grad, q, k, v, mask, seed, out, lse, *rest, {masked})
"""
HOPPER, AMPERE, ADA = (90, 232448), (80, 166912), (80, 101376)


@pytest.mark.parametrize(
    ("device", "dtype", "widths", "masked"),
    [
        (HOPPER, "bfloat16", (128, 128), True),
        (HOPPER, "bfloat16", (64, 64), True),
        (HOPPER, "float32", (128, 128), False),
        (HOPPER, "float32", (64, 64), False),
        (AMPERE, "float32", (64, 64), False),
        (AMPERE, "float32", (200, 256), False),
        (ADA, "bfloat16", (256, 64), True),
        (ADA, "float32", (256, 256), False),
    ],
)
def test_attention_fits(device: tuple[int, int], dtype: str, widths: tuple[int, int], masked: bool) -> None:
    """With dropout, grouped heads, values of another width, the mask's gradient; and the bound by which tiles are
    chosen holds."""
    capability, limit = device
    found = compiled(_COMPILE.format(capability=capability, limit=limit, dtype=dtype, widths=widths, masked=masked))
    assert set(found) == {"forward", "delta", "key_grads", "query_grads"} | ({"mask_grad"} if masked else set())
    assert max(found.values()) <= limit, found
