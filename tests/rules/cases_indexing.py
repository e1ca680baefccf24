"""Cases of the rules for indexing, sorting, experts and tables."""

from __future__ import annotations

import torch

from .cases import Case, bools, case, ints, positive, randn


def _distinct(rows: int, high: int, width: int) -> torch.Tensor:
    """`width` different numbers below `high` in each of `rows` rows."""
    return torch.stack([torch.randperm(high, generator=torch.Generator().manual_seed(i))[:width] for i in range(rows)])


def indexing_cases() -> dict[str, list[Case]]:
    one, pair = ints(6, 4), ints(6, 4, 1)
    return {
        "paraplan.index": [
            case([randn(6, 4, 2), ints(6, 12)], "%a", ("%b",)),
            case([randn(4, 6, 2), ints(6, 4, 3)], "%a", (None, "%b")),
            case([randn(6, 4, 12), pair, ints(4, 12)], "%a", ("%b", "%c")),
            case([randn(6, 4, 12), one, ints(12, 4)], "%a", ("%b", None, "%c")),
            case([randn(12, 4), ints(12, 2, 6)], "%a", ("%b", None)),
        ],
        "paraplan.index_put": [
            case([randn(6, 4), ints(6, 12), randn(12, 4)], "%a", ("%b",), "%c", True),
            case([randn(4, 6, 2), ints(6, 4, 3), randn(4, 4, 3, 2)], "%a", (None, "%b"), "%c", True),
            case([randn(12, 4), _distinct(1, 12, 6)[0], randn(6, 4)], "%a", ("%b",), "%c"),
            case([randn(6, 4), ints(6, 12), randn(4)], "%a", ("%b",), "%c", True),
            case([randn(6, 4, 12), one, ints(12, 4), randn(4, 4)], "%a", ("%b", None, "%c"), "%d", True),
        ],
        "aten.index_select.default": [
            case([randn(6, 4), ints(6, 12)], "%a", 0, "%b"),
            case([randn(4, 6, 2), ints(6, 12)], "%a", -2, "%b"),
        ],
        "aten.index_add.default": [
            case([randn(6, 4), ints(6, 12), randn(12, 4)], "%a", 0, "%b", "%c"),
            case([randn(4, 6), ints(6, 12), randn(4, 12)], "%a", 1, "%b", "%c", alpha=2.0),
        ],
        "aten.scatter.src": [
            case([randn(4, 12), _distinct(4, 12, 6), randn(4, 6)], "%a", 1, "%b", "%c"),
            case([randn(12, 4), _distinct(4, 12, 2).t().contiguous(), randn(2, 4)], "%a", 0, "%b", "%c"),
        ],
        "aten.scatter.value": [
            case([randn(4, 12), ints(12, 4, 6)], "%a", 1, "%b", 0),
            case([randn(4, 12), ints(12, 4, 6)], "%a", -1, "%b", 2.5),
        ],
        "aten.scatter_add.default": [
            case([randn(4, 6), ints(6, 4, 12), randn(4, 12)], "%a", 1, "%b", "%c"),
            case([randn(6, 4), ints(6, 12, 4), randn(12, 4)], "%a", 0, "%b", "%c"),
            case([randn(6), ints(6, 12), randn(12)], "%a", 0, "%b", "%c"),
        ],
        "aten.histc.default": [case([ints(6, 4, 12).double()], "%a", 6, 0, 6), case([randn(4, 6)], "%a", 5)],
        "aten.bincount.default": [case([ints(6, 12)], "%a")],
        "aten.eye.default": [case([], 4)],
    }


def sorting_cases() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {
        "aten.topk.default": [case([randn(4, 12)], "%a", 3), case([randn(12, 4, 2)], "%a", 2, 0)],
        "aten.sort.default": [case([randn(4, 12)]), case([randn(12, 4)], "%a", 0, True)],
        "aten.sort.stable": [
            case([ints(4, 4, 12)], "%a", stable=True),
            case([ints(4, 12, 4)], "%a", stable=True, dim=0),
        ],
        "aten.argsort.default": [case([randn(4, 12)]), case([randn(12, 4)], "%a", 0)],
        "aten.amin.default": [
            case([randn(4, 6, 2)], "%a", (1,)),
            case([randn(4, 6)], "%a", (-1,), True),
            case([randn(4, 6)], "%a", ()),
        ],
        "aten.any.dim": [case([bools(4, 6)], "%a", 1), case([bools(4, 6)], "%a", 0, True)],
        "aten.all.dim": [case([bools(4, 6)], "%a", 1), case([bools(4, 6)], "%a", -2)],
        "aten.prod.dim_int": [case([positive(4, 6)], "%a", 1), case([positive(4, 6)], "%a", 0, True)],
        "aten.tril.default": [case([randn(4, 6, 6)]), case([randn(4, 6)], "%a", -1)],
        "aten.triu.default": [case([randn(4, 6, 6)]), case([randn(4, 6)], "%a", 1)],
        "aten.cumprod.default": [case([positive(4, 6)], "%a", 1)],
    }
    for name in ("max", "min"):
        found[f"aten.{name}.dim"] = [case([randn(4, 6, 2)], "%a", 1), case([randn(4, 6)], "%a", 0, True)]
        found[f"aten.cum{name}.default"] = [case([randn(4, 6)], "%a", 1)]
        found[f"aten.arg{name}.default"] = [
            case([randn(4, 6)], "%a", 1),
            case([randn(4, 6)]),
            case([randn(4, 6)], "%a", 0, True),
        ]
    return found


def matmul_cases() -> dict[str, list[Case]]:
    return {
        "aten.baddbmm.default": [
            case([randn(4, 6, 2), randn(4, 6, 12), randn(4, 12, 2)], beta=0.5, alpha=2.0),
            case([randn(6, 1), randn(4, 6, 12), randn(4, 12, 2)], "%a", "%b", "%c"),
        ],
        "aten.mv.default": [case([randn(4, 12), randn(12)])],
        "aten.dot.default": [case([randn(12), randn(12)])],
    }


def expert_cases() -> dict[str, list[Case]]:
    """Four and twelve experts, two with parts, one expert nobody chose and one number that is nobody's."""
    forward, backward = [], []
    for total, parts, activation in ((4, 2, "silu"), (12, 1, "gelu_tanh"), (6, 1, "relu")):
        ids = _distinct(12, total, 2)
        ids[ids == 1] = 2
        ids[3, 1] = total
        x, weights, w_in, w_out = randn(12, 6), positive(12, 2), randn(total, parts, 4, 6), randn(total, 8, 4)
        rest = (f":{activation}", total, 0)
        forward.append(case([x, ids, weights, w_in, w_out], "%a", "%b", "%c", "%d", "%e", *rest, fixed="abcde"))
        given = [randn(12, 8), x, ids, weights, w_in, w_out]
        backward.append(case(given, "%a", "%b", "%c", "%d", "%e", "%f", *rest, True, fixed="abcdef"))
    chosen, shares = _distinct(12, 6, 2), positive(12, 2)
    return {
        "paraplan.experts": forward,
        "paraplan.experts_grad": backward,
        "paraplan.route_plan": [case([chosen], "%a", 3, 2, 0, fixed="a"), case([chosen], "%a", 2, 2, 1, fixed="a")],
        "paraplan.route_here": [case([chosen, shares], "%a", "%b", 3, 2, 2, fixed="ab")],
        "paraplan.route_add": [case([randn(12, 6), ints(4, 12)], "%a", "%b", 4, fixed="b")],
    }


def table_cases() -> dict[str, list[Case]]:
    return {
        "paraplan.embedding_tables": [
            case([randn(4, 12, 6), ints(12, 6, 4)], "%a", "%b", 0),
            case([randn(2, 6, 4), ints(6, 4, 3, 2)], "%a", "%b", 0),
        ],
        "paraplan.embedding_tables_grad": [
            case([randn(6, 4, 2), ints(12, 6, 4)], "%a", "%b", 12, 0),
            case([randn(4, 3, 2, 4), ints(6, 4, 3, 2)], "%a", "%b", 6, 0),
        ],
    }


def more_cases() -> dict[str, list[Case]]:
    """Target -> its cases."""
    makers = (indexing_cases, sorting_cases, matmul_cases, expert_cases, table_cases)
    return {target: cases for make in makers for target, cases in make().items()}
