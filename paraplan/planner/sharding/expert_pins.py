"""What expert parallelism leaves of the option space: on its axis, stacks of matrices by expert, the rest by batch.

A stack is a parameter whose first dim runs over the matrices of a batched product (its rows the tokens of an expert) or
of `paraplan.experts`, however it is viewed or cast on the way; and what is added to or multiplied with their results
along that dim (biases). On the axis

* an op that reads a stack, or makes the gradient of one, shards the experts;
* an op whose operands still have experts as a dim of their own (an activation between two products), and the views that
  lead to a product, may go by expert or by batch, as is cheaper;
* every other op shards the batch, as on a data-parallel axis.

Between the two the tokens change hands: an all-to-all where they lie by expert and group (GShard, Lepikhin et al.
2020), gathered and reduce-scattered, or routed, around `paraplan.experts`. Limits: a model whose other parameters are
multiplied like stacks (a projection per head) has these sharded too.
"""

from __future__ import annotations

from dataclasses import dataclass

from paraplan.ir.errors import ConstraintError
from paraplan.ir.model.graph import Op
from paraplan.ir.model.program import Program, SegmentKind
from paraplan.rules.dims import WHOLE, OpDims
from paraplan.rules.strategies import EXPANDED, dims_of

PRODUCTS = {
    "aten.bmm.default": "b",
    "aten.baddbmm.default": "b",
    "paraplan.experts": "e",
    "paraplan.experts_grad": "e",
}
"""Ops that multiply by a stack, and their letter of its matrices."""

Slot = tuple[int, int]


def _is_of_matrices(op: Op, letter: str) -> bool:
    """Whether a letter of an op is one of its matrices."""
    if op.target == "paraplan.batched_product":
        return letter not in (WHOLE, "k", "m", "n")
    return letter == PRODUCTS.get(op.target)


@dataclass(frozen=True)
class ExpertAxis:
    """What the ops of a program may do along an expert-parallel axis.

    Attributes:
        slots: (kind, parameter slot) of the stacks.
        must, may: (kind, op) -> the letter of its experts, for ops that shard it and for ops that may.
    """

    slots: frozenset[Slot]
    must: dict[tuple[int, int], str]
    may: dict[tuple[int, int], str]

    def allows(self, kind: int, position: int, part: str, batch: str) -> bool:
        """Whether an op may do `part` along the axis; `batch` is what it does along a data-parallel one."""
        key = part.split(">")[0]
        if (kind, position) in self.must:
            return key in (self.must[kind, position], *EXPANDED)
        return part == batch or key == self.may.get((kind, position))


def expert_axis(program: Program, size: int) -> ExpertAxis:
    """The experts of a program, for an axis of that size.

    Raises:
        ConstraintError: it has none, or their number does not divide.
    """
    slots: set[Slot] = set()
    must: dict[tuple[int, int], str] = {}
    may: dict[tuple[int, int], str] = {}
    for index, kind in enumerate(program.kinds):
        found = _KindExperts(kind)
        for slot in found.slots:
            count = kind.graph.values[kind.params[slot]].shape[0]
            if count % size:
                name = next(s.params[slot] for s in program.segments if s.kind == index)
                raise ConstraintError(f"ep={size}: the {count} experts of {name} do not divide over {size} ranks")
            slots.add((index, slot))
        must |= {(index, position): letter for position, letter in found.must.items()}
        may |= {(index, position): letter for position, letter in found.may.items()}
    if not slots:
        raise ConstraintError(
            f"ep={size}: the model has no experts (parameters [expert, ...] multiplied matrix by matrix); leave ep out"
        )
    return ExpertAxis(frozenset(slots), must, may)


class _KindExperts:
    """Finds stacks, and follows the dim of their experts through a kind's joint graph."""

    def __init__(self, kind: SegmentKind) -> None:
        self.kind = kind
        # value -> (the parameter it is a view or cast of, the dim the parameter's first became)
        self.sources: dict[str, tuple[int, int]] = {
            name: (slot, 0) for slot, name in enumerate(kind.params) if kind.graph.values[name].shape
        }
        self.slots: dict[int, None] = {}
        self.at: dict[str, int] = {}
        self.must: dict[int, str] = {}
        self.may: dict[int, str] = {}
        self.dims = tuple(dims_of(op, kind.graph.values) for op in kind.graph.ops)
        self.makers = {out: (i, slot) for i, op in enumerate(kind.graph.ops) for slot, out in enumerate(op.outs) if out}
        views: list[tuple[int, int, str]] = []
        for position, (op, dims) in enumerate(zip(kind.graph.ops, self.dims, strict=True)):
            if len(op.tensors) == 1 and op.tensors[0] in self.sources and len(op.outs) == 1:
                slot, dim = self.sources[op.tensors[0]]
                views.append((position, slot, dims.inputs[0][dim]))
                self._view(op, dims, dims.inputs[0][dim], slot)
            else:
                self._visit(position, op, dims)
        self.must |= {at: letter for at, slot, letter in views if slot in self.slots and letter != WHOLE}
        for position, letter in tuple(self.must.items()):
            for name, names in zip(kind.graph.ops[position].tensors, self.dims[position].inputs, strict=True):
                if letter in names:
                    self.may = self._up(name, names.index(letter)) | self.may
        for slot in self.slots:
            grad = kind.param_grads[slot]
            if grad is not None:
                self._gradient(grad)

    def _visit(self, position: int, op: Op, dims: OpDims) -> None:
        letter = self._letter(op, dims)
        if letter == WHOLE:
            return
        reads = False
        for name, names in zip(op.tensors, dims.inputs, strict=True):
            source = self.sources.get(name)
            if source is not None and names[source[1]] == letter:
                self.slots[source[0]] = None
                reads = True
        kept = [out for out in dims.outputs if out is not None and letter in out]
        if reads:
            self.must[position] = letter
            operands = zip(op.tensors, dims.inputs, strict=True)
            self.at |= {name: names.index(letter) for name, names in operands if letter in names}
        elif kept:
            self.may[position] = letter
        for made, out in zip(op.outs, dims.outputs, strict=True):
            if made is not None and out is not None and letter in out:
                self.at[made] = out.index(letter)

    def _letter(self, op: Op, dims: OpDims) -> str:
        """The op's letter of the experts: of a product with a stack, or of an operand that has them as a dim."""
        for name, names in zip(op.tensors, dims.inputs, strict=True):
            source = self.sources.get(name)
            if source is not None and _is_of_matrices(op, names[source[1]]):
                return names[source[1]]
        for name, names in zip(op.tensors, dims.inputs, strict=True):
            if name in self.at:
                return names[self.at[name]]
        return WHOLE

    def _view(self, op: Op, dims: OpDims, letter: str, slot: int) -> None:
        out, names = op.outs[0], dims.outputs[0]
        if out is not None and names is not None and letter != WHOLE and letter in names:
            self.sources[out] = (slot, names.index(letter))

    def _up(self, name: str, dim: int) -> dict[int, str]:
        """The ops of one operand that lead to a value, as long as they keep the dim apart."""
        found: dict[int, str] = {}
        while name in self.makers:
            position, slot = self.makers[name]
            op, dims = self.kind.graph.ops[position], self.dims[position]
            letter = (dims.outputs[slot] or ())[dim]
            if letter == WHOLE or len(op.tensors) != 1 or letter not in dims.inputs[0]:
                break
            found[position] = letter
            name, dim = op.tensors[0], dims.inputs[0].index(letter)
        return found

    def _gradient(self, name: str) -> None:
        """What makes a stack's gradient shards its experts, and so do the views of it on its way out."""
        views = self._up(name, 0)
        self.must |= views
        dim = 0
        for position, letter in views.items():
            name, dim = self.kind.graph.ops[position].tensors[0], self.dims[position].inputs[0].index(letter)
        if name in self.makers:
            position, slot = self.makers[name]
            letter = (self.dims[position].outputs[slot] or ())[dim]
            if letter != WHOLE:
                self.must[position] = letter
