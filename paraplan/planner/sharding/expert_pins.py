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
from paraplan.ir.option_words import OptionName, OptionValue
from paraplan.rules.choices import axis_part
from paraplan.rules.dims import WHOLE, OpDims
from paraplan.rules.strategies import EXPANDED, dims_of

PRODUCTS = {
    "aten.bmm.default": "b",
    "aten.baddbmm.default": "b",
    "paraplan.experts": "e",
    "paraplan.experts_grad": "e",
}
"""Ops that multiply by a stack, and the dim of its matrices in their rules."""

EXPERT_AXES = ("ep_nodes", "ep")
"""Mesh axes that make up an expert-parallel degree: where it spans nodes, they may have one of their own."""

Slot = tuple[int, int]


def _is_of_matrices(op: Op, dim: str) -> bool:
    """Whether a dim of an op is one of its matrices."""
    if op.target == "paraplan.batched_product":
        return dim not in (WHOLE, "k", "m", "n")
    return dim == PRODUCTS.get(op.target)


@dataclass(frozen=True)
class ExpertAxis:
    """What the ops of a program may do along an expert-parallel axis.

    Attributes:
        slots: (kind, parameter slot) of the stacks.
        must, may: (kind, op) -> the dim of its experts, for ops that shard it and for ops that may.
    """

    slots: frozenset[Slot]
    must: dict[tuple[int, int], str]
    may: dict[tuple[int, int], str]

    def allows(self, kind: int, position: int, part: str, batch: str) -> bool:
        """Whether an op may do something along the axis.

        Args:
            kind, position: the op: the index of its kind, and its own in the joint graph.
            part: a strategy's key along the axis.
            batch: the key of what the op does along a data-parallel axis.
        """
        key = axis_part(part).does
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
                raise ConstraintError(
                    "{}: the {} experts of {} do not divide over {} ranks", OptionValue("ep", size), count, name, size
                )
            slots.add((index, slot))
        must |= {(index, position): dim for position, dim in found.must.items()}
        may |= {(index, position): dim for position, dim in found.may.items()}
    if not slots:
        raise ConstraintError(
            "{}: the model has no experts (parameters [expert, ...] multiplied matrix by matrix); leave {} out",
            *(OptionValue("ep", size), OptionName("ep")),
        )
    return ExpertAxis(frozenset(slots), must, may)


def has_experts(program: Program, size: int) -> bool:
    """Whether a program has experts that divide over an axis of that size."""
    try:
        return bool(expert_axis(program, size).slots)
    except ConstraintError:
        return False


class _KindExperts:
    """Finds stacks, and follows the dim of their experts through a kind's joint graph."""

    def __init__(self, kind: SegmentKind) -> None:
        self.kind = kind
        # value -> (the parameter it is a view or cast of, the index of the dim the parameter's first became)
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
                slot, index = self.sources[op.tensors[0]]
                views.append((position, slot, dims.inputs[0][index]))
                self._view(op, dims, dims.inputs[0][index], slot)
            else:
                self._visit(position, op, dims)
        self.must |= {at: dim for at, slot, dim in views if slot in self.slots and dim != WHOLE}
        for position, dim in tuple(self.must.items()):
            for name, names in zip(kind.graph.ops[position].tensors, self.dims[position].inputs, strict=True):
                if dim in names:
                    self.may = self._up(name, names.index(dim)) | self.may
        for slot in self.slots:
            grad = kind.param_grads[slot]
            if grad is not None:
                self._gradient(grad)

    def _visit(self, position: int, op: Op, dims: OpDims) -> None:
        dim = self._dim(op, dims)
        if dim == WHOLE:
            return
        reads = False
        for name, names in zip(op.tensors, dims.inputs, strict=True):
            source = self.sources.get(name)
            if source is not None and names[source[1]] == dim:
                self.slots[source[0]] = None
                reads = True
        kept = [out for out in dims.outputs if out is not None and dim in out]
        if reads:
            self.must[position] = dim
            operands = zip(op.tensors, dims.inputs, strict=True)
            self.at |= {name: names.index(dim) for name, names in operands if dim in names}
        elif kept:
            self.may[position] = dim
        for made, out in zip(op.outs, dims.outputs, strict=True):
            if made is not None and out is not None and dim in out:
                self.at[made] = out.index(dim)

    def _dim(self, op: Op, dims: OpDims) -> str:
        """The op's dim of the experts: of a product with a stack, or of an operand that has them as one."""
        for name, names in zip(op.tensors, dims.inputs, strict=True):
            source = self.sources.get(name)
            if source is not None and _is_of_matrices(op, names[source[1]]):
                return names[source[1]]
        for name, names in zip(op.tensors, dims.inputs, strict=True):
            if name in self.at:
                return names[self.at[name]]
        return WHOLE

    def _view(self, op: Op, dims: OpDims, dim: str, slot: int) -> None:
        out, names = op.outs[0], dims.outputs[0]
        if out is not None and names is not None and dim != WHOLE and dim in names:
            self.sources[out] = (slot, names.index(dim))

    def _up(self, name: str, index: int) -> dict[int, str]:
        """The ops of one operand that lead to a value, as long as they keep its dim `index` apart."""
        found: dict[int, str] = {}
        while name in self.makers:
            position, slot = self.makers[name]
            op, dims = self.kind.graph.ops[position], self.dims[position]
            dim = (dims.outputs[slot] or ())[index]
            if dim == WHOLE or len(op.tensors) != 1 or dim not in dims.inputs[0]:
                break
            found[position] = dim
            name, index = op.tensors[0], dims.inputs[0].index(dim)
        return found

    def _gradient(self, name: str) -> None:
        """What makes a stack's gradient shards its experts, and so do the views of it on its way out."""
        views = self._up(name, 0)
        self.must |= views
        index = 0
        for position, dim in views.items():
            name, index = self.kind.graph.ops[position].tensors[0], self.dims[position].inputs[0].index(dim)
        if name in self.makers:
            position, slot = self.makers[name]
            dim = (self.dims[position].outputs[slot] or ())[index]
            if dim != WHOLE:
                self.must[position] = dim
