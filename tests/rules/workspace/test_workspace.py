"""The formulas of `rules.workspace.workspace` against what the kernels allocate inside: never below, at most 3 %
above."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from paraplan.runtime.executing.targets import resolve
from tests.rules.workspace.measuring import SLACK_BYTES, measured, predicted

B, S, D, V = 3, 64, 16, 500


def cases(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    seed, ids, labels = torch.tensor(5), torch.randint(0, V, (B, S)), torch.randint(0, V, (B, S))
    for shape in ((B, S, 96), (B, 4 * S, 768)):
        x, turned = draw(*shape), draw(*shape).transpose(0, 1)
        k = shape[-1]
        yield "paraplan.dropout", (x, seed, 0.1, 0, list(shape), [0, 0, 0])
        yield "paraplan.uniform", (x, seed, 0, list(shape), [0, 0, 0])
        for value in (x, turned):
            yield "paraplan.linear", (value, draw(128, k), draw(128), False)
            yield "paraplan.linear_grad_input", (value, draw(k, 128), False)
            yield "paraplan.linear_grad_weight", (value, draw(*value.shape[:2], 128), False)
    mixed = draw(B, 16, S, 32).permute(0, 2, 3, 1)
    for bias in (None, draw(8), draw(24)):
        weight = draw(8 if bias is None else len(bias), 16)
        yield "paraplan.linear", (mixed, weight, bias, False)
        yield "paraplan.linear_grad_input", (mixed, weight.t(), False)
    matrices, turned = draw(B, 4, S, 32), draw(B, S, 4, 32).transpose(1, 2)
    for a, b in itertools.product((matrices, turned), repeat=2):
        yield "paraplan.batched_product", (None, a, b.mT, 1.0, 1.0)
        yield "paraplan.batched_product", (draw(B, 4, 1, S), a, b.mT, 1.0, 0.5)
    yield from float8_cases(draw)
    yield "paraplan.embedding", (draw(V, 96), ids, 0)
    yield "paraplan.embedding", (draw(V // 2, 96), ids, V // 2, V)
    yield "paraplan.embedding_grad", (draw(B, S, 96), ids, V, -1, 0)
    yield "paraplan.embedding_grad", (draw(B, S, 96), ids, V // 2, -1, V // 2)
    heads, angles = draw(B, S, 4, 16).transpose(1, 2), (draw(1, 1, S, 16), draw(1, 1, S, 16))
    for transposed in (False, True):
        yield "paraplan.rotary", (heads, *angles, transposed)
    for kind in ("silu", "gelu"):
        yield "paraplan.gated", (*draw(B, S, 192).chunk(2, -1), kind)
        yield "paraplan.gated_grad", (draw(B, S, 96), *draw(B, S, 192).chunk(2, -1), kind)
    yield from attention_cases(draw, seed)
    yield from odd_attention(draw, seed)
    yield from expert_cases(draw)
    # Of the last two, laid out as a convolution leaves them, the leading dims merge only where there is one image.
    images = [draw(n, columns, 4, 8).permute(0, 2, 3, 1) for n, columns in ((1, 20_000), (2, 10_000))]
    for logits in (draw(B, S, V), draw(B, S, 20_000), *images):
        labels = torch.randint(0, logits.shape[-1], logits.shape[:-1])
        top = resolve("paraplan.ce_max")(logits)
        total = resolve("paraplan.ce_sumexp")(logits, top)
        target = resolve("paraplan.ce_target")(logits, labels, -100, 0)
        yield "paraplan.ce_max", (logits,)
        yield "paraplan.ce_sumexp", (logits, top)
        yield "paraplan.ce_target", (logits, labels, -100, 0)
        yield "paraplan.ce_loss", (top, total, target, labels, -100)
        yield "paraplan.ce_grad", (torch.ones((), dtype=total.dtype), logits, top, total, labels, -100, 0)


def float8_cases(draw: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    values, gradients, one = torch.float8_e4m3fn, torch.float8_e5m2, torch.ones(())
    yield "paraplan.float8_scale", (draw(B, S, 96), values)
    yield "paraplan.float8_cast", (draw(B, S, 96), one, values)
    yield "paraplan.float8_cast_both", (draw(B, S, 96), one, values)
    for rows, transposed in itertools.product((S, S + 3), (False, True)):
        x, w, g = draw(B, rows, 96).to(values), draw(96, 96).to(values), draw(B, rows, 96).to(gradients)
        yield "paraplan.float8_linear", (x, w, one, one, transposed)
        yield "paraplan.float8_linear_grad_input", (g, w, one, one, transposed)
        turned = (each.movedim(-1, 0).contiguous() for each in (g, x))
        yield "paraplan.float8_linear_grad_weight", (*turned, one, one, transposed)


def expert_cases(draw: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    x, g, ids = draw(B * S, 96), draw(B * S, 96), torch.rand(B * S, 8).topk(2)[1]
    rest = (draw(B * S, 2), draw(8, 2, 48, 96), draw(8, 96, 48), "silu", 8, 0)
    yield "paraplan.experts", (x, ids, *rest)
    yield "paraplan.experts_grad", (g, x, ids, *rest, True)
    for n, held in ((4, 2), (8, 1), (2, 4)):
        yield "paraplan.route_plan", (ids, n, held, 0)
        yield "paraplan.route_here", (ids, rest[0], n, held, held)
        yield "paraplan.route_add", (x, torch.arange(B * S), B * S)
    tables, numbers = draw(4, V, 96), torch.randint(0, V, (B * S, 4))
    yield "paraplan.embedding_tables", (tables, numbers, 0)
    yield "paraplan.embedding_tables_grad", (draw(B * S, 4, 96), numbers, V, 0)


def attention_cases(draw: Any, seed: Tensor) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The whole score matrix, half of the queries, and pairs of halves as a ring meets them; masks hold all keys.

    Heads come last in storage, as projections leave them, and first, as a gathered or received tensor has them.
    """
    half = S // 2
    blocks = ((S, 0, S, 0), (half, half, S, 0), (half, half, half, 0), (half, 0, half, half))
    options = ((0.0, True, False), (0.0, False, True), (0.1, True, False), (0.1, False, True))
    shapes = itertools.product(((8, 8), (8, 4)), blocks, options, (True, False))
    for (heads, groups), (s, s0, t, t0), (p, causal, masked), last in shapes:
        mask = torch.rand(B, 1, s, S) > 0.2 if masked else None
        q, k, v, g = (draw(B, n, h, D).transpose(1, 2) for n, h in ((s, heads), (t, groups), (t, groups), (s, heads)))
        if not last:
            q, k, v, g = (x.contiguous() for x in (q, k, v, g))
        random, place = (seed if p else None), ([B, heads, S, S], [0, 0, s0, t0])
        call = (q, k, v, mask, random, p, 0, causal, 0.25, *place)
        out, lse = resolve("paraplan.attention")(*call)
        yield "paraplan.attention", call
        yield "paraplan.attention_grad", (g, q, k, v, mask, random, out, lse, p, 0, causal, 0.25, *place, False)
        for dtype in {out.dtype, lse.dtype}:
            yield "paraplan.attention_merge", (out.to(lse.dtype), lse, out.clone(), lse.clone(), dtype)


def odd_attention(draw: Any, seed: Tensor) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The math path where any tensor of a row may be the largest, with the gradient of a float mask."""
    sizes = ((256, 48, 8, 8), (48, 256, 8, 8), (96, 64, 96, 16), (96, 64, 16, 96), (64, 96, 64, 160))
    for (s, t, d, e), (heads, groups), p, causal in itertools.product(
        sizes, ((8, 8), (8, 4)), (0.0, 0.1), (False, True)
    ):
        q, k = draw(B, heads, s, d), draw(B, t, groups, d).transpose(1, 2)
        v, g = draw(B, t, groups, e).transpose(1, 2), draw(B, s, heads, e).transpose(1, 2)
        place = ([B, heads, s, t], [0, 0, 0, 0])
        for mask in (None, draw(1, 1, s, t), draw(B, heads, 1, t)):
            random, mask_grad = seed if p else None, mask is not None
            call = (q, k, v, mask, random, p, 0, causal, 0.25, *place)
            out, lse = resolve("paraplan.attention")(*call)
            yield "paraplan.attention", call
            yield "paraplan.attention_grad", (g, q, k, v, mask, random, out, lse, p, 0, causal, 0.25, *place, mask_grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_workspace_is_foretold(dtype: torch.dtype) -> None:
    for target, args in cases(dtype):
        found, results = measured(target, args)
        foretold = predicted(target, args, results)
        what = f"{target} {[tuple(a.shape) if isinstance(a, Tensor) else a for a in args]}"
        assert found <= foretold <= 1.03 * found + SLACK_BYTES, f"{what}: {found} bytes inside, {foretold} foretold"
