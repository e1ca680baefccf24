"""What a kind may recompute: the hull of all ways to, and what a stage makes of it."""

from __future__ import annotations

import itertools
import random

import pytest

from paraplan.ir.graph import Graph, Op, Phase
from paraplan.ir.lower.remat import RECOMPUTE, recomputable, remat_of
from paraplan.ir.program import SegmentKind
from paraplan.ir.tensor import TensorSpec
from paraplan.planner.recompute.kinds import RematOption, kind_options
from paraplan.planner.recompute.stage import choose


def random_kind(seed: int, num_ops: int = 8) -> SegmentKind:
    """A forward of random ops (views among them), of which a backward reads some values."""
    draw = random.Random(seed)
    values = {"x": TensorSpec("float64", (4,)), "t": TensorSpec("float64", (4,))}
    names, ops = ["x"], []
    for index in range(num_ops):
        name = f"v{index}"
        if draw.random() < 0.2:
            ops.append(Op(target="aten.view.default", args=(f"%{draw.choice(names)}", (4,)), outs=(name,)))
        else:
            reads = draw.sample(names, min(len(names), draw.randint(1, 2)))
            ops.append(
                Op(target="aten.add.Tensor", args=tuple(f"%{read}" for read in (*reads, *reads)[:2]), outs=(name,))
            )
        values[name] = TensorSpec("float64", (4,))
        names.append(name)
    out = names[-1]
    for index, read in enumerate(draw.sample(names, 4)):
        values[f"g{index}"] = TensorSpec("float64", (4,))
        ops.append(Op(target="aten.mul.Tensor", args=("%t", f"%{read}"), outs=(f"g{index}",), phase=Phase.BACKWARD))
    return SegmentKind(
        name="k0", graph=Graph(inputs=("x", "t"), outputs=(out,), sources=(), values=values, ops=tuple(ops)), params=(),
        inputs=("x",), outputs=(out,), tangents=("t",), input_grads=("g0",), param_grads=(),
    )  # fmt: skip


def every_way(kind: SegmentKind, op_s: list[float], nbytes: dict[str, int]) -> list[tuple[int, float]]:
    """(bytes saved, seconds) of every set of values recomputed."""
    roots: dict[str, str] = {}
    for op in kind.graph.ops:
        for out in op.outs:
            assert out is not None
            source = op.tensors[0]
            roots[out] = roots.get(source, source) if "view" in op.target else out
    outside = {*kind.graph.inputs, *(roots[out] for out in kind.outputs)}
    values = recomputable(kind)
    found = []
    for count in range(len(values) + 1):
        for chosen in itertools.combinations(values, count):
            remat = remat_of(kind, dict.fromkeys(chosen, RECOMPUTE))
            held = {roots[name] for name in remat.saved} - outside
            found.append((sum(nbytes[root] for root in held), sum(op_s[index] for index in remat.again)))
    return found


@pytest.mark.parametrize("seed", range(25))
def test_the_hull_is_that_of_every_way_to_recompute(seed: int) -> None:
    kind, draw = random_kind(seed), random.Random(seed + 1000)
    op_s = [0.0 if "view" in op.target else float(draw.randint(1, 9)) for op in kind.graph.ops]
    nbytes = {f"v{index}": draw.randint(1, 9) for index in range(8)}
    ways = every_way(kind, op_s, nbytes)
    options = kind_options(kind, op_s, nbytes)
    assert options[0].saved_bytes >= options[-1].saved_bytes == min(way[0] for way in ways)
    for price in (0.01, 0.1, 0.3, 0.7, 1.0, 1.7, 3.0, 9.0, 100.0):
        least = min(seconds + price * held for held, seconds in ways)
        found = min(option.extra_s + price * option.saved_bytes for option in options)
        assert found == pytest.approx(least), price
    assert {(option.saved_bytes, option.extra_s) for option in options} <= set(ways)


class Bare:
    """A program as far as `choose` looks at it."""

    def __init__(self, kinds: list[int]) -> None:
        self.segments = [type("Segment", (), {"kind": kind}) for kind in kinds]


@pytest.mark.parametrize("seed", range(15))
def test_the_fewest_seconds_that_fit(seed: int) -> None:
    draw = random.Random(seed)
    kinds = [draw.randrange(2) for _ in range(5)] + [0, 1]
    options = [
        tuple(RematOption((), 20 - 7 * at - draw.randint(0, 5), at * draw.randint(1, 5)) for at in range(3))
        for _ in range(2)
    ]
    program = Bare(kinds)
    for allowed in range(0, 20 * len(kinds), 9):
        ways = [
            sum(options[kind][at].extra_s for kind, at in zip(kinds, taken, strict=True))
            for taken in itertools.product(range(3), repeat=len(kinds))
            if sum(options[kind][at].saved_bytes for kind, at in zip(kinds, taken, strict=True)) <= allowed
        ]
        found = choose(program, options, allowed)  # type: ignore[arg-type]
        if not ways:
            assert found is None
            continue
        assert found is not None
        assert sum(options[kind][at].extra_s for kind, at in zip(kinds, found, strict=True)) == min(ways)
        for kind in (0, 1):
            of = [at for at, k in zip(found, kinds, strict=True) if k == kind]
            assert of == sorted(of, reverse=True)  # the leanest first
