"""Batch norms that a rank computes alone: their parts joined into one op each way, for devices with kernels for it.

Batch norm is lowered in parts, for sums over shards of the batch are completed between them
(`rules.layers.batch_norm`).
Where a rank has the whole batch nothing comes between, and the parts are

    sum -> mean -> squares -> rstd -> apply [-> add] [-> relu]       paraplan.bn_whole
    [relu's gradient ->] sums of gradients [-> casts] -> gradient    paraplan.bn_whole_grad

with the running statistics beside the first. They are joined if what is made between them is read within the chain
alone, or is a result of the joined op as well (mean, rstd, statistics, sums, the gradient behind a relu), and if the
count of the mean is that of the samples here: then no sum over ranks can stand between. Channels may be sharded. The
joined op stands where the chain's result was made, so whatever else reads its results must come later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from paraplan.ir.execution.rank_program import Block, Instr, LocalValue
from paraplan.ir.model.graph import Arg, ArgKind, Graph, Op, arg_kind, refs
from paraplan.ir.model.strides import is_contiguous
from paraplan.lowering.blocks.finish import with_frees

WHOLE, WHOLE_GRAD = "paraplan.bn_whole", "paraplan.bn_whole_grad"
_APPLY, _INPUT_GRAD = "paraplan.bn_apply", "paraplan.bn_grad_input"


def join_norms(block: Block) -> Block:
    """The block with batch norms over what is all here as one op each way; itself where it has none, and where a memory
    schedule says when values are freed."""
    if not any(instr.target in (_APPLY, _INPUT_GRAD) for instr in block.instrs):
        return block
    chains = _Chains(block)
    if with_frees(chains.kept, list(block.instrs)) != block.instrs:
        return block
    for at, instr in enumerate(block.instrs):
        if instr.target == _APPLY:
            chains.forward(at)
        elif instr.target == _INPUT_GRAD:
            chains.backward(at)
    return chains.joined()


def vanishing(graph: Graph) -> frozenset[str]:
    """Ops of a joint graph, by their first result, that cost nothing of their own where a rank has all samples: those
    of every chain but its last, which is no dearer than the joined op. A lower bound, whatever is then joined."""
    makers = {out: op for op in graph.ops for out in op.outs if out is not None}
    readers: dict[str, list[Op]] = {}
    for op in graph.ops:
        for name in dict.fromkeys(op.tensors):
            readers.setdefault(name, []).append(op)
    found: list[Op] = []
    for op in graph.ops:
        if op.target == _APPLY and op.args[1] is not None:
            mean, rstd = (makers.get(_name(arg)) for arg in op.args[1:3])
            if mean is None or rstd is None or (mean.target, rstd.target) != ("aten.mul.Tensor", "paraplan.bn_rstd"):
                continue
            sums = _name(mean.args[0]), _name(rstd.args[0])
            moved = [each for name in sums for each in readers[name] if each.target == "paraplan.bn_running"]
            found += [mean, rstd, *(makers[name] for name in sums if name in makers), *moved]
            after = readers.get(str(op.outs[0]), [])
            added = [
                each for one in after if one.target == "aten.add.Tensor" for each in readers.get(str(one.outs[0]), [])
            ]
            relus = [each for each in (*after, *added) if each.target == "aten.relu.default"]
            found += [*relus, *(one for one in after if one.target == "aten.add.Tensor" and relus)]
        elif op.target == _INPUT_GRAD:
            sums = _name(op.args[5]), _name(op.args[6])
            casts = [each for name in sums for each in readers[name] if each.target == "aten._to_copy.default"]
            behind = makers.get(_name(op.args[0]))
            relu = [behind] if behind is not None and behind.target == "aten.threshold_backward.default" else []
            found += [*(makers[name] for name in sums), *casts, *relu]
    return frozenset(next(out for out in op.outs if out is not None) for op in found)


def _reads(instr: Instr) -> list[str]:
    return list(refs((instr.args, tuple(instr.kwargs.values()))))


def _name(arg: Arg) -> str:
    return str(arg)[1:]


@dataclass
class _Chain:
    """The places of instructions that become one.

    Attributes:
        at: where that stands.
        places: of all of them.
        inner: names that are no results of the joined op.
    """

    at: int
    places: set[int] = field(default_factory=set)
    inner: set[str] = field(default_factory=set)


class _Chains:
    """What is joined of a block."""

    def __init__(self, block: Block) -> None:
        self.block, self.instrs = block, block.instrs
        self.makers = {out: at for at, instr in enumerate(block.instrs) for out in instr.outs if out is not None}
        self.readers: dict[str, list[int]] = {}
        for at, instr in enumerate(block.instrs):
            for name in dict.fromkeys(_reads(instr)):
                self.readers.setdefault(name, []).append(at)
        self.kept = {name for name in (*block.outputs, *block.saved) if name is not None}
        self.made: dict[int, Instr] = {}
        self.gone: set[int] = set()

    def joined(self) -> Block:
        """The block with what was found."""
        if not self.made:
            return self.block
        kept = [
            self.made.get(at, instr) for at, instr in enumerate(self.instrs) if at in self.made or at not in self.gone
        ]
        names = {*self.block.inputs, *self.kept, *(out for instr in kept for out in instr.outs)}
        values = {name: value for name, value in self.block.values.items() if name in names}
        return msgspec.structs.replace(self.block, values=values, instrs=with_frees(self.kept, kept))

    def forward(self, at: int) -> None:
        """Joins what ends in the application of statistics."""
        apply = self.instrs[at]
        x, mean, rstd, weight, bias = apply.args
        found = None if mean is None else self._statistics(_name(x), _name(mean), _name(rstd))
        if found is None:
            return
        chain, count, eps, total, squares = found
        chain.at = at
        chain.places.add(at)
        running = self._running(chain, total, squares, count)
        if running is None:
            return
        old, new, momentum = running
        out, added, relu = self._followed(chain, str(apply.outs[0]))
        joined = msgspec.structs.replace(
            apply,
            target=WHOLE,
            args=(x, weight, bias, *old, added, momentum, eps, relu),
            outs=(out, _name(mean), _name(rstd), *new),
        )
        self._join(chain, joined)

    def _statistics(self, x: str, mean: str, rstd: str) -> tuple[_Chain, int, Arg, str, str] | None:
        """The ops behind statistics of all of x; their count, epsilon, and the names of the sums."""
        places = [self.makers.get(rstd, -1), self.makers.get(mean, -1)]
        if -1 in places:
            return None
        spread, scaled = (self.instrs[place] for place in places)
        if spread.target != "paraplan.bn_rstd" or scaled.target != "aten.mul.Tensor":
            return None
        squares, total = _name(spread.args[0]), _name(scaled.args[0])
        more = [self.makers.get(squares, -1), self.makers.get(total, -1)]
        if -1 in more:
            return None
        squared, summed = (self.instrs[place] for place in more)
        value, count = self.block.values[x], spread.args[1]
        is_statistic = (
            squared.target == "paraplan.bn_squares"
            and squared.args == ("%" + x, "%" + mean)
            and summed.target == "aten.sum.dim_IntList"
            and summed.args[0] == "%" + x
            and sorted(summed.args[1]) == [dim for dim in range(len(value.shape)) if dim != 1]
            and count == _samples(value)
            and scaled.args[1] == 1.0 / count
        )
        if not is_statistic:
            return None
        return _Chain(-1, {*places, *more}, {squares, total}), int(count), spread.args[2], total, squares

    def _running(
        self, chain: _Chain, total: str, squares: str, count: int
    ) -> tuple[tuple[Arg, Arg], tuple[str | None, str | None], float] | None:
        """Running statistics before and after, and their momentum; None where they are others than torch's."""
        old: list[Arg] = []
        new: list[str | None] = []
        momenta: set[float] = set()
        for name, scale in ((total, 1.0 / count), (squares, 1.0 / max(count - 1, 1))):
            moved = [at for at in self.readers[name] if self.instrs[at].target == "paraplan.bn_running"]
            if not moved:
                old.append(None)
                new.append(None)
                continue
            before, value, momentum, factor = self.instrs[moved[0]].args
            if len(moved) > 1 or value != "%" + name or factor != scale or self._made(_name(before)) >= chain.at:
                return None
            chain.places.add(moved[0])
            old.append(before)
            new.append(self.instrs[moved[0]].outs[0])
            momenta.add(float(momentum))
        if len(momenta) > 1 or (None in new and new != [None, None]):
            return None
        return (old[0], old[1]), (new[0], new[1]), momenta.pop() if momenta else 0.0

    def _followed(self, chain: _Chain, out: str) -> tuple[str, Arg, bool]:
        """The last result with a sum and a relu that follow at once, what is added, and whether there is a relu."""
        last, added = self._only_reader(out), None
        if last is not None and self.instrs[last].target == "aten.add.Tensor" and not self.instrs[last].kwargs:
            summed = self.instrs[last]
            relu = self._only_reader(str(summed.outs[0]))
            other = [arg for arg in summed.args if arg != "%" + out]
            if relu is None or self.instrs[relu].target != "aten.relu.default" or len(other) != 1:
                return out, None, False
            if not self._alike(other[0], out) or self._made(_name(other[0])) >= chain.at:
                return out, None, False
            if not self._is_row_major(str(summed.outs[0])):
                return out, None, False
            chain.places.add(last)
            chain.inner.add(str(summed.outs[0]))
            last, added = relu, other[0]
        if last is None or self.instrs[last].target != "aten.relu.default":
            return out, None, False
        chain.places.add(last)
        chain.inner.add(out)
        return str(self.instrs[last].outs[0]), added, True

    def backward(self, at: int) -> None:
        """Joins what ends in the input's gradient."""
        end = self.instrs[at]
        g, x, mean, rstd, weight, dw, db, count = end.args
        sums = _name(dw), _name(db)
        begin = self.makers.get(sums[0], -1)
        if begin < 0 or count != _samples(self.block.values[_name(x)]):
            return
        summed = self.instrs[begin]
        if (summed.target, summed.args, summed.outs) != ("paraplan.bn_grad_affine", (g, x, mean, rstd), sums):
            return
        chain = _Chain(at, {begin, at})
        made, dtype = self._cast_sums(chain, sums)
        g, mask, masked = self._behind_relu(chain, g)
        joined = msgspec.structs.replace(
            end,
            target=WHOLE_GRAD,
            args=(g, x, mask, mean, rstd, weight, ":" + dtype, masked is not None),
            outs=(end.outs[0], *made, masked),
        )
        self._join(chain, joined)

    def _behind_relu(self, chain: _Chain, g: Arg) -> tuple[Arg, Arg, str | None]:
        """The gradient before a relu's, that relu's result, and the name of what is between where others read that."""
        name = _name(g)
        at = self._made(name)
        if at < 0 or self.instrs[at].target != "aten.threshold_backward.default" or self.instrs[at].args[2] != 0:
            return g, None, None
        before, result = self.instrs[at].args[:2]
        others = [place for place in self.readers[name] if place not in chain.places]
        plain = self._alike(before, name) and self._alike(result, name) and self._is_row_major(name)
        if not plain or any(place < chain.at for place in others):
            return g, None, None
        chain.places.add(at)
        if others or name in self.kept:
            return before, result, name
        chain.inner.add(name)
        return before, result, None

    def _cast_sums(self, chain: _Chain, sums: tuple[str, str]) -> tuple[tuple[str, ...], str]:
        """The sums as they are wanted, and their dtype: as they are, or both cast to another."""
        values, casts = self.block.values, []
        for name in sums:
            only = [at for at in self.readers[name] if at not in chain.places]
            if len(only) == 1 and self.instrs[only[0]].target == "aten._to_copy.default" and name not in self.kept:
                casts.append((only[0], str(self.instrs[only[0]].outs[0])))
        dtypes = {values[out].dtype for _, out in casts}
        if len(casts) < len(sums) or len(dtypes) > 1:
            return sums, values[sums[0]].dtype
        chain.places.update(at for at, _ in casts)
        chain.inner.update(sums)
        return tuple(out for _, out in casts), dtypes.pop()

    def _join(self, chain: _Chain, joined: Instr) -> None:
        """Takes a chain, unless something else reads what is inside of it, or a result before it is made."""
        outside = {
            name: [at for at in self.readers.get(name, ()) if at not in chain.places]
            for at in chain.places
            for name in self.instrs[at].outs
            if name is not None
        }
        early = any(at < chain.at for name in joined.outs if name is not None for at in outside[name])
        late = any(self._made(name) >= chain.at for name in _reads(joined))
        if early or late or chain.places & self.gone or any(outside[n] or n in self.kept for n in chain.inner):
            return
        self.gone |= chain.places
        self.made[chain.at] = joined

    def _made(self, name: str) -> int:
        """Where a name is made; -1 of an input."""
        return self.makers.get(name, -1)

    def _only_reader(self, name: str) -> int | None:
        readers = self.readers.get(name, [])
        return readers[0] if len(readers) == 1 and name not in self.kept else None

    def _is_row_major(self, name: str) -> bool:
        value = self.block.values[name]
        return is_contiguous(value.shape, value.strides)

    def _alike(self, arg: Arg, name: str) -> bool:
        """Whether an argument is a tensor of this one's shape and dtype."""
        if arg_kind(arg) is not ArgKind.VALUE:
            return False
        one, other = self.block.values[_name(arg)], self.block.values[name]
        return (one.dtype, one.shape) == (other.dtype, other.shape)


def _samples(x: LocalValue) -> int:
    """Elements of a channel."""
    return math.prod(x.shape) // max(x.shape[1], 1)
