"""Tiles of attention fit the shared memory of every device of the catalog."""

from __future__ import annotations

import itertools

import pytest

from paraplan.kernels.gpu.attention.tile_choice import HOPPER_BYTES, SMALL, Operands, choose_tiles, shared_bytes
from tests.kernels.gpu.compiling import compiled

LIMITS = {7.0: 98304, 8.0: 166912, 8.9: 101376, 9.0: HOPPER_BYTES, 10.0: 232448}
"""Bytes a program may have, by compute capability (CUDA's programming guide, table of technical specifications)."""


@pytest.mark.parametrize("kernel", SMALL)
@pytest.mark.parametrize(("capability", "limit"), LIMITS.items())
def test_tiles_fit(kernel: str, capability: float, limit: int) -> None:
    """Whatever the widths, the dtype and the mask; of the smallest tiles more is said than they take."""
    for width, other, element, mask in itertools.product((16, 64, 128, 256), (16, 64, 128, 256), (2, 4), (0, 1, 4)):
        of = Operands((width, other), element, mask, element == 4 and capability >= 9)
        tiles = choose_tiles(kernel, limit, of)
        assert shared_bytes(kernel, tiles, of) <= limit or tiles == SMALL[kernel][-1], (width, other, element, mask)


_COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Absent:
    def get_current_target(self):
        return GPUTarget("cuda", {capability}, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("meta")


driver.set_active(Absent())
from paraplan.kernels.gpu import triton_launch
from paraplan.kernels.gpu.attention import tile_choice, tiled


def compile(launch, *tensors):
    made = launch.kernel.warmup(
        *tensors, *launch.rest, grid=launch.grid, num_warps=launch.warps, num_stages=launch.stages or 3
    )
    name, of = launch.kernel.fn.__name__[1:], launch.rest[-1]
    if name != "delta":
        said = tile_choice.Operands((of.width, of.e_width), tensors[0].element_size(), {mask_bytes}, {split})
        bound = tile_choice.shared_bytes(name, tile_choice.Tiles(of.m, of.n, launch.warps, launch.stages), said)
        print(name, int(made.metadata.shared <= min(bound, {limit})))


triton_launch.Prepared.__call__ = compile
tiled.shared_limit = lambda device: {limit}
tiled._precision = lambda dtype, device: ("tf32x3" if dtype == torch.float32 else "ieee", {split})
dtype, b, h, g, s, (d, e) = torch.{dtype}, 2, 4, 2, 512, {widths}
q, k, v, grad = (torch.empty(b, s, heads, width, dtype=dtype, device="meta").transpose(1, 2)
                 for heads, width in ((h, d), (g, d), (g, e), (h, e)))
seed = torch.zeros((), dtype=torch.int64, device="meta")
mask = torch.empty(1, h, s, s, dtype=torch.float32, device="meta") if {mask_bytes} else None
rest = (0.1, 0, True, 0.125, (b, h, s, s), (0, 0, 0, 0))
out, lse = tiled.attention(q, k, v, mask, seed, *rest)
tiled.attention_grad(grad, q, k, v, mask, seed, out, lse, *rest, bool({mask_bytes}))
"""


@pytest.mark.parametrize(
    ("capability", "dtype", "widths", "mask_bytes"),
    [
        (9.0, "bfloat16", (128, 128), 4),
        (9.0, "float32", (256, 256), 4),
        (9.0, "float32", (128, 128), 0),
        (8.0, "float32", (128, 128), 0),
        (8.0, "float32", (200, 256), 0),
        (8.9, "bfloat16", (256, 64), 4),
    ],
)
def test_compiled_tiles_take_at_most_what_is_said(
    capability: float, dtype: str, widths: tuple[int, int], mask_bytes: int
) -> None:
    """With dropout and grouped heads; a mask's gradient too."""
    script, split = _COMPILE, dtype == "float32" and capability >= 9
    of = {"capability": int(capability * 10), "limit": LIMITS[capability], "dtype": dtype, "split": split}
    for name, value in (of | {"widths": widths, "mask_bytes": mask_bytes}).items():
        script = script.replace("{" + name + "}", str(value))
    kernels = ("forward", "key_grads", "query_grads", *(("mask_grad",) if mask_bytes else ()))
    assert compiled(script) == dict.fromkeys(kernels, 1)
