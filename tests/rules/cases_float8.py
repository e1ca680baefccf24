"""Cases of products in float8: small integers, whose sums are exact in bfloat16 too."""

from __future__ import annotations

import torch
from torch import Tensor

from .cases import Case, case

E4M3, E5M2 = ":float8_e4m3fn", ":float8_e5m2"
_generator = torch.Generator().manual_seed(8)


def signs(dtype: torch.dtype, *shape: int) -> Tensor:
    """-1, 0 or 1."""
    return torch.randint(-1, 2, shape, generator=_generator).float().to(dtype)


def float8_cases() -> dict[str, list[Case]]:
    """Contracted dims and columns of 192 = 16 * 12; 12 rows, which the gradient of a weight fills up to 16: torch's
    product of float8 on a CPU is slow."""
    halves, scale = torch.randn(4, 9, 12, generator=_generator).bfloat16(), torch.tensor(0.25)
    x, w = signs(torch.float8_e4m3fn, 4, 3, 192), signs(torch.float8_e4m3fn, 192, 192)
    g = signs(torch.float8_e5m2, 4, 3, 192)
    turned = [each.movedim(-1, 0).contiguous() for each in (g, x)]
    scales = [torch.tensor(0.5), torch.tensor(4.0)]
    matrix = signs(torch.float8_e4m3fn, 12, 192)

    def both(*inputs: Tensor) -> list[Case]:
        return [case([*inputs, *scales], "%a", "%b", "%c", "%d", transposed) for transposed in (False, True)]

    casts = [case([halves, scale], "%a", "%b", E4M3), case([halves[0], scale], "%a", "%b", E5M2)]
    return {
        "paraplan.float8_scale": [case([halves], "%a", E4M3), case([halves[0] * 1e6], "%a", E5M2)],
        **{f"paraplan.float8_cast{both_ways}": casts for both_ways in ("", "_both")},
        "paraplan.float8_linear": [*both(x, w), case([matrix, w, *scales], "%a", "%b", "%c", "%d", False)],
        "paraplan.float8_linear_grad_input": both(g, w),
        "paraplan.float8_linear_grad_weight": both(*turned),
    }
