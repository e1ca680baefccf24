"""Mixtures by grouped products, torch's and ours in Triton's interpreter, held against the reference kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paraplan.kernels import expert_kernels

pytest.importorskip("triton")

from paraplan.kernels.gpu.rows import experts, grouped_products
from tests.kernels.gpu.compiling import compiled

TOKENS, CHOICES, TOTAL = 40, 2, 8
CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def _drawn(dtype: torch.dtype, parts: int, held: int, start: int) -> tuple[Any, ...]:
    """Rows, choices of all experts (one that nobody chose, one number that is nobody's), weights and stacks."""
    generator = torch.Generator().manual_seed(held)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.5).to(dtype)

    ids = torch.rand(TOKENS, TOTAL, generator=generator).topk(CHOICES)[1]
    ids[ids == start + 1] = start
    ids[3, 1], ids[5, 0] = TOTAL, TOTAL
    weights = torch.rand(TOKENS, CHOICES, generator=generator).to(dtype)
    return draw(TOKENS, 24), draw(TOKENS, 16), ids, weights, draw(held, parts, 8, 16), draw(held, 24, 8)


def _wide(*given: Any) -> list[Any]:
    return [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in given]


def _same(made: Tensor, wanted: Tensor) -> None:
    assert made.shape == wanted.shape
    error = (made.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-9)
    assert float(error) < CLOSE[made.dtype], float(error)


@pytest.mark.parametrize(
    ("dtype", "parts", "held", "start", "activation"),
    [
        (torch.float32, 2, 8, 0, "silu"),
        (torch.float32, 1, 4, 4, "relu"),
        (torch.float32, 2, 4, 4, "gelu_tanh"),
        (torch.float32, 2, 2, 2, "gelu"),
        (torch.bfloat16, 2, 2, 2, "silu"),
        (torch.float16, 2, 4, 4, "silu"),
        (torch.float16, 1, 1, 7, "silu"),
        (torch.bfloat16, 2, 8, 0, "silu"),
    ],
)
def test_a_mixture_and_its_gradients(dtype: torch.dtype, parts: int, held: int, start: int, activation: str) -> None:
    """All experts, half of them (in one piece), and fewer (in several)."""
    g, x, ids, weights, w_in, w_out = _drawn(dtype, parts, held, start)
    rest = (activation, TOTAL, start)
    made = experts.experts(x, ids, weights, w_in, w_out, *rest)
    _same(made, expert_kernels.experts(*_wide(x, ids, weights, w_in, w_out), *rest))
    for train in (True, False):
        found = experts.experts_grad(g, x, ids, weights, w_in, w_out, *rest, train)
        told = expert_kernels.experts_grad(*_wide(g, x, ids, weights, w_in, w_out), *rest, train)
        for mine, other in zip(found, told, strict=True):
            assert (mine is None) == (other is None)
            if mine is not None and other is not None:
                _same(mine, other)


def test_all_rows_on_one_rank_take_several_pieces() -> None:
    """Every token chose the two experts of a rank that holds two of eight: four times what is expected there."""
    g, x, ids, weights, w_in, w_out = _drawn(torch.float32, 2, 2, 2)
    ids[:] = torch.tensor([3, 2])
    rest = ("silu", TOTAL, 2)
    _same(
        experts.experts(x, ids, weights, w_in, w_out, *rest),
        expert_kernels.experts(*_wide(x, ids, weights, w_in, w_out), *rest),
    )
    found = experts.experts_grad(g, x, ids, weights, w_in, w_out, *rest)
    told = expert_kernels.experts_grad(*_wide(g, x, ids, weights, w_in, w_out), *rest)
    for mine, other in zip(found, told, strict=True):
        assert mine is not None and other is not None
        _same(mine, other)


ENDS = torch.tensor([0, 70, 70, 137], dtype=torch.int32)


@pytest.mark.parametrize("dtype", CLOSE)
def test_grouped_products(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of more rows than a tile and of none, matrices either way, rows within wider ones; torch's and ours."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(150, 48, generator=generator).to(dtype)[:, :40] for _ in range(2))
    stack = torch.randn(4, 40, 72, generator=generator).to(dtype)
    for torchs in (dtype == torch.bfloat16, True):  # the interpreter multiplies the bits of bfloat16 as integers
        if torchs:
            assert grouped_products._is_torchs(a, stack) == (dtype == torch.bfloat16)
        else:
            monkeypatch.setattr(grouped_products, "_is_torchs", lambda a, b: False)
        for turned in (stack, stack.transpose(1, 2).contiguous().transpose(1, 2)):
            made, start = grouped_products.product(a, turned, ENDS), 0
            for index, end in enumerate(ENDS.tolist()):
                if end > start:
                    _same(made[start:end], a[start:end].double() @ stack[index].double())
                start = end
        sums, start = grouped_products.outer(a, b, ENDS), 0
        for index, end in enumerate(ENDS.tolist()):
            wanted = a[start:end].double().t() @ b[start:end].double()
            _same(sums[index], wanted)
            assert end > start or not sums[index].count_nonzero()
            start = end
        monkeypatch.undo()


def test_what_torchs_product_does_not_take_is_ours() -> None:
    half = torch.zeros(16, 24, dtype=torch.bfloat16)
    assert grouped_products._is_torchs(half, torch.zeros(2, 24, 8, dtype=torch.bfloat16))
    assert not grouped_products._is_torchs(half, torch.zeros(2, 24, 12, dtype=torch.bfloat16))
    assert not grouped_products._is_torchs(
        half.flatten()[4:-20].view(15, 24), torch.zeros(2, 24, 8, dtype=torch.bfloat16)
    )
    assert not grouped_products._is_torchs(half.float(), torch.zeros(2, 24, 8))


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from paraplan.kernels.gpu.rows import experts, grouped_products
tensors = dict.fromkeys(("x", "g", "xs", "gs", "u", "d", "y", "a", "b", "out", "total", "part"), "*bf16")
tensors |= dict.fromkeys(("weights", "gw"), "*fp32") | dict.fromkeys(("ends", "inverse"), "*i32")
tensors |= dict.fromkeys(("ranked", "order", "first", "ids"), "*i64") | {"bs": ("i64", "i64", "i64")}
fixed = dict(block=1024, grad=True, gated=True, kind=1, weighted=True, adds=True, tile_m=128, tile_n=128, tile_k=32)
for kernel in (experts._place, experts._gather, experts._hidden, experts._hidden_grad, experts._combine, experts._add,
               grouped_products._product, grouped_products._outer):
    names = [each.name for each in kernel.params]
    signature = {name: "constexpr" if name in fixed else tensors.get(name, "i32") for name in names}
    constants = {name: value for name, value in fixed.items() if name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(kernel.__name__, len(made.asm["cubin"]))
"""


def test_kernels_compile_for_a_device_that_is_not_there() -> None:
    assert len(compiled(_COMPILE)) == 8
