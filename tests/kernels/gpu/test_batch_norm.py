"""Batch norm and lookups in split tables as Triton kernels, in its interpreter, held against the reference kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paraplan.kernels import reference_kernels

pytest.importorskip("triton")

from paraplan.kernels.gpu import batch_norm, whole_batch_norm
from paraplan.kernels.gpu.rows import split_lookup
from tests.kernels.gpu.compiling import compiled

CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SHAPES = [(300, 70), (5, 3, 9, 31), (2, 5, 2500), (6, 40, 5)]
"""Features alone, large planes, sums in several parts, planes narrower than what a program reads."""


def _same(made: Any, wanted: Any) -> None:
    """Within what a result's dtype holds; the reference computes in float64."""
    for mine, other in zip(*([x] if isinstance(x, Tensor) else x for x in (made, wanted)), strict=True):
        assert mine.shape == other.shape and mine.is_contiguous()
        error = (mine.double() - other.double()).abs().max() / other.double().abs().max()
        assert float(error) < CLOSE[mine.dtype], float(error)


def _wide(args: tuple[Any, ...]) -> list[Any]:
    return [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_of_batch_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, g = (torch.randn(shape, generator=generator).mul_(2).add_(3).to(dtype) for _ in range(2))
    w, bias = (torch.rand(shape[1], generator=generator).add_(0.5).to(dtype) for _ in range(2))
    mean, rstd, dw, db = (torch.rand(shape[1], generator=generator).add_(0.5).to(wide) for _ in range(4))
    turned = g.transpose(0, 1).contiguous().transpose(0, 1)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("bn_squares", (x, mean)),
        ("bn_rstd", (dw, 7, 1e-3)),
        ("bn_rstd", (w, 1, 1e-5)),
        ("bn_running", (w, dw, 0.1, 0.125)),
        ("bn_grad_affine", (turned, x, mean, rstd)),
        ("bn_grad_input", (turned, x, mean, rstd, w, dw, db, 77)),
        ("bn_grad_input", (g, x, mean, rstd, None, dw, db, 77)),
        ("bn_apply", (x, w, rstd, w, bias)),
        ("bn_apply", (x, mean, rstd, None, None)),
        ("bn_apply", (g, None, rstd, w, None)),
    ]
    for name, args in calls:
        made = getattr(batch_norm, name)(*args)
        told = getattr(reference_kernels, name)(*args)
        assert [x.dtype for x in ([made] if isinstance(made, Tensor) else made)] == [
            x.dtype for x in ([told] if isinstance(told, Tensor) else told)
        ]
        _same(made, getattr(reference_kernels, name)(*_wide(args)))


def test_sums_over_shards_are_those_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    x, g = (torch.randn(8, 3, 20, 30, generator=generator, dtype=torch.float64) for _ in range(2))
    mean, rstd = x.mean((0, 2, 3)), x.var((0, 2, 3)).rsqrt()
    halves = [batch_norm.bn_grad_affine(*each, mean, rstd) for each in zip(g.chunk(2), x.chunk(2), strict=True)]
    _same([a + b for a, b in zip(*halves, strict=True)], reference_kernels.bn_grad_affine(g, x, mean, rstd))
    sums = sum(batch_norm.bn_squares(part, mean) for part in x.chunk(2))
    torch.testing.assert_close(sums, x.var((0, 2, 3), correction=0) * 4800)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_of_all_samples(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Far from zero, where squares of sums would cancel; with everything that may follow, and without."""
    generator = torch.Generator().manual_seed(4)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, added = (torch.randn(shape, generator=generator).add_(3).to(dtype) for _ in range(2))
    w, bias, old_mean, old_var = (torch.rand(shape[1], generator=generator).add_(0.5).to(dtype) for _ in range(4))
    turned = added.transpose(0, 1).contiguous().transpose(0, 1)
    with torch.no_grad():
        added.sub_(6)  # so that a relu stops some
        for args in (
            (x, w, bias, old_mean.to(wide), old_var.to(wide), turned, 0.1, 1e-3, True),
            (x, None, bias, old_mean, old_var, None, 0.3, 1e-5, True),
            (x, None, None, None, None, None, 0.0, 1e-5, False),
        ):
            made, told = whole_batch_norm.bn_whole(*args), reference_kernels.bn_whole(*args)
            assert [x if x is None else x.dtype for x in made] == [x if x is None else x.dtype for x in told]
            wanted = reference_kernels.bn_whole(*_wide(args))
            _same([x for x in made if x is not None], [x for x in wanted if x is not None])
        out, mean, rstd = made[:3]
        for rest in ((out, mean, rstd, w, dtype, True), (None, mean, rstd, None, wide, False)):
            given = (turned, x, *rest)
            made, told = whole_batch_norm.bn_whole_grad(*given), reference_kernels.bn_whole_grad(*given)
            assert [x if x is None else x.dtype for x in made] == [x if x is None else x.dtype for x in told]
            wide_args = [x if isinstance(x, torch.dtype) else _wide((x,))[0] for x in given]
            wanted = reference_kernels.bn_whole_grad(*wide_args)
            _same([x for x in made if x is not None], [x for x in wanted if x is not None])


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 5), (torch.bfloat16, 1500)])
def test_rows_of_a_split_table(dtype: torch.dtype, width: int) -> None:
    """Bit for bit; the gradient, a sum, by torch's kernel, which leaves out what is elsewhere and padding."""
    generator = torch.Generator().manual_seed(2)
    w, ids = torch.randn(10, width, generator=generator).to(dtype), torch.randint(0, 30, (4, 6), generator=generator)
    ids[0, :2], ids[1, 0] = 12, 19
    g = torch.randn(4, 6, width, generator=generator).to(dtype)
    assert torch.equal(split_lookup.embedding(w, ids, 10, 30), reference_kernels.embedding(w, ids, 10, 30))
    assert not split_lookup.embedding(w, torch.tensor([-1, 7, 31]), 10, 30).count_nonzero()
    for padding in (-1, 12):
        made = split_lookup.embedding_grad(g.transpose(0, 1), ids.t(), 10, padding, 10)
        torch.testing.assert_close(made, reference_kernels.embedding_grad(g.transpose(0, 1), ids.t(), 10, padding, 10))
        assert (padding == 12) == (not made[2].count_nonzero())


def test_rows_of_parts_of_many_tables() -> None:
    generator = torch.Generator().manual_seed(3)
    w, ids = torch.randn(4, 10, 6, generator=generator), torch.randint(0, 20, (7, 3, 4), generator=generator)
    g = torch.randn(7, 3, 4, 6, generator=generator)
    for rest in ((0, 20), (10, 20)):
        made = split_lookup.embedding_tables(w, ids, *rest)
        assert torch.equal(made, reference_kernels.embedding_tables(w, ids, *rest))
        sums = split_lookup.embedding_tables_grad(g, ids, 10, rest[0])
        torch.testing.assert_close(sums, reference_kernels.embedding_tables_grad(g, ids, 10, rest[0]))


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from paraplan.kernels.gpu import batch_norm, whole_batch_norm
from paraplan.kernels.gpu.rows import split_lookup
tensors = dict.fromkeys(("x", "g", "w", "bias", "running"), "*bf16") | {"ids": "*i64", "local": "*i64"}
tensors |= dict.fromkeys(("mean", "rstd", "dw", "db", "parts", "first", "second", "squares", "total"), "*fp32")
tensors |= dict.fromkeys(("y", "added", "dx", "masked", "old_mean", "old_var", "new_mean", "new_var"), "*bf16")
tensors |= dict.fromkeys(("mean_out", "rstd_out"), "*fp32")
fixed = dict(both=True, block_c=1, block=1024, count=77.0, eps=1e-5, keep=0.9, take=0.1, centred=True, weighed=True,
             moved=True, many=False, samples=77.0, split=True, behind=True, masks=True, adds=True, runs=True, relu=True,
             unbiased=0.01)
wholes = (whole_batch_norm._part_moments, whole_batch_norm._whole, whole_batch_norm._part_grads,
          whole_batch_norm._whole_grad)
outs = dict(_sums="*fp32", _rstd="*fp32", _local="*i64")
for kernel in (batch_norm._sums, batch_norm._finish, batch_norm._rstd, batch_norm._running, batch_norm._apply,
               batch_norm._input_grad, split_lookup._rows, split_lookup._local, *wholes, *wholes[1::2]):
    names = [each.name for each in kernel.params]
    constants = {each.name: fixed[each.name] for each in kernel.params if each.is_constexpr}
    types = {"out": outs.get(kernel.__name__, "*bf16"), **tensors}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(kernel.__name__ + str(fixed["split"]) * (kernel in wholes), len(made.asm["cubin"]))
    fixed["split"] = kernel is not wholes[3] and fixed["split"]  # the last two in one part
"""


def test_kernels_compile_for_a_device_that_is_not_there() -> None:
    assert len(compiled(_COMPILE)) == 14
