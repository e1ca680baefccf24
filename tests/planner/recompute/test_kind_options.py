"""What a kind may recompute: the hull of all ways to, and what a stage makes of it."""

from __future__ import annotations

import itertools
import random

import pytest

from paraplan.ir.model.graph import Graph, Op, Phase
from paraplan.ir.model.program import SegmentKind
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.remat import RECOMPUTE, recomputable, remat_of
from paraplan.planner.recompute.kind_options import MOST_AWAY, RematOption, away_options, kind_options
from paraplan.planner.recompute.option_choice import HIDDEN_SHARE, choose


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
        name="k0",
        graph=Graph(inputs=("x", "t"), outputs=(out,), sources=(), values=values, ops=tuple(ops)),
        params=(),
        inputs=("x",),
        outputs=(out,),
        tangents=("t",),
        input_grads=("g0",),
        param_grads=(),
    )


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


@pytest.mark.parametrize("seed", range(20))
def test_more_and_more_of_the_largest_storages_go_away(seed: int) -> None:
    kind, draw = random_kind(seed), random.Random(seed + 1000)
    op_s = [0.0 if "view" in op.target else float(draw.randint(1, 9)) for op in kind.graph.ops]
    nbytes = {f"v{index}": draw.randint(1, 9) for index in range(8)}
    for name, op in ((op.outs[0], op) for op in kind.graph.ops if "view" in op.target):
        nbytes[str(name)] = nbytes.get(op.tensors[0], 1)
    options = kind_options(kind, op_s, nbytes)
    found = away_options(kind, nbytes, options, "host", lambda size: 1.0 + size)
    for base in options:
        mine = [o for o in found if o.extra_s == base.extra_s]
        assert len(mine) <= MOST_AWAY and (mine or not base.saved_bytes)
        for option in mine:
            remat = remat_of(kind, option.activations)
            assert [name for name, tier in remat.offloaded if tier == "host"] == [
                n for n in remat.saved if n in option.away
            ]
            assert set(option.away) <= set(remat.saved), "what is away is saved there"
            assert option.away_bytes == sum(nbytes[name] for name in option.away)
            assert option.copy_s == len(option.away) + option.away_bytes
            assert option.away_bytes >= base.saved_bytes - option.saved_bytes, "nothing leaves without being copied"
        if mine:
            assert mine[-1].saved_bytes == 0 and mine[-1].away_bytes == base.saved_bytes, "all of it, each storage once"


@pytest.mark.parametrize("seed", range(15))
def test_the_least_time_with_copies_beside_compute(seed: int) -> None:
    draw = random.Random(seed)
    kinds = [draw.randrange(2) for _ in range(3)] + [0, 1]
    options = []
    for _ in range(2):
        saved, away = draw.randint(10, 20), draw.randint(3, 10)
        copied = RematOption(
            (), saved - away, 0.0, ("v",), draw.choice(["host", "disk"]), away, float(draw.randint(1, 9))
        )
        options.append((RematOption((), saved, 0.0), copied, RematOption(("v",), 2, float(draw.randint(1, 5)))))
    times, rooms, m = (float(draw.randint(0, 30)), float(draw.randint(0, 30))), {"host": 12.0, "disk": 25.0}, 2

    def seconds(taken: tuple[int, ...]) -> float:
        chosen = [options[kind][at] for kind, at in zip(kinds, taken, strict=True)]
        copies = {tier: m * sum(o.copy_s for o in chosen if o.tier == tier) for tier in rooms}
        stalls = sum(max(0.0, copy - free) for copy in copies.values() for free in times)
        return m * sum(o.extra_s + HIDDEN_SHARE * o.copy_s for o in chosen) + stalls

    for allowed in range(5, 90, 14):
        ways = []
        for taken in itertools.product(range(3), repeat=len(kinds)):
            chosen = [options[kind][at] for kind, at in zip(kinds, taken, strict=True)]
            fits = all(sum(o.away_bytes for o in chosen if o.tier == tier) <= room for tier, room in rooms.items())
            if fits and sum(o.saved_bytes for o in chosen) <= allowed:
                ways.append(seconds(taken))
        found = choose(Bare(kinds), options, allowed, rooms, times, m)  # type: ignore[arg-type]
        assert (found is None) == (not ways)
        if found is not None:
            assert seconds(found) == pytest.approx(min(ways), rel=1e-6)
