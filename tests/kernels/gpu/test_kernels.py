"""Triton kernels in Triton's interpreter, held against the reference kernels: bit for bit where no sum is involved."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from paraplan.kernels import attention_kernels, float8_kernels, random_kernels, reference_kernels

pytest.importorskip("triton")

from paraplan.kernels.gpu import cross_entropy, float8
from paraplan.kernels.gpu import random as gpu_random
from paraplan.kernels.gpu.attention import flash, tiled
from tests.kernels.gpu.compiling import compiled

SEED = torch.tensor(-12345678901)
BLOCKS = [
    ((3, 5, 7), (3, 5, 7), (0, 0, 0)),
    ((2, 5, 7), (4, 10, 14), (2, 5, 7)),
    ((2, 3, 4, 6), (2, 6, 4, 6), (0, 3, 0, 0)),
    ((9,), (18,), (9,)),
    ((), (), ()),
    ((4, 1030), (8, 2060), (4, 1030)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("shape", "whole", "starts"), BLOCKS)
def test_dropout_draws_the_same_bits(shape: Any, whole: Any, starts: Any, dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for p in (0.0, 0.1, 0.5, 1.0):
        made = gpu_random.dropout(x, SEED, p, 3, whole, starts)
        wanted = random_kernels.dropout(x, SEED, p, 3, whole, starts)
        if dtype == torch.bfloat16:  # the interpreter cuts bits off where devices round
            assert torch.equal(made == 0, wanted == 0)
            torch.testing.assert_close(made, wanted, rtol=2**-7, atol=0)
        else:
            assert torch.equal(made, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("shape", "whole", "starts"), BLOCKS)
def test_uniform_draws_the_same_bits(shape: Any, whole: Any, starts: Any, dtype: torch.dtype) -> None:
    x = torch.empty(shape, dtype=dtype)
    made = gpu_random.uniform(x, SEED, 5, whole, starts)
    assert torch.equal(made, random_kernels.uniform(x, SEED, 5, whole, starts))


def test_a_strided_block_is_dropped_like_its_copy() -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).t()
    assert torch.equal(
        gpu_random.dropout(x, SEED, 0.4, 0, (7, 5), (0, 0)), random_kernels.dropout(x, SEED, 0.4, 0, (7, 5), (0, 0))
    )


VOCABULARIES = [((3, 5, 7), 0, -1), ((4, 3000), 0, -1), ((6, 2050), 2050, -1), ((2, 3, 40), 40, 70), ((4, 40), 80, 70)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("shape", "v_start", "columns"), VOCABULARIES)
def test_parts_of_cross_entropy(shape: tuple[int, ...], v_start: int, columns: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(shape, generator=generator) * 3).to(dtype)
    labels = torch.randint(0, 3 * shape[-1], shape[:-1], generator=generator)
    labels.view(-1)[0] = -100
    close = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2}[dtype]

    def same(made: Tensor, wanted: Tensor) -> None:
        assert made.dtype == wanted.dtype
        torch.testing.assert_close(made, wanted, rtol=close, atol=1e-6)

    m = reference_kernels.ce_max(logits, columns, v_start)
    same(cross_entropy.ce_max(logits, columns, v_start), m)
    m = m.nan_to_num(neginf=0.0)
    s = reference_kernels.ce_sumexp(logits, m, columns, v_start)
    same(cross_entropy.ce_sumexp(logits, m, columns, v_start), s)
    classes = 3 * shape[-1]
    t = reference_kernels.ce_target(logits, labels, -100, v_start, classes)
    same(cross_entropy.ce_target(logits, labels, -100, v_start, classes), t)
    s, g = s.clamp(min=1e-3), torch.tensor(0.37, dtype=m.dtype)
    same(cross_entropy.ce_loss(m, s, t, labels, -100), reference_kernels.ce_loss(m, s, t, labels, -100))
    same(
        cross_entropy.ce_grad(g, logits, m, s, labels, -100, v_start),
        reference_kernels.ce_grad(g, logits, m, s, labels, -100, v_start),
    )


@pytest.mark.parametrize("kernel", [reference_kernels.ce_grad, cross_entropy.ce_grad])
def test_ignored_rows_have_no_gradient_even_of_an_infinite_one(kernel: Any) -> None:
    logits, labels = torch.randn(2, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([-100, 3])
    m = reference_kernels.ce_max(logits)
    found = kernel(torch.tensor(float("inf")), logits, m, reference_kernels.ce_sumexp(logits, m), labels, -100)
    assert not found[0].count_nonzero() and not found[1].isfinite().any()


def test_a_label_that_is_no_class_makes_the_loss_nan() -> None:
    logits, labels = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([1, -100, 8])
    found = cross_entropy.ce_target(logits, labels, -100)
    assert found.isnan().tolist() == [False, False, True]
    assert not cross_entropy.ce_target(logits, labels, -100, 0, 16).isnan().any()


FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
HALVES = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
"""Every bfloat16."""


@pytest.mark.parametrize("dtype", FLOAT8)
def test_scales_of_float8_have_the_same_bits(dtype: torch.dtype) -> None:
    """Of zeros, numbers just above and below those that fit, the largest and smallest ones, infinities and NaN; of more
    parts than one, of a strided tensor."""
    top = HALVES[:0x7F80:311].unbind()
    fits = [x for exponent in range(-20, 20, 3) for x in (torch.tensor([1.75, 1.7421875, 1.7578125]) * 2.0**exponent)]
    given = [x.view(1).bfloat16() for x in (*top, *fits, *torch.tensor([0.0, -3.0, float("inf"), float("nan")]))]
    wide = torch.randn(3, 9001, generator=torch.Generator().manual_seed(0)).bfloat16()
    broken = wide.clone()
    broken[1, 7] = float("nan")
    for x in (*given, wide, wide.t(), wide * 1e30, wide * 1e-30, broken):
        assert torch.equal(float8.float8_scale(x, dtype), float8_kernels.float8_scale(x, dtype)), x


@pytest.mark.parametrize("dtype", FLOAT8)
def test_casts_to_float8_have_the_same_bits(dtype: torch.dtype) -> None:
    """Every finite number, larger ones than fit left out: no scale leaves any."""
    for scale in (1.0, 2.0**-7, 2.0**-30, 2.0**25, 2.0**100):
        room = torch.finfo(dtype).max * scale
        x = torch.where(HALVES.float().abs() <= room, HALVES, 0).view(64, 1024)
        x = torch.cat([x, torch.full((1, 1024), float("nan"))]).bfloat16()[:, :1000].view(5, 13, 1000)
        wanted, turned = float8_kernels.float8_cast_both(x, torch.tensor(scale), dtype)
        assert turned.shape == (1000, 5, 13)
        alone = float8.float8_cast(x, torch.tensor(scale), dtype)
        for made, right in zip(
            (alone, *float8.float8_cast_both(x, torch.tensor(scale), dtype)), (wanted, wanted, turned), strict=True
        ):
            assert made.dtype == dtype and made.is_contiguous() and made.shape == right.shape
            number = ~right.float().isnan()
            assert torch.equal(made.float().isnan(), ~number)
            assert torch.equal(made.view(torch.uint8)[number], right.view(torch.uint8)[number])
        strided = x.transpose(0, 1)
        assert torch.equal(
            float8.float8_cast(strided, torch.tensor(scale), dtype).float().nan_to_num(),
            float8_kernels.float8_cast(strided, torch.tensor(scale), dtype).float().nan_to_num(),
        )


def _heads(b: int, h: int, s: int, d: int, generator: torch.Generator) -> Tensor:
    return torch.randn(b, s, h, d, generator=generator).transpose(1, 2)


MASKS = {"none": None, "bool": (2, 1), "bias": (1, 4)}


@pytest.mark.parametrize(
    ("mask", "causal", "p"),
    [case for case in itertools.product(MASKS, (False, True), (0.0, 0.3)) if case != ("bool", True, 0.0)],
)
def test_tiled_attention_of_a_block(mask: str, causal: bool, p: float) -> None:
    """Grouped heads, a block of a larger score matrix, a row that attends to nothing; with the mask's gradient."""
    b, h, g, s, t, d = 2, 4, 2, 40, 40, 12
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = (_heads(b, heads, s, d, generator) for heads in (h, g, g, h))
    shape = MASKS[mask]
    given = None if shape is None else torch.randn(*shape, s, t, generator=generator)
    if mask == "bool" and given is not None:
        given = given > -0.5
        given[0, 0, 3] = False
    whole, starts = (2 * b, 2 * h, 2 * s, 2 * t), (b, h, s, t if mask == "none" else 0)
    rest = (p, 3, causal, 0.25, whole, starts)
    out, lse = tiled.attention(q, k, v, given, SEED, *rest)
    call = attention_kernels._make_call(q, k, given, SEED, *rest)
    wanted, wanted_lse = attention_kernels._attention_math(q, k, v, call)
    torch.testing.assert_close(out, wanted, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=1e-4)
    assert out.stride() == wanted.stride()
    asks = mask == "bias"
    made = tiled.attention_grad(grad, q, k, v, given, SEED, wanted, wanted_lse, *rest, asks)
    dmask = torch.zeros_like(given) if asks and given is not None else None
    told = attention_kernels._attention_grad_math(grad, q, k, v, wanted, wanted_lse, call, dmask)
    for mine, other in zip(made, told, strict=True):
        if other is not None:
            assert mine is not None and mine.stride() == other.stride()
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


class _Torchs:
    """Stands for `torch.ops.aten`: its flash attention as the reference kernel's; notes how it was called."""

    def __init__(self) -> None:
        self.causal: list[bool] = []

    def _scaled_dot_product_flash_attention(
        self, q: Tensor, k: Tensor, v: Tensor, p: float, causal: bool, debug: bool, *, scale: float
    ) -> tuple[Tensor, ...]:
        self.causal.append(causal)
        shape = (*q.shape[:3], k.shape[2])
        return reference_kernels.attention(q, k, v, None, None, p, 0, causal, scale, shape, (0, 0, 0, 0))


def test_blocks_of_a_causal_ring_by_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the past whole, on the diagonal causal, in the future nothing is launched; joined, they are the whole."""
    torchs = _Torchs()
    monkeypatch.setattr(flash, "aten", torchs)
    generator = torch.Generator().manual_seed(2)
    q, k, v = (_heads(1, heads, 12, 8, generator) for heads in (4, 2, 2))
    whole = (1, 4, 12, 12)
    for first in (0, 4, 8):
        out, lse = None, None
        for key in (0, 4, 8):
            given = (q.narrow(2, first, 4), k.narrow(2, key, 4), v.narrow(2, key, 4))
            block = flash.attention(*given, None, None, 0.0, 0, True, 0.3, whole, (0, 0, first, key))
            joined = (
                block if out is None or lse is None else reference_kernels.attention_merge(out, lse, *block, q.dtype)
            )
            out, lse = joined
        wanted, wanted_lse = reference_kernels.attention(q, k, v, None, None, 0.0, 0, True, 0.3, whole, (0, 0, 0, 0))
        torch.testing.assert_close(out, wanted.narrow(2, first, 4), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse, wanted_lse.narrow(2, first, 4), rtol=1e-5, atol=1e-6)
    assert sorted(torchs.causal) == [False] * 3 + [True] * 3


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from paraplan.kernels.gpu import cross_entropy, float8
from paraplan.kernels.gpu import random as gpu_random
types = dict(x="*bf16", seed="*i64", out="*bf16", count="i64", columns="i32", sizes=("i32", "i32"),
             wholes=("i32", "i32"), starts=("i32", "i32"), column_start="i32", slot_key="i64", logits="*bf16",
             parts="*fp32", scale="*fp32", rows="*u8", turned="*u8", height="i32",
             m="*fp32", s="*fp32", labels="*i64", g="*fp32", width="i32", ignore_index="i32", v_start="i32")
for kernel, fixed in ((gpu_random._dropout, dict(threshold=-1717986918, scale=1 / 0.9, rows=2, block=1024)),
                      (cross_entropy._grad, dict(block=2048)), (float8._parts, dict(block=4096)),
                      (float8._scale, dict(least=1e-12, largest=8, block=1024)),
                      (float8._cast, dict(has_rows=True, has_turned=True, digits=3, bias=7, tile=64))):
    names = [each.name for each in kernel.params]
    signature = {name: "constexpr" if name in fixed else types[name] for name in names}
    made = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=fixed), target=GPUTarget("cuda", 90, 32))
    print(kernel.__name__, len(made.asm["cubin"]))
"""


def test_kernels_compile_for_a_device_that_is_not_there() -> None:
    assert list(compiled(_COMPILE)) == ["_dropout", "_grad", "_parts", "_scale", "_cast"]
