"""Loops over time: an elementwise recurrence, one with a product, and a sum over steps and rows."""

from __future__ import annotations

from paraplan.ir.model.graph import Graph, Op
from paraplan.ir.model.scan import Scan, scan_text
from paraplan.ir.model.tensor import TensorSpec
from tests.rules.cases import Case, case, randn

STEPS = 3


def op(target: str, out: str, *args: object) -> Op:
    return Op(target=target, args=args, outs=(out,))


def loop(
    ops: list[Op],
    shapes: dict[str, tuple[int, ...]],
    counts: tuple[int, int, int],
    outputs: tuple[str, ...],
    results: int,
    histories: tuple[int, ...] = (),
    reverse: bool = False,
) -> str:
    """A loop as text; the first values of `shapes` are its inputs, carries and constants."""
    values = {name: TensorSpec("float64", shape) for name, shape in shapes.items()}
    body = Graph(inputs=tuple(shapes)[: sum(counts)], outputs=outputs, values=values, ops=tuple(ops))
    inputs, carries, constants = counts
    scan = Scan(
        steps=STEPS,
        inputs=inputs,
        carries=carries,
        constants=constants,
        results=results,
        histories=histories,
        reverse=reverse,
        body=body,
    )
    return ":" + scan_text(scan)


def elementwise() -> str:
    """c = a_t c + b_t, and y_t = c k."""
    ops = [
        op("aten.mul.Tensor", "m", "%a", "%c"),
        op("aten.add.Tensor", "n", "%m", "%b"),
        op("aten.mul.Tensor", "y", "%n", "%k"),
    ]
    shapes = {**dict.fromkeys("abc", (4, 12)), "k": (12,), **dict.fromkeys("mny", (4, 12))}
    return loop(ops, shapes, (2, 1, 1), ("n", "y"), 1)


def product(reverse: bool) -> str:
    """h = tanh(x_t + h w): the width of h is contracted, rows are free."""
    ops = [
        op("paraplan.linear", "m", "%h", "%w", None, False),
        op("aten.add.Tensor", "s", "%m", "%x"),
        op("aten.tanh.default", "n", "%s"),
    ]
    shapes = {"x": (4, 12), "h": (4, 12), "w": (12, 12), **dict.fromkeys("msn", (4, 12))}
    return loop(ops, shapes, (1, 1, 1), ("n",), 0, (0,), reverse)


def summed() -> str:
    """The gradient of a factor of each column: sums over steps and rows."""
    ops = [
        op("aten.mul.Tensor", "m", "%g", "%x"),
        op("aten.sum.dim_IntList", "s", "%m", (0,), False),
        op("aten.mul.Tensor", "n", "%g", "%k"),
    ]
    shapes = {"x": (4, 12), "g": (4, 12), "k": (12,), "m": (4, 12), "s": (12,), "n": (4, 12)}
    return loop(ops, shapes, (1, 1, 1), ("n", "s"), 0)


def loop_cases() -> dict[str, list[Case]]:
    """The op `paraplan.scan`."""
    rows = randn(STEPS, 4, 12), randn(STEPS, 4, 12), randn(4, 12)
    return {
        "paraplan.scan": [
            case([*rows, randn(12)], ("%a", "%b"), ("%c",), ("%d",), elementwise()),
            *(case([rows[0], rows[2], randn(12, 12)], ("%a",), ("%b",), ("%c",), product(r)) for r in (False, True)),
            case([rows[0], rows[2], randn(12)], ("%a",), ("%b",), ("%c",), summed()),
        ]
    }
