"""The kernels attention runs as on CUDA: torch's three, and tiles of our own; the functions are in `kernels.gpu`.

cudnn       what flash takes, of heads of at most 128 and positions in whole 128; capability 9 and above
flash       half precision, no mask, no dropout; grouped heads
efficient   float32 too, masks and their gradients; no dropout, no groups (Rabe, Staats 2021, arXiv 2112.05682)
triton      all of that with dropout by global index, groups with masks, gradients of broadcast masks

In this order they are taken where no profile says otherwise, but in half precision triton before efficient (on an H200,
4096 positions, forward and backward: cuDNN 0.75 ms, flash 1.10, triton 1.92, efficient 2.72; with a boolean mask triton
4.3, efficient 5.8).

All give the natural logarithm of the sums, [b, h, s], so a forward by one may be followed by a backward by another.
Bytes inside are those of torch 2.11 to 2.13: `attention_backward.cu` and `mem_eff_attention/kernel_backward.h`; of
cuDNN those of its frontend's `sdpa_backward` from version 9 on.
"""

from __future__ import annotations

import math

from paraplan.ir.execution.offsets import parse_offset
from paraplan.ir.execution.rank_program import LocalValue
from paraplan.ir.machine.kernel_choice import Kernel, OpCall, offer
from paraplan.ir.model.strides import elementwise_strides, is_contiguous
from paraplan.ir.model.tensor import DTYPE_BYTES

HALF = frozenset({"bfloat16", "float16"})


class _Attention:
    """A call of either op.

    Attributes:
        query, key, value, mask: inputs; no mask where there is none.
        p, causal, starts: arguments.
        grad, out, lse, mask_grad: of a backward.
    """

    def __init__(self, call: OpCall, backward: bool) -> None:
        inputs, args, first = call.inputs, call.args, int(backward)
        query, key, value = inputs[first : first + 3]
        assert query is not None and key is not None and value is not None
        self.query, self.key, self.value = query, key, value
        self.mask = inputs[first + 3] if args[first + 3] is not None else None
        p, causal, starts = (args[8], args[10], args[13]) if backward else (args[5], args[7], args[10])
        self.p, self.causal, self.starts = float(p), bool(causal), starts  # type: ignore[arg-type]
        self.grad, self.out, self.lse = (inputs[0], inputs[-2], inputs[-1]) if backward else (None, None, None)
        self.mask_grad = backward and bool(args[14])

    @property
    def inputs(self) -> tuple[LocalValue, LocalValue, LocalValue]:
        """Queries, keys and values."""
        return self.query, self.key, self.value

    @property
    def is_plain(self) -> bool:
        """Neither a mask nor dropout."""
        return self.mask is None and self.p == 0.0 and not self.mask_grad

    @property
    def is_dense(self) -> bool:
        """Rows without gaps, and some of each."""
        return all(x.strides[3] == 1 and 0 not in x.shape for x in self.inputs)

    @property
    def has_no_part(self) -> bool:
        """Of a causal matrix a square on or off the diagonal: all of it is attended to, half, or nothing."""
        return not self.causal or _is_diagonal_or_off(self.query.shape[2], self.key.shape[2], self.starts)


def _is_diagonal_or_off(queries: int, keys: int, starts: object) -> bool:
    assert isinstance(starts, (tuple, list))
    if queries != keys:
        return False
    return all(
        start % queries == 0 if isinstance(start, int) else all(step % queries == 0 for _, step in parse_offset(start))
        for start in starts[2:]
    )


def _heads_last(x: LocalValue, lies: tuple[int, ...]) -> bool:
    """Whether these strides make it a contiguous [b, s, h, d]."""
    shape, strides = (tuple(of[dim] for dim in (0, 2, 1, 3)) for of in (x.shape, lies))
    return is_contiguous(shape, strides)


def _is_heads_last(x: LocalValue) -> bool:
    """Whether what lies as x does, densely, is a contiguous [b, s, h, d]."""
    return _heads_last(x, elementwise_strides(x.shape, [(x.shape, x.strides)]))


# Torch's FlashAttention-2


def _flash_fits(call: OpCall, backward: bool) -> bool:
    """Half precision, heads of at most 256, and of a causal matrix squares on or off the diagonal."""
    of = _Attention(call, backward)
    width = of.query.shape[3]
    fits = of.query.dtype in HALF and width == of.value.shape[3] and width % 8 == 0 and width <= 256
    return of.is_plain and fits and of.is_dense and of.has_no_part


_STATE = 16 + 8
"""Two uint64 and one, which torch's kernel returns."""


def _flash_launches(call: OpCall) -> int:
    """The kernel, and a copy of its result where the queries are not stored heads last; a rank for which a block of a
    causal ring lies in the future only fills zeros."""
    return 1 + (not _is_heads_last(_Attention(call, False).query))


def _flash_workspace(call: OpCall) -> int:
    """The kernel's state of random numbers; its result, where that is copied."""
    query = _Attention(call, False).query
    return _STATE + (0 if _is_heads_last(query) else query.nbytes)


def _flash_grad_launches(call: OpCall) -> int:
    return 1 + sum(not _is_heads_last(x) for x in _Attention(call, True).inputs)


def _flash_grad_workspace(call: OpCall) -> int:
    """Gradients before they are copied; inside of the kernel, sums of dQ in float32, δ, and dK and dV of every head of
    a group."""
    query, key, value = _Attention(call, True).inputs
    b, h, s, d = query.shape
    rows, width = -(-s // 128) * 128, -(-d // 32) * 32
    inside = 4 * b * h * rows * (width + 1)
    if key.shape[1] < h:
        inside += h // key.shape[1] * (key.nbytes + value.nbytes)
    return inside + sum(x.nbytes for x in (query, key, value) if not _is_heads_last(x))


# cuDNN's


def _cudnn_fits(call: OpCall, backward: bool) -> bool:
    """What flash takes, of heads of at most 128 and positions in whole tiles of 128.

    The padding of a tile that is not full has scores of 0 in the backward, in versions up to 9.26 at least: NaN where a
    row's log-sum is below -88.7 (pytorch issue 196678, cudnn-frontend issues 160 and 1072). Up to 9.15 the kernel reads
    beyond the end (pytorch issue 169849).
    """
    of = _Attention(call, backward)
    whole = of.query.shape[2] % 128 == 0 and of.key.shape[2] % 128 == 0
    small = of.query.shape[3] <= 128 and max(of.query.shape[:2]) < 1 << 16
    return whole and small and _flash_fits(call, backward)


def _cudnn_grad_workspace(call: OpCall) -> int:
    """As flash's, with an empty state of random numbers."""
    return _STATE + _flash_grad_workspace(call)


# Torch's memory-efficient attention


def _aligned(x: LocalValue) -> int:
    """Elements in 16 bytes."""
    return 16 // DTYPE_BYTES[x.dtype]


def _efficient_fits(call: OpCall, backward: bool) -> bool:
    """No dropout; heads, and strides of all, in whole 16 bytes; every head its own keys; a mask of these keys, boolean
    or in the dtype of the queries, whose gradient is wanted for every score or not at all."""
    of = _Attention(call, backward)
    if of.p or of.query.dtype not in (*HALF, "float32") or not of.is_dense or not of.has_no_part:
        return False
    whole = all(stride % _aligned(x) == 0 for x in of.inputs for stride in x.strides[:3])
    whole = whole and all(x.shape[3] % _aligned(x) == 0 for x in of.inputs)
    alike = of.query.shape[1] == of.key.shape[1] and max(of.query.shape[:2]) < 1 << 16
    if of.mask is None:
        return whole and alike and not of.mask_grad and (not backward or _is_exactly_heads_last(of.out))
    scores = (*of.query.shape[:3], of.key.shape[2])
    masked = of.mask.dtype in ("bool", of.query.dtype) and of.mask.shape[3] in (1, scores[3])
    masked = masked and scores[2] * scores[3] < 1 << 32  # its offsets in a mask have 32 bits up to torch 2.11
    if of.mask_grad:
        masked = masked and of.mask.dtype != "bool" and of.mask.shape == scores and scores[3] % 16 == 0
    return whole and alike and masked and (not backward or _is_exactly_heads_last(of.out))


def _efficient_is_slow(call: OpCall, backward: bool) -> bool:
    """Half precision, of heads of at most 128; wider ones were not measured."""
    of = _Attention(call, backward)
    return of.query.dtype in HALF and max(of.query.shape[3], of.value.shape[3]) <= 128


def _is_exactly_heads_last(x: LocalValue | None) -> bool:
    return x is not None and _heads_last(x, x.strides)


def _mask_copies(of: _Attention) -> int:
    """Launches that make a mask an added one of rows in whole 32 bytes."""
    if of.mask is None:
        return 0
    if of.mask.dtype == "bool":
        return 2
    columns = of.mask.shape[3] == of.key.shape[2] and (
        of.mask.strides[3] == 1 or of.mask.shape[3] == 1 == of.key.shape[2]
    )
    rows = all(stride % 16 == 0 for size, stride in zip(of.mask.shape[:3], of.mask.strides, strict=False) if size > 1)
    return 0 if columns and rows else 1


def _mask_bytes(of: _Attention) -> int:
    """Of a mask so made."""
    if not _mask_copies(of) or of.mask is None:
        return 0
    return math.prod(of.mask.shape[:3]) * -(-of.key.shape[2] // 16) * 16 * DTYPE_BYTES[of.query.dtype]


def _padded_lse_bytes(of: _Attention) -> int:
    """Log-sums of rows padded to whole blocks of 32."""
    b, h, s, _ = of.query.shape
    return 4 * b * h * -(-s // 32) * 32


def _efficient_launches(call: OpCall) -> int:
    """The kernel, what makes the mask, and log-sums without the padding, -inf where a mask leaves nothing."""
    of = _Attention(call, False)
    return 1 + _mask_copies(of) + (of.mask is not None or of.query.shape[2] % 32 > 0)


def _efficient_workspace(call: OpCall) -> int:
    """The mask, padded log-sums, and in half precision the float32 sums of values wider than 128, which are gone
    before the log-sums are copied."""
    of = _Attention(call, False)
    padded = _padded_lse_bytes(of) if of.query.shape[2] % 32 else 0
    whole = 4 * math.prod(of.query.shape[:3]) if padded else 0
    wide = of.query.dtype in HALF and of.value.shape[3] > 128
    sums = 4 * math.prod((*of.query.shape[:3], of.value.shape[3])) if wide else 0
    return _STATE + padded + _mask_bytes(of) + max(sums - whole, 0)


def _lse_copies(of: _Attention) -> int:
    """Launches that pad log-sums, and make those of rows that attend to nothing +inf: a probability of 0, not NaN."""
    lse = of.lse
    assert lse is not None
    pads = of.query.shape[2] % 32 > 0
    return pads + (pads or of.mask is not None or not is_contiguous(lse.shape, lse.strides))


def _efficient_grad_launches(call: OpCall) -> int:
    of = _Attention(call, True)
    return 1 + _mask_copies(of) + _lse_copies(of) + (not _is_exactly_heads_last(of.grad))


def _efficient_grad_workspace(call: OpCall) -> int:
    """A copy of the gradient, the mask's and the log-sums'; inside of the kernel δ, and sums in float32: of dQ in whole
    tiles, and of heads wider than 128 in half precision those of dK and dV."""
    of = _Attention(call, True)
    assert of.grad is not None
    (b, h, s, d), (t, e) = of.query.shape, (of.key.shape[2], of.value.shape[3])
    made = _mask_bytes(of) + (_padded_lse_bytes(of) if _lse_copies(of) else 0)
    made += 0 if _is_exactly_heads_last(of.grad) else of.grad.nbytes
    half, wide = of.query.dtype in HALF, max(d, e)
    tile_i, tile_j = (64, 64) if wide <= 64 else (128, 128) if half and wide <= 128 else (128, 64)
    delta = 4 * b * h * s
    sums = -(-s // tile_i) * -(-d // tile_j) * (4 * tile_i * tile_j + 16)
    if half and wide > 128:
        splits = max(1, min(-(-t // tile_j), 200 // (b * h)))
        sums += 4 * splits * tile_j * sum(-(-width // tile_i) * tile_i for width in (d, e))
    inside = delta + b * h * -(-sums // 16) * 16
    return _STATE + made + max(inside, 0 if half else delta * (e + 2))


# Ours, in Triton


def _copies(*values: LocalValue | None) -> list[LocalValue]:
    """Those a tiled kernel copies, for rows must be contiguous in them."""
    return [x for x in values if x is not None and x.shape and x.strides[-1] != 1 and x.shape[-1] > 1]


def _tiled_fits(call: OpCall) -> bool:
    of = _Attention(call, False)
    return of.query.dtype in (*HALF, "float32") and max(of.query.shape[3], of.value.shape[3]) <= 256


def _tiled_grad_fits(call: OpCall) -> bool:
    of = _Attention(call, True)
    fits = of.query.dtype in (*HALF, "float32") and max(of.query.shape[3], of.value.shape[3]) <= 256
    mask = of.mask if of.mask_grad else None
    return fits and (mask is None or (mask.shape[2] == of.query.shape[2] and mask.shape[3] >= of.key.shape[2] > 1))


def _tiled_workspace(call: OpCall) -> int:
    return sum(x.nbytes for x in _copies(*_Attention(call, False).inputs))


def _tiled_grad_launches(call: OpCall) -> int:
    of = _Attention(call, True)
    return 3 + 2 * of.mask_grad + len(_copies(of.grad, *of.inputs))


def _tiled_grad_workspace(call: OpCall) -> int:
    """δ, with dropout two keys of every query, and copies."""
    of = _Attention(call, True)
    return (12 if of.p else 4) * math.prod(of.query.shape[:3]) + sum(x.nbytes for x in _copies(of.grad, *of.inputs))


offer(
    "cuda",
    "paraplan.attention",
    Kernel("cudnn", lambda call: _cudnn_fits(call, False), _flash_launches, _flash_workspace, 9),
    Kernel("flash", lambda call: _flash_fits(call, False), _flash_launches, _flash_workspace, 8),
    Kernel(
        "efficient",
        lambda call: _efficient_fits(call, False),
        _efficient_launches,
        _efficient_workspace,
        is_slow=lambda call: _efficient_is_slow(call, False),
    ),
    Kernel("triton", _tiled_fits, lambda call: 1 + len(_copies(*_Attention(call, False).inputs)), _tiled_workspace),
)
offer(
    "cuda",
    "paraplan.attention_grad",
    Kernel("cudnn", lambda call: _cudnn_fits(call, True), _flash_grad_launches, _cudnn_grad_workspace, 9),
    Kernel("flash", lambda call: _flash_fits(call, True), _flash_grad_launches, _flash_grad_workspace, 8),
    Kernel(
        "efficient",
        lambda call: _efficient_fits(call, True),
        _efficient_grad_launches,
        _efficient_grad_workspace,
        is_slow=lambda call: _efficient_is_slow(call, True),
    ),
    Kernel("triton", _tiled_grad_fits, _tiled_grad_launches, _tiled_grad_workspace),
)
