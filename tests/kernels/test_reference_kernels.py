"""Kernels of the canonical ops against torch, whole and sharded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from paraplan.capture.canonical.canonical import ops
from paraplan.kernels import reference_kernels
from paraplan.kernels.attention_kernels import attention, attention_grad
from paraplan.kernels.torch_private import fake_mode

SEED = torch.tensor(1234)


def _qkv(groups: int = 2, dtype: torch.dtype = torch.float64, t: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 6, 8), (2, groups, t, 8), (2, groups, t, 8))
    return tuple(torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes)  # type: ignore[return-value]


def _masks() -> dict[str, Tensor | None]:
    g = torch.Generator().manual_seed(5)
    rows = torch.rand(2, 1, 6, 6, generator=g) > 0.4
    rows[0, 0, 3] = False
    return {
        "none": None,
        "bool": rows,
        "float": torch.randn(1, 4, 6, 6, generator=g, dtype=torch.float64),
        "keys": torch.tensor([True, True, True, False, True, False]).view(1, 1, 1, 6),
    }


def _reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, keep: Tensor | None) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * 0.3
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    probs = torch.nan_to_num(scores.softmax(-1), 0.0)
    return (probs if keep is None else probs * keep) @ v


@pytest.mark.parametrize("groups", (1, 2, 4))
@pytest.mark.parametrize(
    ("mask_name", "mask_grad"), [*((name, False) for name in ("none", "bool", "float", "keys")), ("float", True)]
)
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("p", (0.0, 0.3))
def test_attention_and_its_gradients(groups: int, mask_name: str, causal: bool, p: float, mask_grad: bool) -> None:
    mask = _masks()[mask_name]
    shape, zeros = [2, 4, 6, 6], [0] * 4
    keep = reference_kernels.dropout(torch.ones(shape, dtype=torch.float64), SEED, p, 3, shape, zeros) if p else None
    leaves = [x.requires_grad_() for x in _qkv(groups)]
    wanted_mask = mask.clone().requires_grad_() if mask_grad and mask is not None else mask
    wanted = _reference(*leaves, wanted_mask, causal, keep)
    g = torch.randn(wanted.shape, dtype=torch.float64)
    asked = [*leaves, wanted_mask] if mask_grad else leaves
    grads = torch.autograd.grad(wanted, asked, g)
    q, k, v = (x.detach() for x in leaves)
    rest = (p, 3, causal, 0.3, shape, zeros)
    out, lse = attention(q, k, v, mask, SEED if p else None, *rest)
    made = attention_grad(g, q, k, v, mask, SEED if p else None, out, lse, *rest, mask_grad)
    for found, expected in zip((out, *made), (wanted, *grads), strict=False):
        assert torch.allclose(found, expected, rtol=1e-10, atol=1e-11)
    assert (made[3] is not None) == mask_grad
    assert (
        out.transpose(1, 2).is_contiguous()
        and all(x.transpose(1, 2).is_contiguous() for x in made[:3])
        and lse.is_contiguous()
    )


def test_attention_shards_agree() -> None:
    q, k, v = _qkv(2)
    whole, _ = attention(q, k, v, None, SEED, 0.4, 1, True, 0.3, [2, 4, 6, 6], [0] * 4)
    for b in range(2):
        for g in range(2):
            block, _ = attention(
                q[b : b + 1, 2 * g : 2 * g + 2],
                k[b : b + 1, g : g + 1],
                v[b : b + 1, g : g + 1],
                None,
                SEED,
                0.4,
                1,
                True,
                0.3,
                [2, 4, 6, 6],
                [b, 2 * g, 0, 0],
            )
            assert torch.allclose(block, whole[b : b + 1, 2 * g : 2 * g + 2], atol=1e-12)


def test_attention_in_bfloat16_keeps_float32_statistics() -> None:
    q, k, v = _qkv(2, torch.bfloat16)
    exact = _reference(q.double(), k.double(), v.double(), None, True, None)
    out, lse = attention(q, k, v, None, None, 0.0, 0, True, 0.3, [2, 4, 6, 6], [0] * 4)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert torch.allclose(out.double(), exact, atol=2e-2)


def test_dropout_statistics() -> None:
    x = torch.ones(1000, 1000)
    first, second, other = (
        reference_kernels.dropout(x, torch.tensor(s), 0.3, slot, [1000, 1000], [0, 0])
        for s, slot in ((1, 0), (1, 1), (2, 0))
    )
    for y in (first, second, other):
        keep = (y != 0).float()
        assert abs(float(keep.mean()) - 0.7) < 0.005
        assert float((keep.mean(0) - 0.7).abs().max()) < 0.08 and float((keep.mean(1) - 0.7).abs().max()) < 0.08
        assert torch.allclose(y[y != 0], torch.tensor(1 / 0.7))
        a, b = keep - 0.7, keep.roll(1, 1) - 0.7
        assert abs(float((a * b).mean())) < 0.002 and abs(float((a * (keep.roll(1, 0) - 0.7)).mean())) < 0.002
    for left, right in ((first, second), (first, other)):
        both = float(((left != 0) & (right != 0)).float().mean())
        assert abs(both - 0.49) < 0.003


def test_dropout_shards_are_bit_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 6, 10)
    whole = reference_kernels.dropout(x, SEED, 0.5, 2, [4, 6, 10], [0, 0, 0])
    for start in ((0, 0, 0), (2, 3, 0), (1, 2, 5), (3, 5, 9)):
        block = x[start[0] :, start[1] :, start[2] :]
        part = reference_kernels.dropout(block, SEED, 0.5, 2, [4, 6, 10], list(start))
        assert torch.equal(part, whole[start[0] :, start[1] :, start[2] :])
    for dtype in (torch.float64, torch.bfloat16):
        assert torch.equal(reference_kernels.dropout(x.to(dtype), SEED, 0.5, 2, [4, 6, 10], [0, 0, 0]) != 0, whole != 0)
    monkeypatch.setattr("paraplan.kernels.random_kernels.CHUNK_ELEMENTS", 7)
    assert torch.equal(reference_kernels.dropout(x, SEED, 0.5, 2, [4, 6, 10], [0, 0, 0]), whole)
    assert reference_kernels.dropout(torch.tensor(2.0), SEED, 0.0, 0, [], []) == 2.0


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_cross_entropy_whole_and_sharded(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_kernels, "CHUNK_ELEMENTS", 40)
    logits = (torch.randn(3, 5, 12, dtype=torch.float64) * 4).to(dtype)
    labels = torch.randint(0, 12, (3, 5))
    labels[0, 1] = labels[2, 2] = -100
    leaf = logits.double().requires_grad_()
    wanted = F.cross_entropy(leaf.flatten(0, 1), labels.flatten(), reduction="sum")
    (grad,) = torch.autograd.grad(wanted * 3, leaf)
    m = reference_kernels.ce_max(logits)
    parts = [(start, logits[..., start : start + 4]) for start in (0, 4, 8)]
    m_parts = torch.stack([reference_kernels.ce_max(part) for _, part in parts]).amax(0)
    s = sum(reference_kernels.ce_sumexp(part, m) for _, part in parts)
    t = sum(reference_kernels.ce_target(part, labels, -100, start, 12) for start, part in parts)
    tight = 1e-10 if dtype == torch.float64 else 1e-5
    assert torch.equal(m, m_parts)
    assert torch.allclose(reference_kernels.ce_sumexp(logits, m), s, rtol=tight) and torch.equal(
        reference_kernels.ce_target(logits, labels, -100), t
    )
    assert float(reference_kernels.ce_loss(m, s, t, labels, -100)) == pytest.approx(wanted.item(), rel=tight)
    g = torch.tensor(3.0, dtype=m.dtype)
    pieces = torch.cat([reference_kernels.ce_grad(g, part, m, s, labels, -100, start) for start, part in parts], -1)
    assert pieces.dtype == dtype and torch.allclose(
        pieces.double(), grad, rtol=1e-2 if dtype == torch.bfloat16 else tight, atol=tight
    )
    assert torch.equal(reference_kernels.ce_grad(g, logits, m, s, labels, -100), pieces)


def test_embedding_splits_over_the_vocabulary() -> None:
    w, ids = torch.randn(10, 4, dtype=torch.float64, requires_grad=True), torch.randint(0, 10, (3, 5))
    ids[0, 0] = 2
    wanted = F.embedding(ids, w, padding_idx=2)
    g = torch.randn_like(wanted)
    (grad,) = torch.autograd.grad(wanted, w, g)
    table = w.detach()
    parts = [reference_kernels.embedding(table[start : start + 5], ids, start, 10) for start in (0, 5)]
    assert torch.equal(parts[0] + parts[1], wanted) and torch.equal(reference_kernels.embedding(table, ids), wanted)
    pieces = torch.cat([reference_kernels.embedding_grad(g, ids, 5, 2, start) for start in (0, 5)])
    assert torch.allclose(pieces, grad) and torch.allclose(reference_kernels.embedding_grad(g, ids, 10, 2), grad)


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("lead", ((), (3,), (3, 5)))
def test_linear_gradients(transposed: bool, lead: tuple[int, ...]) -> None:
    x = torch.randn(*lead, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn((6, 4) if transposed else (4, 6), dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64)
    y = reference_kernels.linear(x, w, bias, transposed)
    assert torch.allclose(y, F.linear(x, w.t() if transposed else w, bias))
    g = torch.randn_like(y)
    gx, gw = torch.autograd.grad(y, (x, w), g)
    assert torch.allclose(reference_kernels.linear_grad_input(g, w, transposed), gx)
    assert torch.allclose(reference_kernels.linear_grad_weight(g, x, transposed), gw)


def test_shape_functions_agree_with_kernels() -> None:
    """Shapes, dtypes and strides of every canonical op, fake against real."""
    q, k, v = _qkv(2, torch.bfloat16)
    shape, zeros, mask = [2, 4, 6, 6], [0] * 4, torch.randn(1, 4, 6, 6)
    out, lse = attention(q, k, v, mask, SEED, 0.1, 0, False, 0.3, shape, zeros)
    x, w, ids = torch.randn(3, 5, 6), torch.randn(4, 6), torch.randint(0, 4, (3, 5))
    logits, labels = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    m, s = reference_kernels.ce_max(logits), reference_kernels.ce_sumexp(logits, reference_kernels.ce_max(logits))
    calls = [
        (ops.linear, (x, w, None, False)),
        (ops.linear_grad_input, (x[..., :4].contiguous(), w, False)),
        (ops.linear_grad_weight, (x[..., :4].contiguous(), x, False)),
        (ops.linear_grad_weight, (x[..., :4].contiguous(), x, True)),
        (ops.embedding, (w, ids, 0)),
        (ops.embedding_grad, (x, ids, 4, -1, 0)),
        (ops.dropout, (x, SEED, 0.5, 0, [3, 5, 6], [0] * 3)),
        (ops.attention, (q, k, v, mask, SEED, 0.1, 0, False, 0.3, shape, zeros)),
        (ops.attention, (q, k, v, None, None, 0.0, 0, True, 0.3, shape, zeros)),
        (ops.attention_grad, (out, q, k, v, mask, SEED, out, lse, 0.1, 0, False, 0.3, shape, zeros, True)),
        (ops.attention_grad, (out, q, k, v, None, None, out, lse, 0.0, 0, False, 0.3, shape, zeros, False)),
        (ops.ce_max, (logits,)),
        (ops.ce_sumexp, (logits, m)),
        (ops.ce_target, (logits, labels, -100, 0)),
        (ops.ce_loss, (m, s, m, labels, -100)),
        (ops.ce_grad, (torch.tensor(1.0), logits, m, s, labels, -100, 0)),
    ]
    mode = fake_mode()
    for op, args in calls:
        real = op(*args)
        with mode:
            fake = op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
        for a, b in zip(
            real if isinstance(real, (tuple, list)) else [real],
            fake if isinstance(fake, (tuple, list)) else [fake],
            strict=True,
        ):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), op
