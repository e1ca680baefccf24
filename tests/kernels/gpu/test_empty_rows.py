"""Log-sums of rows that attend to nothing in Triton's interpreter, held against the mask."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from paraplan.kernels.gpu.attention.empty_rows import COLUMNS, clear_empty_rows
from tests.kernels.gpu.compiling import compiled

NOTHING = float("-inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_without_a_key(dtype: torch.dtype, causal: bool) -> None:
    """Rows whose first key comes late, keys in the future alone, lse = 0 of a key that is there, and padding."""
    b, h, s = 2, 3, 2 * COLUMNS + 37
    bias = torch.full((b, 1, s, s + 11), NOTHING, dtype=dtype)[..., :s]
    bias[0, 0].diagonal().fill_(0.5)
    bias[0, 0, 3] = NOTHING
    bias[0, 0, 5, 4:] = -1.0 if dtype == torch.float16 else NOTHING
    bias[0, 0, 7, 2 * COLUMNS + 1] = 0
    bias[1, 0, :, 0] = torch.finfo(dtype).min
    added = bias.expand(b, h, s, s)
    seen = added.float() * 1.4426950408889634 > NOTHING
    if causal:
        seen = seen.tril()
    empty = ~seen.any(-1)
    assert 0 < int(empty.sum()) < empty.numel()
    lse = torch.zeros(b, h, -(-s // 32) * 32)
    lse[..., s:] = float("inf")
    lse[0, 1, 9:12] = torch.tensor([float("nan"), 2.5, float("inf")])  # whatever is not 0 is left alone
    wanted = lse[..., :s].masked_fill(empty & (lse[..., :s] == 0), NOTHING)
    torch.testing.assert_close(clear_empty_rows(lse, added, causal), wanted, rtol=0, atol=0, equal_nan=True)


def test_what_is_not_padded_is_changed_in_place() -> None:
    lse, bias = torch.zeros(1, 2, 64), torch.zeros(1, 1, 64, 48)
    bias[0, 0, 40] = NOTHING
    made = clear_empty_rows(lse, bias.expand(1, 2, 64, 48), False)
    assert made is lse and lse[0, :, 40].eq(NOTHING).all() and int(lse.isfinite().sum()) == 126


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from paraplan.kernels.gpu.attention import empty_rows
types = dict(lse="*fp32", bias="*bf16", out="*fp32", bias_b="i64")
fixed = dict(causal=True, rows=empty_rows.ROWS, columns=empty_rows.COLUMNS)
names = [each.name for each in empty_rows._clear.params]
signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in names}
made = triton.compile(ASTSource(fn=empty_rows._clear, signature=signature, constexprs=fixed),
                      target=GPUTarget("cuda", 90, 32))
print("_clear", len(made.asm["cubin"]))
"""


def test_it_compiles_for_a_device_that_is_not_there() -> None:
    assert list(compiled(_COMPILE)) == ["_clear"]
