"""One-op examples of the vision ops, as in `cases`."""

from __future__ import annotations

import torch
from torch import Tensor

from paraplan.kernels import reference_kernels

from .cases import Case, case, positive, randn

ONES, ZEROS = (1, 1), (0, 0)
CUBE = ((1, 1, 1), (0, 0, 0), (1, 1, 1))  # stride, padding, dilation


def _conv_family(x: Tensor, w: Tensor, bias: Tensor | None, *rest: object) -> tuple[Case, Case, Case]:
    """Forward, gradient of the input and of the weight of one convolution."""
    given = [x, w] if bias is None else [x, w, bias]
    forward = case(given, "%a", "%b", None if bias is None else "%c", *rest)
    g = torch.randn_like(reference_kernels.conv(x, w, bias, *rest))  # type: ignore[arg-type]
    into = case([g, w], "%a", "%b", tuple(x.shape[2:]), *rest)
    return forward, into, case([g, x], "%a", "%b", tuple(w.shape[2:]), *rest)


def conv_cases() -> dict[str, list[Case]]:
    """Strides, padding, dilation, groups, depthwise, transposed; one to three spatial dims."""
    plain = (ONES, ZEROS, ONES, False, ZEROS)
    families = [
        _conv_family(randn(4, 6, 5, 4), randn(12, 6, 3, 3), randn(12), (2, 1), (1, 1), ONES, False, ZEROS, 1),
        _conv_family(randn(2, 4, 3, 3), randn(6, 4, 1, 1), None, *plain, 1),
        _conv_family(randn(2, 12, 4, 4), randn(12, 1, 3, 3), randn(12), ONES, ONES, ONES, False, ZEROS, 12),
        _conv_family(randn(2, 8, 4, 4), randn(12, 2, 2, 2), randn(12), ONES, ZEROS, (2, 2), False, ZEROS, 4),
        _conv_family(randn(2, 4, 3, 3), randn(4, 6, 2, 2), randn(6), (2, 2), ZEROS, ONES, True, ONES, 1),
        _conv_family(randn(2, 8, 3, 3), randn(8, 3, 2, 2), randn(12), (2, 2), ZEROS, ONES, True, ZEROS, 4),
        _conv_family(randn(4, 6, 8), randn(4, 6, 3), None, (1,), (1,), (1,), False, (0,), 1),
        _conv_family(randn(2, 2, 3, 3, 3), randn(4, 2, 2, 2, 2), randn(4), *CUBE, False, (0, 0, 0), 1),
    ]
    names = ("conv", "conv_grad_input", "conv_grad_weight")
    return {f"paraplan.{name}": [family[i] for family in families] for i, name in enumerate(names)}


def pool_cases() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {name: [] for name in _POOLS}
    for x, window, stride, padding in (
        (randn(4, 6, 5, 4), (3, 3), (2, 2), (1, 1)),
        (randn(6, 4, 4), (2, 2), (2, 2), ZEROS),
        (randn(2, 4, 3, 3, 4), (2, 2, 2), (1, 1, 2), (0, 0, 0)),
    ):
        space = tuple(x.shape[-len(window) :])
        made, indices = reference_kernels.max_pool(x, window, stride, padding, (1,) * len(window), False)
        found["paraplan.max_pool"].append(case([x], "%a", window, stride, padding, (1,) * len(window), False))
        found["paraplan.max_pool_grad"].append(case([torch.randn_like(made), indices], "%a", "%b", space))
        rest = (window, stride, padding, True, False, None)
        averaged = reference_kernels.avg_pool(x, *rest)
        found["paraplan.avg_pool"].append(case([x], "%a", *rest))
        found["paraplan.avg_pool_grad"].append(case([torch.randn_like(averaged)], "%a", space, *rest))
        size = (2,) * len(window)
        picked, _ = reference_kernels.adaptive_max_pool(x, size)
        found["paraplan.adaptive_max_pool"].append(case([x], "%a", size))
        found["paraplan.adaptive_avg_pool"].append(case([x], "%a", size))
        found["paraplan.adaptive_avg_pool_grad"].append(case([torch.randn_like(picked)], "%a", space))
    return found


_POOLS = tuple(
    f"paraplan.{name}"
    for name in (
        "max_pool",
        "max_pool_grad",
        "avg_pool",
        "avg_pool_grad",
        "adaptive_max_pool",
        "adaptive_avg_pool",
        "adaptive_avg_pool_grad",
    )
)


def resize_cases() -> dict[str, list[Case]]:
    forward, backward = [], []
    for how, given, size, rest in (
        ("upsample_nearest2d", (3, 4), (6, 8), (2.0, 2.0)),
        ("upsample_bilinear2d", (3, 4), (5, 8), (True, None, None)),
        ("upsample_bicubic2d", (4, 4), (6, 3), (False, None, None)),
        ("upsample_linear1d", (4,), (6,), (False, None)),
        ("upsample_nearest3d", (2, 2, 3), (4, 4, 6), (None, None, None)),
    ):
        forward.append(case([randn(4, 6, *given)], "%a", f":{how}", size, rest))
        backward.append(case([randn(4, 6, *size)], "%a", f":{how}", size, given, rest))
    return {"paraplan.upsample": forward, "paraplan.upsample_grad": backward}


def group_norm_cases() -> dict[str, list[Case]]:
    forward, backward = [], []
    for x, groups, affine in ((randn(4, 12, 3, 2), 6, True), (randn(2, 8, 5), 4, True), (randn(2, 4, 3, 3), 4, False)):
        channels = x.shape[1]
        w, bias = randn(channels), randn(channels)
        at = ("%b", "%c") if affine else (None, None)
        forward.append(case([x, w, bias] if affine else [x], "%a", *at, groups, 1e-5))
        _, mean, rstd = reference_kernels.group_norm(x, w, bias, groups, 1e-5)
        given = [torch.randn_like(x), x, mean, rstd, *([w] if affine else [])]
        weight = "%e" if affine else None
        backward.append(case(given, "%a", "%b", "%c", "%d", weight, groups, (True, affine, affine), fixed="cd"))
    return {"paraplan.group_norm": forward, "paraplan.group_norm_grad": backward}


def batch_norm_cases() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    planes, rows = randn(4, 6, 3, 2), randn(12, 4)
    for x in (planes, rows):
        channels, count = x.shape[1], x.numel() // x.shape[1]
        mean, rstd, w, bias = randn(channels), positive(channels), randn(channels), randn(channels)
        g, dw, db = torch.randn_like(x), randn(channels), randn(channels)
        made = {
            "bn_squares": [case([x, mean])],
            "bn_apply": [
                case([x, mean, rstd, w, bias]),
                case([x, rstd, w], "%a", None, "%b", "%c", None),
                case([x, mean, rstd], "%a", "%b", "%c", None, None),
            ],
            "bn_grad_affine": [case([g, x, mean, rstd])],
            "bn_grad_input": [
                case([g, x, mean, rstd, w, dw, db], *(f"%{n}" for n in "abcdefg"), count),
                case([g, x, mean, rstd, dw, db], "%a", "%b", "%c", "%d", None, "%e", "%f", count),
            ],
        }
        for name, cases in made.items():
            found.setdefault(f"paraplan.{name}", []).extend(cases)
    found["paraplan.bn_rstd"] = [case([positive(12)], "%a", 8, 1e-5)]
    found["paraplan.bn_running"] = [case([randn(12), randn(12)], "%a", "%b", 0.1, 0.125)]
    return found


def channels_last_cases() -> dict[str, list[Case]]:
    """Ops that keep the memory order of images; the orders of the suite include channels last."""
    x, y = randn(4, 6, 3, 2), randn(4, 2, 3, 2)
    return {
        "aten.cat.default": [case([x, y], ("%a", "%b"), 1), case([x, x.clone()], ("%a", "%b"), 0)],
        "aten.constant_pad_nd.default": [case([x], "%a", (1, 1, 0, 2)), case([x], "%a", (0, 0, 0, 0, 1, 0))],
        "aten.roll.default": [case([x], "%a", (1, -1), (2, 3))],
        "aten.flip.default": [case([x], "%a", (3,))],
    }


def vision_cases() -> dict[str, list[Case]]:
    """Target -> its cases."""
    makers = (conv_cases, pool_cases, resize_cases, group_norm_cases, batch_norm_cases)
    return {target: cases for make in makers for target, cases in make().items()}
