"""Every kernel that attention may run as, on what it takes: against the reference in float64, and timed beside eager's.

A plan without a profile takes the first of `rules/device_kernels/cuda_attention.py`: the times here say whether that
is right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.place import Place, median_ms
from benchmarks.table import Case, Row
from paraplan.ir.execution.rank_program import LocalValue
from paraplan.ir.machine.kernel_choice import OpCall, fitting
from paraplan.rules.device_kernels import cuda  # noqa: F401  (records its kernels)
from paraplan.runtime.executing.targets import resolve

KERNELS = ("flash", "efficient", "triton", "cudnn")
FORWARD, BACKWARD = "paraplan.attention", "paraplan.attention_grad"
CLOSE = {torch.float32: 2e-4, torch.bfloat16: 2e-2}


class Given(NamedTuple):
    """An attention without dropout.

    Attributes:
        dtype: of queries, keys and values.
        groups: heads of keys and values.
        mask: "", "bool" (some rows attend to nothing), or "bias" (added, its gradient wanted).
        causal: whether keys of the future are left out.
        odd: whether the number of positions is no multiple of 16.
    """

    dtype: torch.dtype
    groups: int = 16
    mask: str = ""
    causal: bool = True
    odd: bool = False


GIVEN = {
    "causal bf16": Given(torch.bfloat16),
    "causal bf16, odd": Given(torch.bfloat16, odd=True),
    "causal bf16, grouped": Given(torch.bfloat16, groups=4),
    "bf16": Given(torch.bfloat16, causal=False),
    "causal fp32": Given(torch.float32),
    "bool mask bf16": Given(torch.bfloat16, mask="bool", causal=False),
    "bool mask bf16, odd": Given(torch.bfloat16, mask="bool", causal=False, odd=True),
    "bias bf16": Given(torch.bfloat16, mask="bias", causal=False),
    "bias fp32, causal": Given(torch.float32, mask="bias"),
}
LONG = ("causal bf16", "causal bf16, grouped", "causal fp32", "bool mask bf16", "bias bf16")


class Calls(NamedTuple):
    """Both ops' arguments; the backward's without what the forward gives."""

    forward: tuple[Any, ...]
    backward: Callable[[Tensor, Tensor], tuple[Any, ...]]


def _calls(place: Place, given: Given, positions: int) -> Calls:
    generator, b, h, d = torch.Generator().manual_seed(0), 2, 16, 64
    s = positions + 9 * given.odd

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(place.device, given.dtype)

    q, k, v, grad = (drawn(b, s, heads, d).transpose(1, 2) for heads in (h, given.groups, given.groups, h))
    mask = None
    if given.mask == "bool":
        mask = drawn(b, 1, s, s) > -0.5
        mask[0, 0, 3] = False
    elif given.mask:
        mask = drawn(b, h, s, s)
    whole, starts = (b, h, s, s), (0, 0, 0, 0)
    rest = 0.0, 0, given.causal, d**-0.5, whole, starts
    asks = given.mask == "bias"
    return Calls((q, k, v, mask, None, *rest), lambda out, lse: (grad, q, k, v, mask, None, out, lse, *rest, asks))


def _value(x: Tensor) -> LocalValue:
    name = str(x.dtype).removeprefix("torch.")
    return LocalValue(dtype=name, shape=tuple(x.shape), strides=x.stride(), base="x", storage_bytes=x.nbytes)


def _call(args: tuple[Any, ...]) -> OpCall:
    return OpCall([_value(x) for x in args if isinstance(x, Tensor)], [], args)


def _runs(place: Place, kernel: str) -> bool:
    return kernel != "cudnn" or not place.is_cuda or torch.cuda.get_device_capability()[0] >= 9


def _resolved(place: Place, target: str, kernel: str, args: tuple[Any, ...]) -> tuple[Callable[..., Any], int] | None:
    """The kernel (the reference on a CPU) and the bytes it is said to allocate inside; None where it takes no such."""
    found = [each for each in fitting("cuda", target, _call(args)) if each.name == kernel]
    if not found or not _runs(place, kernel):
        return None
    return resolve(target, kernel if place.is_cuda else ""), found[0].workspace(_call(args))


def _wide(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        x.cpu().double() if isinstance(x, Tensor) and x.is_floating_point() else x.cpu() if isinstance(x, Tensor) else x
        for x in args
    )


def parity(place: Place, kernel: str, name: str) -> Row:
    """A kernel's forward and backward against the reference in float64, and bytes inside against those said."""
    given, failures, worst = GIVEN[name], [], 0.0
    calls = _calls(place, given, 128 if place.small else 256)
    out, lse = resolve(FORWARD)(*_wide(calls.forward))
    reads = out.to(place.device, given.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse.to(place.device).float()
    for target, args in ((FORWARD, calls.forward), (BACKWARD, calls.backward(*reads))):
        found = _resolved(place, target, kernel, args)
        if found is None:
            continue
        wanted = resolve(target)(*_wide(args))
        if place.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if place.is_cuda else 0
        made = found[0](*args)
        if place.is_cuda:
            inside = torch.cuda.max_memory_allocated() - max(before, torch.cuda.memory_allocated())
            if inside > found[1] + 512 * 8:
                failures.append(f"{target}: {inside} B inside, said to be {found[1]}")
        for mine, exact in zip(made, wanted, strict=True):
            error = _error(mine, exact)
            worst = max(worst, error)
            if error > CLOSE[given.dtype]:
                failures.append(f"{target}: error {error:.1e}")
        del made, mine  # or the next op's peak would have them
    return {"error": worst, "failures": failures}


def _error(mine: Tensor | None, exact: Tensor | None) -> float:
    if mine is None or exact is None:
        return 0.0 if mine is exact else float("inf")
    mine = mine.cpu().double()
    finite = exact.isfinite()
    if not torch.equal(finite, mine.isfinite()):
        return float("inf")
    return float((mine - exact)[finite].abs().max()) / max(float(exact[finite].abs().max()), 1e-30)


def speed(place: Place, kernel: str, name: str) -> Row:
    """A kernel's forward and backward at 4k positions, beside eager's own choice."""
    given = GIVEN[name]
    calls = _calls(place, given, 128 if place.small else 4096)
    forward = _resolved(place, FORWARD, kernel, calls.forward)
    assert forward is not None
    out, lse = forward[0](*calls.forward)
    args = calls.backward(out, lse)
    backward = _resolved(place, BACKWARD, kernel, args)
    grad, q, k, v, mask = args[:5]
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    masked = mask.clone().requires_grad_() if given.mask == "bias" else mask

    def eager() -> None:
        if given.causal and masked is not None:  # eager takes one of them
            future = torch.ones(mask.shape[2:], dtype=torch.bool, device=mask.device).triu(1)
            added = masked.masked_fill(future, float("-inf"))
        else:
            added = masked
        made = F.scaled_dot_product_attention(
            *leaves, attn_mask=added, is_causal=given.causal and mask is None, enable_gqa=given.groups < 16
        )
        made.backward(grad)

    def ours() -> None:
        forward[0](*calls.forward)
        if backward is not None:
            backward[0](*args)

    note = "" if backward is not None else "forward alone"
    with place.alone():
        took, reference = median_ms(ours, place), median_ms(eager, place)
    return {"ms": took, "reference_ms": reference, "note": note, "failures": []}


def _each(place: Place, make: Callable[..., Row], names: tuple[str, ...]) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name in names:
        forward = _calls(Place("cpu", True), GIVEN[name], 128).forward
        takes = [each.name for each in fitting("cuda", FORWARD, _call(forward))]
        found |= {
            f"attention {each}, {name}": partial(make, place, each, name)
            for each in KERNELS
            if each in takes and _runs(place, each)
        }
    return found


def parities(place: Place) -> dict[str, Case]:
    """By kernel and what it is given."""
    return _each(place, parity, tuple(GIVEN))


def speeds(place: Place) -> dict[str, Case]:
    """Likewise."""
    return _each(place, speed, LONG)
