"""One-op examples of every op with a rule: arguments and inputs, the smallest that can be cut in 2, 3 and 4."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from paraplan.ir.model.graph import Arg
from paraplan.kernels import reference_kernels


@dataclass(frozen=True)
class Case:
    """An op on inputs.

    Attributes:
        args, kwargs: as in `ir.model.graph`, inputs called a, b, c, ... in order.
        inputs: their values.
        rows: inputs whose last dim lies densely whatever the memory order (kernels rely on it).
        fixed: inputs that are row-major always.
    """

    args: tuple[Arg, ...]
    inputs: dict[str, Tensor]
    kwargs: dict[str, Arg] = field(default_factory=dict)
    rows: str = ""
    fixed: str = ""


_generator = torch.Generator().manual_seed(0)
_NAMES = "abcdefghij"


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def positive(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_generator, dtype=torch.float64) + 0.5


def ints(high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=_generator)


def bools(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_generator) < 0.5


def case(inputs: list[Tensor], *args: Arg, rows: str = "", fixed: str = "", **kwargs: Arg) -> Case:
    """Inputs become %a, %b, ... ; where no args are given they are the args."""
    named = dict(zip(_NAMES, inputs, strict=False))
    return Case(args or tuple(f"%{name}" for name in named), named, dict(kwargs), rows, fixed)


def _pairs() -> list[list[Tensor]]:
    """Equal shapes, broadcasts on either side, a scalar."""
    return [
        [randn(4, 12), randn(4, 12)],
        [randn(2, 1, 12), randn(4, 1)],
        [randn(12), randn(4, 12)],
        [randn(4, 6), randn()],
    ]


def _binary() -> list[Case]:
    return [case(pair) for pair in _pairs()] + [Case(("%a", "%a"), {"a": randn(4, 6)})]


def _unary(*rest: Arg, make=randn) -> list[Case]:  # type: ignore[no-untyped-def]
    return [case([make(4, 12)], "%a", *rest), case([make(2, 3, 4)], "%a", *rest)]


def _backward(*rest: Arg) -> list[Case]:
    return [case([randn(4, 6), randn(4, 6)], "%a", "%b", *rest)]


def _integers() -> list[Case]:
    return [case([ints(6, 4, 6), ints(6, 6)], "%a", "%b")]


def _compare() -> list[Case]:
    return [case([ints(4, 4, 6), ints(4, 4, 6)], "%a", "%b"), case([randn(4, 6), randn(4, 1)], "%a", "%b")]


def pointwise_cases() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for name in ("add", "sub"):
        found[f"aten.{name}.Tensor"] = [
            *_binary(),
            case([randn(4, 6), randn(6)], "%a", "%b", alpha=-0.5),
            case([randn(4, 6)], "%a", 2.0),
        ]
        found[f"aten.{name}.Scalar"] = _unary(2.5)
    found["aten.rsub.Scalar"] = _unary(2.5)
    found["aten.mul.Tensor"] = [*_binary(), case([randn(4, 6)], "%a", 3.0)]
    found["aten.div.Tensor"] = [
        case([randn(4, 12), positive(12)]),
        case([randn(4, 6)], "%a", 3.0),
        Case(("%a", "%a"), {"a": positive(4, 6)}),
    ]
    found["aten.div.Scalar"] = found["aten.mul.Scalar"] = _unary(3.0)
    found["aten.neg.default"] = _unary()
    found["aten._conj_physical.default"] = _unary()
    found["aten.erfinv.default"] = [case([torch.tanh(randn(4, 6))])]
    for name in (
        "exp",
        "expm1",
        "tanh",
        "sigmoid",
        "silu",
        "relu",
        "erf",
        "cos",
        "sin",
        "abs",
        "sign",
        "sgn",
        "isnan",
        "isinf",
        "floor",
        "round",
        "mish",
    ):
        found[f"aten.{name}.default"] = _unary()
    for name in ("rsqrt", "sqrt", "reciprocal", "log", "log1p"):
        found[f"aten.{name}.default"] = _unary(make=positive)
    found["aten.gelu.default"] = [*_unary(), case([randn(4, 6)], "%a", approximate=":tanh")]
    found["aten.pow.Tensor_Scalar"] = _unary(3)
    found["aten.pow.Scalar"] = [case([randn(4, 6)], 2.0, "%a")]
    found["aten.pow.Tensor_Tensor"] = [case([positive(4, 6), randn(6)])]
    found["aten.softplus.default"] = found["aten.elu.default"] = _unary()
    found["aten.leaky_relu.default"] = _unary(0.1)
    found["aten.hardtanh.default"] = _unary(-0.5, 0.5)
    for name in ("tanh", "sigmoid", "silu", "mish"):
        found[f"aten.{name}_backward.default"] = _backward()
    found["aten.gelu_backward.default"] = [
        *_backward(),
        case([randn(4, 6), randn(4, 6)], "%a", "%b", approximate=":tanh"),
    ]
    found["aten.threshold_backward.default"] = _backward(0)
    found["aten.softplus_backward.default"] = _backward(1.0, 20.0)
    found["aten.elu_backward.default"] = [case([randn(4, 6), randn(4, 6)], "%a", 1.0, 1.0, 1.0, False, "%b")]
    found["aten.leaky_relu_backward.default"] = _backward(0.1, False)
    found["aten.hardtanh_backward.default"] = _backward(-0.5, 0.5)
    found["aten.mse_loss_backward.default"] = [
        case([randn(4, 6), randn(4, 6), randn(4, 6)], "%a", "%b", "%c", 0),
        case([randn(), randn(4, 6), randn(4, 6)], "%a", "%b", "%c", 1),
        case([randn(), randn(4, 6), randn(4, 6)], "%a", "%b", "%c", 2),
    ]
    shares = (positive(4, 6) - 0.4) / 1.2
    found["aten.binary_cross_entropy.default"] = [case([shares, bools(4, 6).double()], "%a", "%b", None, 0)]
    found["aten.binary_cross_entropy_backward.default"] = [
        case([randn(4, 6), shares, positive(4, 6)], "%a", "%b", "%c", None, 0),
        case([randn(), shares, positive(4, 6)], "%a", "%b", "%c", None, 1),
    ]
    for name in ("maximum", "minimum"):
        found[f"aten.{name}.default"] = _binary()
    found["aten.atan2.default"] = _binary()
    found["aten.xlogy.Tensor"] = [case([randn(4, 6), positive(6)])]
    found["aten.clamp.default"] = [*_unary(-0.5, 0.5), case([randn(4, 6)], "%a", None, 0.5)]
    found["aten.clamp_min.default"] = found["aten.clamp_max.default"] = _unary(0.1)
    found["aten.clamp.Tensor"] = [case([randn(4, 6), randn(6), randn(4, 1)])]
    found["aten.masked_fill.Scalar"] = [
        case([randn(4, 6), bools(4, 6)], "%a", "%b", 7.0),
        case([randn(4, 6), bools(6)], "%a", "%b", "~-inf"),
    ]
    for name in ("eq", "ne", "ge", "gt", "le", "lt"):
        found[f"aten.{name}.Tensor"] = _compare()
        found[f"aten.{name}.Scalar"] = [case([ints(4, 4, 6)], "%a", 2)]
    for name in ("logical_not", "bitwise_not"):
        found[f"aten.{name}.default"] = [case([bools(4, 6)])]
    for target in (
        "logical_and.default",
        "logical_or.default",
        "bitwise_and.Tensor",
        "bitwise_or.Tensor",
        "__and__.Tensor",
        "__or__.Tensor",
    ):
        found[f"aten.{target}"] = [case([bools(4, 6), bools(6)]), case([bools(4, 1), bools(4, 6)])]
    found["aten.floor_divide.default"] = [case([ints(40, 4, 6), ints(6, 6, low=1)])]
    found["aten.remainder.Scalar"] = [case([ints(40, 4, 6)], "%a", 7)]
    found["aten.where.self"] = [
        case([bools(4, 12), randn(4, 12), randn(4, 12)]),
        case([bools(4, 1), randn(12), randn()]),
        Case(("%a", "%b", "%b"), {"a": bools(4, 6), "b": randn(4, 6)}),
    ]
    found["aten._to_copy.default"] = [
        case([randn(4, 12)], "%a", dtype=":float32"),
        case([randn(4, 12).float()], "%a", dtype=":float64"),
        case([ints(9, 4, 12)], "%a", dtype=":float64"),
        case([bools(4, 12)], "%a", dtype=":float64"),
    ]
    found["aten.clone.default"] = _unary()
    return found


def matmul_cases() -> dict[str, list[Case]]:
    return {
        "aten.mm.default": [case([randn(4, 6), randn(6, 12)])],
        "aten.addmm.default": [
            case([randn(12), randn(4, 6), randn(6, 12)]),
            case([randn(4, 12), randn(4, 6), randn(6, 12)], "%a", "%b", "%c", beta=0.5, alpha=2.0),
            case([randn(1, 12), randn(4, 6), randn(6, 12)]),
        ],
        "aten.bmm.default": [case([randn(2, 4, 6), randn(2, 6, 12)])],
        "paraplan.batched_product": [
            case([randn(2, 4, 3, 6), randn(2, 4, 6, 12)], None, "%a", "%b", 1.0, 1.0),
            case([randn(2, 4, 3, 6), randn(2, 4, 6, 12)], None, "%a", "%b", 1.0, 0.5),
            case([randn(2, 4, 1, 12), randn(2, 4, 3, 6), randn(2, 4, 6, 12)], "%a", "%b", "%c", 0.5, 2.0),
            case([randn(1, 1, 4, 12), randn(2, 6, 4, 2), randn(2, 6, 2, 12)], "%a", "%b", "%c", 1.0, 1.0),
            case([randn(2, 4, 2, 6, 2), randn(2, 4, 2, 2, 6)], None, "%a", "%b", 1.0, 1.0),
        ],
        "paraplan.mergeable": [case([randn(2, 4, 3, 6)], "%a")],
        "paraplan.linear": [
            case([randn(2, 4, 6), randn(12, 6)], "%a", "%b", None, False),
            case([randn(2, 4, 6), randn(6, 12), randn(12)], "%a", "%b", "%c", True),
            case([randn(4, 6), randn(12, 6), randn(12)], "%a", "%b", "%c", False),
        ],
        "paraplan.linear_grad_input": [
            case([randn(2, 4, 12), randn(12, 6)], "%a", "%b", False),
            case([randn(4, 12), randn(6, 12)], "%a", "%b", True),
        ],
        "paraplan.linear_grad_weight": [
            case([randn(2, 4, 12), randn(2, 4, 6)], "%a", "%b", False),
            case([randn(4, 12), randn(4, 6)], "%a", "%b", True),
        ],
    }


def view_cases() -> dict[str, list[Case]]:
    reshapes = [
        ((4, 6), (24,)),
        ((24,), (4, 6)),
        ((2, 3, 4), (6, 4)),
        ((4, 6), (6, 4)),
        ((12, 8), (8, 12)),
        ((2, 12, 1), (1, 2, 3, 4)),
        ((6, 2, 2), (4, 6)),
        ((4,), (4, 1)),
        ((2, 12), (2, 4, 3)),
    ]
    views = [case([randn(*source)], "%a", target) for source, target in reshapes]
    pads = [(1, 2), (0, 0, 1, 1), (1, -1), (-1, 1, 0, 2), (2, -1)]
    return {
        "aten.view.default": views,
        "aten._unsafe_view.default": views,
        "aten.reshape.default": views,
        "aten.permute.default": [case([randn(2, 4, 6)], "%a", order) for order in ((1, 0, 2), (2, 0, 1), (0, -1, 1))],
        "aten.expand.default": [
            case([randn(4, 1, 6)], "%a", (2, 4, 12, 6)),
            case([randn(12)], "%a", (4, 12)),
            case([randn(1, 6)], "%a", (4, -1)),
            case([randn()], "%a", (4, 6)),
        ],
        "aten.slice.Tensor": [
            case([randn(4, 12)], "%a", 1, 2, 8),
            case([randn(4, 12)], "%a", -2, 1, 9223372036854775807),
            case([randn(4, 12)], "%a", 1, 0, 12, 3),
            case([randn(4, 12)], "%a", 1, -4, 12),
        ],
        "aten.select.int": [case([randn(4, 6, 2)], "%a", 1, 2), case([randn(4, 6)], "%a", -1, -1)],
        "aten.slice_backward.default": [
            case([randn(4, 6)], "%a", (4, 12), 1, 2, 8, 1),
            case([randn(4, 4)], "%a", (12, 4), 0, 1, 12, 3),
        ],
        "aten.select_backward.default": [
            case([randn(4, 6)], "%a", (4, 3, 6), 1, 2),
            case([randn(4, 6)], "%a", (4, 6, 2), -1, -1),
        ],
        "aten.cat.default": [
            case([randn(4, 6), randn(4, 12), randn(4, 2)], ("%a", "%b", "%c"), 1),
            case([randn(4, 6), randn(2, 6)], ("%a", "%b")),
            case([randn(4, 6), randn(4, 6)], ("%a", "%b"), -2),
            case([randn(4, 6), randn(4, 2)], ("%a", "%b"), dim=1),
            Case((("%a", "%a"), 0), {"a": randn(4, 6)}),
        ],
        "aten.constant_pad_nd.default": [case([randn(4, 6)], "%a", pad) for pad in pads]
        + [case([randn(4, 6)], "%a", (1, 1), 7.0)],
        "aten.flip.default": [case([randn(4, 6, 2)], "%a", (1,)), case([randn(4, 6)], "%a", (-1, 0))],
        "aten.roll.default": [
            case([randn(4, 6)], "%a", (2,), (1,)),
            case([randn(4, 6)], "%a", (1, -2), (0, 1)),
            case([randn(4, 6)], "%a", (1,)),
            case([randn(4, 6)], "%a", (3,), (-2,)),
            case([randn(4, 6)], "%a", (0,)),
        ],
    }


def reduction_cases() -> dict[str, list[Case]]:
    return {
        "aten.sum.dim_IntList": [
            case([randn(4, 6, 12)], "%a", (1,)),
            case([randn(4, 6)], "%a", (0, -1), True),
            case([randn(4, 6)], "%a", ()),
            case([randn(4, 6)], "%a", None),
            case([ints(9, 4, 6)], "%a", (0,)),
            case([bools(4, 6)], "%a", (0,)),
        ],
        "aten.sum.default": [case([randn(4, 6)]), case([bools(4, 6)])],
        "aten.amax.default": [
            case([randn(4, 6, 2)], "%a", (1,)),
            case([randn(4, 6)], "%a", (-1,), True),
            case([randn(4, 6)], "%a", ()),
        ],
        "aten._softmax.default": [case([randn(4, 6, 2)], "%a", 1, False), case([randn(4, 6)], "%a", -1, False)],
        "aten._log_softmax.default": [case([randn(4, 6, 2)], "%a", 1, False), case([randn(4, 6)], "%a", -1, False)],
        "aten._softmax_backward_data.default": [
            case([randn(4, 6), positive(4, 6)], "%a", "%b", -1, ":float64"),
            case([randn(4, 6, 2), positive(4, 6, 2)], "%a", "%b", 1, ":float64"),
        ],
        "aten._log_softmax_backward_data.default": [case([randn(4, 6), -positive(4, 6)], "%a", "%b", -1, ":float64")],
        "aten.cumsum.default": [case([randn(4, 6)], "%a", 1), case([ints(9, 4, 6)], "%a", -2)],
    }


def creation_cases() -> dict[str, list[Case]]:
    seed = torch.tensor(1234567)
    return {
        "aten.full.default": [case([], (4, 6), 2.5, dtype=":float64"), case([], (), 1.0, dtype=":float64")],
        "aten.arange.default": [case([], 12)],
        "aten.arange.start": [case([], 2, 14)],
        "aten.arange.start_step": [case([], 0, 12, 2)],
        "aten.linspace.default": [case([], -1.0, 1.0, 12)],
        "paraplan.constant": [case([], (1.0, 2.0, 3.0, 4.0), ":float64", (2, 2))],
        "paraplan.dropout": [
            case([randn(4, 6, 12), seed], "%a", "%b", 0.4, 3, (4, 6, 12), (0, 0, 0)),
            case([randn(12), seed], "%a", "%b", 0.4, 1, (12,), (0,)),
        ],
        "paraplan.uniform": [
            case([randn(4, 6, 12), seed], "%a", "%b", 3, (4, 6, 12), (0, 0, 0)),
            case([randn(12), seed], "%a", "%b", 1, (12,), (0,)),
        ],
    }


def norm_cases() -> dict[str, list[Case]]:
    forward, backward = [], []
    for shape, normalised, affine in (((4, 6, 12), (12,), "wb"), ((4, 2, 6), (2, 6), "w"), ((4, 6), (6,), "")):
        x, weight, bias = randn(*shape), randn(*normalised), randn(*normalised)
        lead = shape[: len(shape) - len(normalised)]
        given = [x, *([weight] if affine else []), *([bias] if affine == "wb" else [])]
        at = {"": (None, None), "w": ("%b", None), "wb": ("%b", "%c")}[affine]
        forward.append(case(given, "%a", normalised, *at, 1e-5))
        ones = (1,) * len(normalised)
        mean, rstd = randn(*lead, *ones), positive(*lead, *ones)
        after = {"": (None, None), "w": ("%e", None), "wb": ("%e", "%f")}[affine]
        given = [randn(*shape), x, mean, rstd, *given[1:]]
        backward.append(
            case(given, "%a", "%b", normalised, "%c", "%d", *after, (True, affine != "", affine == "wb"), fixed="cd")
        )
    return {"paraplan.layer_norm": forward, "paraplan.layer_norm_grad": backward, **rms_cases()}


def rms_cases() -> dict[str, list[Case]]:
    forward, backward = [], []
    for shape, dims, affine in (((4, 6, 12), 1, True), ((4, 2, 6), 2, False)):
        x, weight = randn(*shape), randn(*shape[-dims:])
        given = [x, weight] if affine else [x]
        forward.append(case(given, "%a", dims, "%b" if affine else None, 1e-5))
        rstd = positive(*shape[:-dims], *(1,) * dims)
        given = [randn(*shape), x, rstd, *given[1:]]
        backward.append(case(given, "%a", "%b", dims, "%c", "%d" if affine else None, (True, affine), fixed="c"))
    return {"paraplan.rms_norm": forward, "paraplan.rms_norm_grad": backward}


def elementwise_cases() -> dict[str, list[Case]]:
    angles = [((12, 1, 6, 4), (12, 1, 6, 4)), ((1, 1, 6, 4), (1, 1, 6, 4)), ((12, 2, 1, 4), (1, 1, 1, 4))]
    turned = [
        case([randn(12, 2, 6, 4), randn(*cos), randn(*sin)], "%a", "%b", "%c", transposed)
        for cos, sin in angles
        for transposed in (False, True)
    ]
    kinds = (":silu", ":gelu", ":gelu_tanh", ":relu")
    gates = [case([randn(4, 6, 12), randn(4, 6, 12)], "%a", "%b", kind) for kind in kinds]
    grads = [case([randn(4, 12), randn(4, 12), randn(4, 12)], "%a", "%b", "%c", kind) for kind in kinds]
    return {"paraplan.rotary": turned, "paraplan.gated": gates, "paraplan.gated_grad": grads}


def lookup_cases() -> dict[str, list[Case]]:
    logits, labels = randn(4, 6, 12), ints(12, 4, 6)
    labels[0, :3] = -100
    top = reference_kernels.ce_max(logits)
    sums = reference_kernels.ce_sumexp(logits, top)
    hits = reference_kernels.ce_target(logits, labels, -100)
    return {
        "paraplan.embedding": [
            case([randn(12, 6), ints(12, 4, 2)], "%a", "%b", 0),
            case([randn(6, 4), ints(6, 12)], "%a", "%b", 0),
        ],
        "paraplan.embedding_grad": [
            case([randn(4, 2, 6), ints(12, 4, 2)], "%a", "%b", 12, -1, 0),
            case([randn(4, 6), ints(12, 4)], "%a", "%b", 12, 7, 0),
        ],
        "paraplan.ce_max": [case([logits])],
        "paraplan.ce_sumexp": [case([logits, top])],
        "paraplan.ce_target": [case([logits, labels], "%a", "%b", -100, 0)],
        "paraplan.ce_loss": [case([top, sums, hits, labels], "%a", "%b", "%c", "%d", -100)],
        "paraplan.ce_grad": [case([randn(), logits, top, sums, labels], "%a", "%b", "%c", "%d", "%e", -100, 0)],
        "aten.gather.default": [
            case([randn(4, 6), ints(6, 4, 2)], "%a", 1, "%b"),
            case([randn(4, 6), ints(4, 2, 6)], "%a", 0, "%b"),
            case([randn(4, 6, 2), ints(2, 4, 3, 1)], "%a", -1, "%b"),
        ],
    }


def attention_cases() -> dict[str, list[Case]]:
    """Sequences of 3 (odd, no ring of 2), of 4 and of 12; queries and keys of equal and of unequal number."""
    forward, backward = [], []
    options = [
        (4, 4, None, 0.0, True, 3, 3),
        (4, 2, None, 0.0, False, 3, 3),
        (4, 4, randn(2, 1, 3, 3), 0.0, False, 3, 3),
        (4, 2, randn(4, 3, 3), 0.3, False, 3, 3),
        (4, 4, bools(2, 1, 3, 3) | torch.eye(3, dtype=torch.bool), 0.0, False, 3, 3),
        (4, 4, randn(2, 4, 3, 3), 0.3, False, 3, 3),
        (4, 4, randn(3, 3), 0.0, True, 3, 3),
        (4, 2, None, 0.0, True, 12, 12),
        (4, 2, None, 0.3, True, 12, 12),
        (2, 2, bools(2, 1, 12, 12) & (torch.arange(12) != 5).unsqueeze(-1), 0.0, False, 12, 12),
        (2, 2, (torch.arange(8) < torch.tensor([3, 8]).unsqueeze(-1)).view(2, 1, 1, 8), 0.0, False, 4, 8),
        (2, 2, randn(1, 2, 4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, float("-inf")), 0.3, False, 4, 4),
        (2, 2, randn(2, 1, 1, 12), 0.3, False, 4, 12),
    ]
    for option in options:
        call, one_way = _attention_forward(*option)
        forward.append(one_way)
        mask = option[2]
        for mask_grad in {False, mask is not None and mask.dtype != torch.bool}:
            backward.append(_attention_backward(call, mask_grad))
    return {
        "paraplan.attention": forward,
        "paraplan.attention_grad": backward,
        "paraplan.attention_merge": [_attention_merge()],
    }


def _attention_forward(
    heads: int, groups: int, mask: Tensor | None, p: float, causal: bool, s: int, t: int
) -> tuple[tuple[Arg, ...], Case]:
    """The arguments of a call, and the case it is."""
    q, k, v = randn(2, heads, s, 8), randn(2, groups, t, 8), randn(2, groups, t, 8)
    four = mask if mask is None else mask.expand((1,) * (4 - mask.dim()) + tuple(mask.shape)).contiguous()
    seed = torch.tensor(42) if p else None
    rest = (p, 2, causal and mask is None, 0.35, (2, heads, s, t))
    extra = [x for x in (four, seed) if x is not None]
    names = iter(_NAMES[3:])
    mask_arg, seed_arg = (None if x is None else f"%{next(names)}" for x in (four, seed))
    args = ("%a", "%b", "%c", mask_arg, seed_arg, *rest, (0, 0, 0, 0))
    return (q, k, v, four, seed, *rest), case([q, k, v, *extra], *args, rows="abc", fixed="defg")


def _attention_backward(call: tuple[Arg, ...], mask_grad: bool) -> Case:
    q, k, v, mask, seed, *rest = call
    out, lse = reference_kernels.attention(*call, (0, 0, 0, 0))
    extra = [x for x in (mask, seed) if x is not None]
    names = iter(_NAMES[4:])
    args = [None if x is None else f"%{next(names)}" for x in (mask, seed, out, lse)]
    return case(
        [randn(*out.shape), q, k, v, *extra, out.contiguous(), lse],
        *("%a", "%b", "%c", "%d", *args, *rest, (0, 0, 0, 0), mask_grad),
        rows="abcd" + args[2][1:],
        fixed=_NAMES[4 : 4 + len(extra)] + args[3][1:],
    )


def _attention_merge() -> Case:
    """One row has keys on one side alone, one on neither."""
    lse = [randn(2, 4, 3), randn(2, 4, 3)]
    lse[0][0, 0, 0] = lse[0][1, 1, 1] = lse[1][1, 1, 1] = float("-inf")
    return case([randn(2, 4, 3, 8), lse[0], randn(2, 4, 3, 8), lse[1]], "%a", "%b", "%c", "%d", ":float64", fixed="bd")


def all_cases() -> dict[str, list[Case]]:
    """Target -> its cases."""
    makers = (
        pointwise_cases,
        matmul_cases,
        view_cases,
        reduction_cases,
        creation_cases,
        norm_cases,
        elementwise_cases,
        lookup_cases,
        attention_cases,
    )
    return {target: cases for make in makers for target, cases in make().items()}
