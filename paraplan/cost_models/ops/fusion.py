"""What torch.compile makes of a block's memory-bound chains: which ops become one kernel, and what that moves.

A fused kernel reads every tensor from outside of it once and writes what others read, so

    t = launch + (bytes read from outside + bytes written for outside) / (memory bandwidth · share)

Ops are taken in order, as Inductor's scheduler fuses vertically and horizontally: one joins a kernel that makes or
reads an input of it, where both run over as many elements (or it over as many as the kernel's reduction leaves),
reductions inside run over the same dims (rows or the rest), and no other op lies between (the kernel would wait for
itself). Views go along. Nothing is fused across the issue of or the wait for a collective or a copy, nor into matrix
products, attention, convolutions and the kernels of canonical ops, which stay as they are. Results of the block are
written whoever else reads them: what the backward is given was decided when the plan was made, not by the compiler.

Limits: kernels are as fast as eager's per byte; what a fused kernel needs in registers does not split it. Source:
Ansel et al. 2024 (PyTorch 2, section 4.4: fusion by score of shared bytes).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from paraplan.cost_models.ops.roofline import is_free
from paraplan.ir.execution.rank_program import Block, Instr, InstrKind, LocalValue
from paraplan.ir.model.graph import refs
from paraplan.ir.model.tensor import DTYPE_BYTES
from paraplan.rules.tensors.pointwise import NONLINEAR, PRODUCTS, QUOTIENTS, ROW_MAJOR, SUMS

_POINTWISE = frozenset(
    (
        *SUMS,
        *PRODUCTS,
        *QUOTIENTS,
        *NONLINEAR,
        *ROW_MAJOR,
        "aten.where.self",
        "aten._to_copy.default",
        "aten.clone.default",
        "aten.threshold_backward.default",
        "aten.leaky_relu_backward.default",
        "aten.cat.default",
        "aten.full.default",
        "aten.full_like.default",
        "aten.zeros_like.default",
        "aten.ones_like.default",
        "aten.arange.start_step",
        "aten.slice_backward.default",
        "aten.select_backward.default",
        "paraplan.reshape_copy",
    )
)
_REDUCTIONS = frozenset(
    (
        "aten.sum.dim_IntList",
        "aten.sum.default",
        "aten.mean.dim",
        "aten.mean.default",
        "aten.amax.default",
        "aten.amin.default",
        "aten.var_mean.correction",
    )
)
_ROWS = frozenset(
    (
        "aten._softmax.default",
        "aten._log_softmax.default",
        "aten._softmax_backward_data.default",
        "aten._log_softmax_backward_data.default",
        "paraplan.layer_norm",
        "paraplan.layer_norm_grad",
        "paraplan.rms_norm",
        "paraplan.rms_norm_grad",
    )
)
ROWS, OTHER = "rows", "other"


@dataclass
class _Kernel:
    """Ops that are one kernel, or an op that stays alone.

    Attributes:
        elements: it runs over; 0 where nothing can join.
        reduces: over which dims it does, "" where it does not.
        rows: elements its reduction leaves, 0 where it has none along rows.
        members: instructions, by index.
        before: kernels it reads, by number.
    """

    elements: int
    reduces: str
    rows: int
    members: list[int]
    before: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Fused:
    """A kernel of several instructions, or of one.

    Attributes:
        members: indices of the instructions.
        read_bytes, write_bytes: what it moves.
    """

    members: tuple[int, ...]
    read_bytes: int
    write_bytes: int


def fused_kernels(block: Block) -> tuple[Fused, ...]:
    """The kernels of a block that are fused; what belongs to none runs as it stands."""
    walk = _Walk(block)
    for index, instr in enumerate(block.instrs):
        walk.take(index, instr)
    outside = walk.read_outside()
    chains = [number for number, kernel in enumerate(walk.kernels) if kernel.elements and len(kernel.members) > 1]
    return tuple(walk.moved(number, outside) for number in chains)


class _Walk:
    """A block's instructions, taken in order."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.kernels: list[_Kernel] = []
        self.of: dict[str, int] = {}  # owner of a storage -> the kernel that makes it
        self.readers: dict[str, list[int]] = {}  # owner -> kernels that read it
        self.span = 0  # first kernel after the last issue or wait

    def owner(self, name: str) -> str:
        """Who owns the storage behind a name."""
        values, inputs = self.block.values, self.block.inputs
        while values[name].base != name and name not in inputs:
            name = values[name].base
        return name

    def take(self, index: int, instr: Instr) -> None:
        """One instruction."""
        read = dict.fromkeys(map(self.owner, refs((instr.args, tuple(instr.kwargs.values())))))
        if instr.kind is not InstrKind.OP:
            self._alone(index, read, instr)
            self.span = len(self.kernels)
            return
        made = [self.block.values[name] for name in instr.outs if name is not None]
        if made and not any(value.storage_bytes for value in made) and instr.target != "paraplan.write":
            return  # a view
        elements, reduces = self._space(instr, made)
        if not elements:
            self._alone(index, read, instr)
            return
        number = self._joined(read, elements, reduces)
        if number < 0:
            self.kernels.append(_Kernel(elements, "", 0, []))
            number = len(self.kernels) - 1
        kernel = self.kernels[number]
        kernel.members.append(index)
        if reduces:
            kernel.reduces = reduces
            kernel.rows = min(prod(value.shape) for value in made) if reduces == ROWS else 0
        self._wire(number, read, instr)

    def _alone(self, index: int, read: Iterable[str], instr: Instr) -> None:
        self.kernels.append(_Kernel(0, "", 0, [index]))
        self._wire(len(self.kernels) - 1, read, instr)

    def _wire(self, number: int, read: Iterable[str], instr: Instr) -> None:
        for owner in read:
            self.readers.setdefault(owner, []).append(number)
            if owner in self.of and self.of[owner] != number:
                self.kernels[number].before.add(self.of[owner])
        for name in instr.outs:
            if name is not None and self.owner(name) == name:
                self.of[name] = number

    def _space(self, instr: Instr, made: list[LocalValue]) -> tuple[int, str]:
        """How many elements a fusable op runs over, and over which dims it reduces; 0: it is not fused."""
        if not made or instr.work is not None:
            return 0, ""
        if instr.target in _REDUCTIONS:
            first = self.block.values[next(refs(instr.args))]
            return prod(first.shape), _dims_reduced(instr, first)
        if instr.target in _ROWS:
            return prod(made[0].shape), ROWS
        moves = is_free(instr.target)  # what would be a view had to be copied
        return (prod(made[0].shape), "") if instr.target in _POINTWISE or moves else (0, "")

    def _joined(self, read: Iterable[str], elements: int, reduces: str) -> int:
        """The latest kernel that an op can be part of; -1 where there is none."""
        near = {self.of[owner] for owner in read if owner in self.of}
        near |= {number for owner in read for number in self.readers.get(owner, ())}
        for number in sorted(near, reverse=True):
            kernel = self.kernels[number]
            alike = elements in (kernel.elements, kernel.rows) and (not reduces or kernel.reduces in ("", reduces))
            sources = {self.of[owner] for owner in read if owner in self.of} - {number}
            if number >= self.span and alike and not any(self._after(source, number) for source in sources):
                return number
        return -1

    def _after(self, number: int, other: int) -> bool:
        """Whether a kernel needs another's results, directly or not."""
        stack, seen = [number], set[int]()
        while stack:
            here = stack.pop()
            if here == other:
                return True
            if here not in seen:
                seen.add(here)
                stack += self.kernels[here].before
        return False

    def read_outside(self) -> set[str]:
        """Owners of storages that are read by another kernel than their maker's, or returned."""
        found = {owner for owner, numbers in self.readers.items() if {*numbers} - {self.of.get(owner, -1)}}
        results = (name for name in (*self.block.outputs, *self.block.saved) if name is not None)
        return found | set(map(self.owner, results))

    def moved(self, number: int, outside: set[str]) -> Fused:
        """What a kernel reads and writes."""
        values, kernel = self.block.values, self.kernels[number]
        read: dict[str, dict[tuple[int, ...], int]] = {}
        write = 0
        for index in kernel.members:
            instr = self.block.instrs[index]
            for name in refs((instr.args, tuple(instr.kwargs.values()))):
                if self.of.get(owner := self.owner(name), -1) != number:
                    read.setdefault(owner, {})[values[name].shape] = values[name].nbytes
            write += sum(values[name].nbytes for name in instr.outs if name in outside and self.owner(name) == name)
        reads = sum(min(sum(parts.values()), _held_bytes(values[owner])) for owner, parts in read.items())
        return Fused(tuple(kernel.members), reads, write)


def _held_bytes(value: LocalValue) -> int:
    return max(value.storage_bytes, prod(value.shape) * DTYPE_BYTES[value.dtype])


def _dims_reduced(instr: Instr, value: LocalValue) -> str:
    """Whether a reduction runs along the last dim alone."""
    rank = len(value.shape)
    dims = instr.args[1] if len(instr.args) > 1 else instr.kwargs.get("dim")
    found = dims if isinstance(dims, (tuple, list)) else (dims,) if isinstance(dims, int) else range(rank)
    return ROWS if {int(dim) % rank for dim in found} == {rank - 1} else OTHER
