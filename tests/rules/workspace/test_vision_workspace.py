"""The formulas of `rules.workspace.vision_workspace` against what the kernels allocate inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from paraplan.kernels import reference_kernels
from tests.rules.workspace.measuring import SLACK_BYTES, measured, predicted

Call = tuple[str, tuple[Any, ...]]


def both_orders(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.contiguous(memory_format=torch.channels_last)


def calls(dtype: torch.dtype) -> Iterator[Call]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    rest = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    for x in both_orders(draw(4, 16, 24, 20)):
        w, g = draw(8, 16, 3, 3), draw(4, 8, 24, 20)
        yield "paraplan.conv", (x, w, draw(8), *rest)
        yield "paraplan.conv_grad_input", (g, w, (24, 20), *rest)
        yield "paraplan.conv_grad_weight", (g, x, (3, 3), *rest)
        pooled, indices = reference_kernels.max_pool(x, (2, 2), (2, 2), (0, 0), (1, 1), False)
        yield "paraplan.max_pool", (x, (2, 2), (2, 2), (0, 0), (1, 1), False)
        yield "paraplan.max_pool_grad", (both_orders(pooled)[1], indices, (24, 20))
        yield "paraplan.avg_pool", (x, (2, 2), (2, 2), (0, 0), False, True, None)
        yield "paraplan.avg_pool_grad", (pooled, (24, 20), (2, 2), (2, 2), (0, 0), False, True, None)
        yield "paraplan.upsample", (x, "upsample_nearest2d", (48, 40), (2.0, 2.0))
        yield "paraplan.upsample_grad", (x, "upsample_nearest2d", (24, 20), (12, 10), (2.0, 2.0))
        _, mean, rstd = reference_kernels.group_norm(x, draw(16), draw(16), 4, 1e-5)
        yield "paraplan.group_norm", (x, draw(16), draw(16), 4, 1e-5)
        yield "paraplan.group_norm_grad", (x, draw(4, 16, 24, 20), mean, rstd, draw(16), 4, (True, True, True))
        yield from batch_norm_calls(x, draw)


def batch_norm_calls(x: Tensor, draw: Any) -> Iterator[Call]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    mean, rstd = torch.randn(16).to(wide), torch.rand(16).to(wide) + 0.5
    sums = (torch.randn(16).to(wide), torch.randn(16).to(wide))
    yield "paraplan.bn_squares", (x, mean)
    yield "paraplan.bn_rstd", (draw(16).abs(), 8, 1e-5)
    yield "paraplan.bn_running", (draw(16), mean, 0.1, 0.5)
    for w in (draw(16), None):
        yield "paraplan.bn_apply", (x, mean, rstd, w, w)
        yield "paraplan.bn_grad_input", (draw(4, 16, 24, 20), x, mean, rstd, w, *sums, 1920)
    yield "paraplan.bn_grad_affine", (draw(4, 16, 24, 20), x, mean, rstd)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_workspace_is_foretold(dtype: torch.dtype) -> None:
    for target, args in calls(dtype):
        found, results = measured(target, args)
        foretold = predicted(target, args, results)
        assert found <= foretold <= 1.03 * found + SLACK_BYTES, f"{target}: {found} inside, {foretold} foretold"
