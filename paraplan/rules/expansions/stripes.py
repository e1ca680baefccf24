"""Causal attention in balance: queries go where they are needed, a stripe of every rank's to each, keys are gathered.

A causal query sees the keys before it, so of a sequence in n blocks the last rank has n times the work of the first,
and a step takes the slowest one's. Here rank t gets the t-th n-th of every rank's queries (an all-to-all), so every
rank has as many early queries as late ones:

    block r of n    the t-th n-th of the queries of rank r, against the keys of the ranks before r, which it sees whole,
                    and those of rank r, of which it sees what lies before it; merged by their sums of exponentials

Every rank takes the same steps on the same shapes, (n + 1) / 2n of all scores in all, and results go back the same way.
Backward, a block's gradients need its rows alone, as in a ring; those of keys are summed over blocks in float32 at
least, and over ranks.

Source: the balance is that of zigzag and striped orders (Brandon et al. 2023, Striped Attention, arXiv 2311.09431;
Llama Team 2024, arXiv 2407.21783, section 3.3.2: gathered keys, two chunks a rank); here no other op sees the order.
"""

from __future__ import annotations

from paraplan.ir.execution.rank_program import GROW
from paraplan.ir.machine.collectives import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER
from paraplan.ir.model.graph import Arg, Graph, Op, map_refs
from paraplan.ir.model.tensor import TensorSpec
from paraplan.rules.dims import LocalContext
from paraplan.rules.expansions.ring import Steps, sum_dtype
from paraplan.rules.localise import axis_key


class _Stripes(Steps):
    """The steps of an op on the queries of dim 2 of [b, h, s, ...], and the gathered keys of dim 2."""

    def dealt(self, name: str) -> str:
        """Every rank's stripe of a value, one after another along dim 0."""
        return self._swapped(self._stacked(name, f"{name}|"), f"{name}~")

    def collected(self, parts: list[str], to: str) -> str:
        """The rows of this rank, of what every rank made of its stripe of them; heads lie inside rows, as kernels of
        attention have them."""
        wide = len(self.values[parts[0]].shape) == 4
        if wide:
            parts = [self._turned(part, f"{part}^t") for part in parts]
        first = self.values[parts[0]]
        joined = TensorSpec(first.dtype, (self.size * first.shape[0], *first.shape[1:]))
        args = (tuple("%" + part for part in parts), 0)
        made = self._swapped(self.add("aten.cat.default", args, {f"{to}|": joined}), f"{to}~")
        if wide:
            return self._turned(self._side_by_side(made, f"{to}^t", 1), to)
        return self._side_by_side(made, to)

    def _turned(self, name: str, to: str) -> str:
        """[b, h, s, d] as [b, s, h, d], or the other way."""
        spec = self.values[name]
        shape = tuple(spec.shape[dim] for dim in (0, 2, 1, 3))
        return self.add("aten.permute.default", ("%" + name, (0, 2, 1, 3)), {to: TensorSpec(spec.dtype, shape)})

    def gathered(self, name: str) -> str:
        """All ranks' keys."""
        return self._side_by_side(self.exchange(ALL_GATHER, name, f"{name}!"), f"{name}^")

    def scattered(self, name: str, dtype: str) -> str:
        """This rank's part of a sum over ranks."""
        stacked = self._stacked(self.cast(name, dtype, f"{name}^"), f"{name}|")
        return self.exchange(REDUCE_SCATTER, stacked, f"{name}~")

    def stripe(self, name: str, block: int) -> str:
        """A dealt value's part of one rank: a view."""
        rows = self.values[name].shape[0] // self.size
        return self.cut(name, 0, block * rows, rows, f"{name}{block}")

    def cut(self, name: str, dim: int, start: int, length: int, to: str) -> str:
        """A view of part of a dim."""
        spec = self.values[name]
        shape = (*spec.shape[:dim], length, *spec.shape[dim + 1 :])
        return self.add(
            "aten.slice.Tensor", ("%" + name, dim, start, start + length, 1), {to: TensorSpec(spec.dtype, shape)}
        )

    def at(self, block: int, keys: int, starts: int, causal: int, **tensors: str) -> tuple[Arg, ...]:
        """Arguments of the op for a block's queries and the keys from `keys` on, which `causal` says to mask.

        Args:
            block: of whose queries.
            keys: where the keys begin.
            starts, causal: places of these arguments; `causal` below 0: all keys are seen.
            tensors: what replaces inputs.
        """
        places, rows = self.args[starts], self.values["in0"].shape[2]
        queries = f"#{axis_key(self.axis)}:{rows // self.size},+:{block * rows}"
        found = [map_refs(arg, lambda name: tensors.get(name, name)) for arg in self.args]
        found[starts] = (*places[:2], queries, keys)
        found[abs(causal)] = causal > 0
        return tuple(found)

    def _stacked(self, name: str, to: str) -> str:
        spec = self.values[name]
        shape = (self.size * spec.shape[0], spec.shape[1], spec.shape[2] // self.size, *spec.shape[3:])
        return self.add("paraplan.stack", ("%" + name, self.size, 2), {to: TensorSpec(spec.dtype, shape)})

    def _side_by_side(self, name: str, to: str, dim: int = 2) -> str:
        spec = self.values[name]
        shape = (spec.shape[0] // self.size, *spec.shape[1:dim], self.size * spec.shape[dim], *spec.shape[dim + 1 :])
        return self.add("paraplan.unstack", ("%" + name, self.size, dim), {to: TensorSpec(spec.dtype, shape)})

    def _swapped(self, name: str, to: str) -> str:
        return self.exchange(ALL_TO_ALL, name, to)


def striped_attention(op: Op, context: LocalContext, axis: int) -> Graph:
    """The steps of `paraplan.attention`; see `OpDef.expand`."""
    steps = _Stripes(op, context, axis)
    queries, keys, values = steps.dealt("in0"), steps.gathered("in1"), steps.gathered("in2")
    dtype, rows = steps.values["in0"].dtype, steps.values["in1"].shape[2]
    wide, (b, h, part, _) = sum_dtype(dtype), steps.values[queries].shape
    b //= steps.size
    out = TensorSpec(dtype, (b, h, part, steps.values["in2"].shape[3]))
    lse = TensorSpec(wide, (b, h, part))
    outs: list[str] = []
    sums: list[str] = []
    for block in range(steps.size):
        query, start = steps.stripe(queries, block), block * rows
        own = {
            "in0": query,
            "in1": steps.cut(keys, 2, start, rows, f"k{block}"),
            "in2": steps.cut(values, 2, start, rows, f"v{block}"),
        }
        made = {f"out{block}": out, f"lse{block}": lse}
        found = steps.add(op.target, steps.at(block, start, 10, 7, **own), made), f"lse{block}"
        if block:
            past = {
                "in0": query,
                "in1": steps.cut(keys, 2, 0, start, f"k<{block}"),
                "in2": steps.cut(values, 2, 0, start, f"v<{block}"),
            }
            made = {f"out<{block}": out, f"lse<{block}": lse}
            before = steps.add(op.target, steps.at(block, 0, 10, -7, **past), made)
            merged = {f"joined{block}": out, f"total{block}": lse}
            args = ("%" + found[0], "%" + found[1], "%" + before, f"%lse<{block}", ":" + dtype)
            found = steps.add("paraplan.attention_merge", args, merged), f"total{block}"
        outs.append(found[0])
        sums.append(found[1])
    ends = [steps.collected(outs, "out"), steps.collected(sums, "lse")]
    return steps.graph(tuple(None if name is None else end for name, end in zip(op.outs, ends, strict=True)))


def striped_attention_grad(op: Op, context: LocalContext, axis: int) -> Graph:
    """The steps of `paraplan.attention_grad`; see `OpDef.expand`."""
    steps = _Stripes(op, context, axis)
    *_, out, lse = steps.inputs
    dealt = {name: steps.dealt(name) for name in ("in0", "in1", out, lse)}
    keys, values = steps.gathered("in2"), steps.gathered("in3")
    rows, wide = steps.values["in2"].shape[2], sum_dtype(steps.values["in1"].dtype)
    dqs: list[str] = []
    totals: dict[str, str] = {}
    for block in reversed(range(steps.size)):
        own = {name: steps.stripe(whole, block) for name, whole in dealt.items()}
        parts = {"": (block * rows, rows)} | ({"<": (0, block * rows)} if block else {})
        sums = ""
        for side, (start, length) in parts.items():
            near = own | {
                "in2": steps.cut(keys, 2, start, length, f"k{side}{block}"),
                "in3": steps.cut(values, 2, start, length, f"v{side}{block}"),
            }
            made = {
                f"dq{side}{block}": steps.values[near["in1"]],
                f"dk{side}{block}": steps.values[near["in2"]],
                f"dv{side}{block}": steps.values[near["in3"]],
            }
            steps.values |= made
            outs = (*made, None)[: len(op.outs)]
            args = steps.at(block, start, 13, -10 if side else 10, **near)
            steps.ops.append(Op(target=op.target, args=args, outs=outs))
            sums = steps.total(sums, f"dq{side}{block}", f"dq{side}{block}^")
        dqs.insert(0, steps.cast(sums, steps.values["in1"].dtype, f"dq{block}~"))
        for name in ("dk", "dv"):
            _add_up(steps, totals, name, block, parts, wide)
    ends = [steps.collected(dqs, "dq")]
    for name, like in (("dk", "in2"), ("dv", "in3")):
        spec = steps.values[totals[name]]
        whole = steps.add("aten.view.default", ("%" + totals[name], spec.shape), {f"{name}*": spec})
        ends.append(steps.scattered(whole, steps.values[like].dtype))
    return steps.graph(tuple(None if name is None else end for name, end in zip(op.outs, (*ends, None), strict=False)))


def _add_up(
    steps: _Stripes, totals: dict[str, str], name: str, block: int, parts: dict[str, tuple[int, int]], wide: str
) -> None:
    """Adds a block's gradients of keys to what the later blocks', which saw more of them, came to."""
    if name not in totals:
        sides = [steps.cast(f"{name}{side}{block}", wide, f"{name}{side}{block}^") for side in reversed(parts)]
        first = steps.values[sides[0]]
        length = sum(steps.values[side].shape[2] for side in sides)
        spec = TensorSpec(wide, (*first.shape[:2], length, first.shape[3]))
        args = (tuple("%" + side for side in sides), 2)
        totals[name] = steps.add("aten.cat.default", args, {f"{name}+": spec})
        return
    for side, (start, length) in parts.items():
        into = steps.cut(totals[name], 2, start, length, f"{name}+{side}{block}")
        steps.ops.append(Op(target=GROW, args=("%" + into, f"%{name}{side}{block}"), outs=()))
