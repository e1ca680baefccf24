"""Whether rows of a batch count for nothing where certain inputs hold certain numbers there.

What a program does with those inputs before anything else comes in (labels shifted, clamped, compared) is executed, on
inputs that hold nothing but these numbers. From there on it is followed which values are zero in such rows whatever the
parameters and the other inputs are: a product with one of them, a cross-entropy of ignored labels, a choice that takes
them. What is zero for all parameters has no gradient. A numerator or denominator is then that of the other rows if all
sums over rows in it are of such values, and nothing but numbers scales it after.

Limits: numbers of rows that were made Python numbers (`x.shape[0]`) are constants of the program. Where one of that
size multiplies a sum over rows it is refused; hidden in another number it is not seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paraplan.capture.reference import run_op
from paraplan.ir.errors import ParaplanError
from paraplan.ir.machine.mesh import Placement, R, Shard
from paraplan.ir.model.graph import Graph, Op, Phase, arg_text, target_parts
from paraplan.ir.model.program import Program, Source, source_of
from paraplan.rules.time_axis import ProgramMicro

Fills = Mapping[str, float]
"""Batch input -> the number it holds in the rows in question."""
At = tuple[int, str]
"""A value: its segment, or -1 - the index of its denominator; and its name there."""

LARGEST = 1 << 24
"""Elements of what is executed."""
_EVERY = frozenset(
    (
        *("add", "sub", "neg", "abs", "relu", "sign", "sgn", "square", "tanh", "sin", "erf", "expm1", "gelu", "silu"),
        *("leaky_relu", "pow", "clone", "_to_copy", "alias", "detach", "contiguous", "view", "reshape", "unsqueeze"),
        *("squeeze", "expand", "permute", "transpose", "t", "slice", "select", "flip", "roll", "cat", "stack", "split"),
        *("chunk", "unbind", "repeat", "sum", "mean", "amax", "amin", "cumsum", "gather", "rotary", "mergeable"),
    )
)
"""Zero where all that is computed with is zero; of some, more is asked."""
_FACTORS = frozenset(("mul", "gated", "mm", "bmm", "matmul", "dot", "mv", "einsum"))
"""Zero where one operand is."""
_SCALARS = frozenset(("view", "reshape", "squeeze", "_to_copy", "neg", "clone", "alias", "detach", "add", "sub"))
_COUNTED = frozenset(("sum", "count_nonzero"))
_INDEXED = frozenset(
    {"gather", "take", "take_along_dim", "embedding_bag"}
    | {f"index{of}" for of in ("", "_add", "_copy", "_fill", "_put", "_reduce", "_select")}
    | {f"scatter{of}" for of in ("", "_add", "_reduce")}
)


class Rows:
    """A program, seen from rows in which some inputs hold given numbers.

    Args:
        program: the program.
        micro: of it in as many microbatches as there are rows.
        fills: the inputs and their numbers.
    """

    def __init__(self, program: Program, micro: ProgramMicro, fills: Fills) -> None:
        self.program, self.fills = program, dict(fills)
        self._places = [found.placements for found in (*micro.segments, *reversed(micro.denominators))]
        self._concrete: dict[At, Tensor | None] = {}
        self._zero: dict[At, bool] = {}
        self._filled: set[At] = set()
        self._makers: dict[int, dict[str, Op]] = {}
        self._given = {value: (at, local) for at, local, value in _handed(program)}

    def fault(self) -> str:
        """Why such rows would count; "" where they do not."""
        for index, term in enumerate(self.program.loss):
            what = f"the loss{f' {term.name!r}' if term.name else ''}"
            if term.denominator is None and self._place(self._given[term.numerator]) == R:
                continue  # of parameters alone
            if term.denominator is None:
                return f"{what} is divided by no count of what the batch says counts, so that rows would count in it"
            there = self.program.denominators[term.denominator].graph
            fault = self._sum((-1 - term.denominator, str(there.outputs[0])), 1.0)
            fault = fault or self._sum(self._given[term.numerator], self.program.loss[index].weight)
            if fault:
                return f"{what}: {fault}"
        return self._mixed()

    def _graph(self, at: int) -> Graph:
        if at < 0:
            return self.program.denominators[-1 - at].graph
        return self.program.kinds[self.program.segments[at].kind].graph

    def _maker(self, value: At) -> Op | None:
        at, name = value
        key = self.program.segments[at].kind if at >= 0 else at
        if key not in self._makers:
            forward = (op for op in self._graph(at).ops if op.phase is Phase.FORWARD)
            self._makers[key] = {out: op for op in forward for out in op.outs if out}
        return self._makers[key].get(name)

    def _place(self, value: At) -> Placement:
        at, name = value
        return self._places[at][name]

    def _outer(self, value: At) -> str:
        """What an input of a graph is called outside; "" for parameters and seeds."""
        at, name = value
        if at < 0:
            inputs, outer = self._graph(at).inputs, self.program.denominators[-1 - at].inputs
        else:
            segment = self.program.segments[at]
            inputs, outer = self.program.kinds[segment.kind].inputs, segment.inputs
        return dict(zip(inputs, outer, strict=True)).get(name, "")

    def concrete(self, value: At) -> Tensor | None:
        """A value, where it follows from the filled inputs alone."""
        if value not in self._concrete:
            self._concrete[value] = None  # what is too large, or fails, is not known
            self._concrete[value] = self._executed(value)
        return self._concrete[value]

    def _executed(self, value: At) -> Tensor | None:
        at, name = value
        spec, op = self._graph(at).values[name], self._maker(value)
        if math.prod(spec.shape) > LARGEST:
            return None
        if op is None:
            outer = self._outer(value)
            if outer in self._given:
                found = self.concrete(self._given[outer])
                self._filled |= {value} if self._given[outer] in self._filled else set()
                return found
            source, filled = source_of(outer)
            if source is not Source.BATCH or filled not in self.fills:
                return None
            self._filled.add(value)
            return torch.full(spec.shape, self.fills[filled], dtype=getattr(torch, spec.dtype))
        if op.rule is not None:
            return None
        env: dict[str, Tensor] = {}
        for given in op.tensors:
            found = self.concrete((at, given))
            if found is None:
                return None
            env[given] = found
        try:
            run_op(op, env)
        except (ParaplanError, RuntimeError, TypeError, ValueError, IndexError):
            return None
        self._filled |= {value} if any((at, each) in self._filled for each in op.tensors) else set()
        return env.get(name)

    def zero(self, value: At) -> bool:
        """Whether a value is zero in such rows."""
        if value not in self._zero:
            self._zero[value] = False
            self._zero[value] = self._is_zero(value)
        return self._zero[value]

    def _is_zero(self, value: At) -> bool:
        known, op = self.concrete(value), self._maker(value)
        if known is not None:
            return not bool(known.any())
        if op is None:
            outer = self._outer(value)
            return outer in self._given and self.zero(self._given[outer])
        at, name = value[0], _short(op)
        inputs = [(at, each) for each in op.tensors]
        if name == "nll_loss_forward":
            return self._ignored(at, op.args[1], op.args[4])
        if name == "ce_target":
            return self._ignored(at, op.args[1], op.args[2])
        if name in ("where", "masked_fill"):
            return self._chosen(at, op)
        if name in _FACTORS or (name == "batched_product" and op.args[0] is None):
            return any(self.zero(each) for each in inputs)
        if name == "linear":
            return len(op.tensors) == 2 and self.zero(inputs[0])
        if name == "div":
            return self.zero(inputs[0]) and (len(inputs) == 1 or self._nonzero(inputs[1]))
        if name not in _EVERY or not inputs:
            return False
        numbers = [x for x in (*op.args[1:], *op.kwargs.values()) if isinstance(x, (int, float)) and x]
        if name in ("add", "sub") and len(inputs) == 1 and numbers:
            return False
        if name == "pow" and not (len(inputs) == 1 and isinstance(op.args[1], (int, float)) and op.args[1] >= 1):
            return False
        return self.zero(inputs[0]) if name in ("gather", "rotary") else all(self.zero(each) for each in inputs)

    def _ignored(self, at: int, labels: Any, ignored: Any) -> bool:
        known = self.concrete((at, arg_text(str(labels))))
        return known is not None and bool((known == ignored).all())

    def _nonzero(self, value: At) -> bool:
        known = self.concrete(value)
        return known is None or bool((known != 0).all())

    def _chosen(self, at: int, op: Op) -> bool:
        """A choice between two values, or between a value and a number."""
        fill = _short(op) == "masked_fill"
        mask, yes, no = (op.args[1], op.args[2], op.args[0]) if fill else op.args[:3]
        known = self.concrete((at, arg_text(mask)))

        def nothing(arg: Any) -> bool:
            return self.zero((at, arg_text(arg))) if isinstance(arg, str) else arg == 0

        never, always = (False, False) if known is None else (not bool(known.any()), bool(known.all()))
        return (never or nothing(yes)) and (always or nothing(no))

    def _sum(self, value: At, weight: float) -> str:
        """Why a scalar is not that of the other rows alone; "" where it is."""
        op = self._maker(value)
        if op is None:
            outer = self._outer(value)
            return self._sum(self._given[outer], weight) if outer in self._given else f"{outer} is no sum over rows"
        at, name = value[0], _short(op)
        where = f"{op.target} ({self._graph(at).source_of(op)})"
        inputs = [(at, each) for each in op.tensors]
        if all(self._place(each) == R for each in inputs):
            return ""  # the same whatever the rows
        if name in _COUNTED or name == "dot":
            if any(isinstance(self._place(each), Shard) for each in inputs):
                zero = any if name == "dot" else all
                return "" if zero(self.zero(each) for each in inputs) else f"{where} sums what rows would count in"
            return self._sum(inputs[0], weight)
        if name == "ce_loss":
            ignored = self._ignored(at, op.args[3], op.args[4])
            return "" if ignored else f"no label is one that {where} ignores"
        if name in ("mul", "div") and len(inputs) == 1:
            number = op.args[1] if isinstance(op.args[1], (int, float)) else op.args[0]
            size = self._size_of(at, number / weight if weight and isinstance(number, (int, float)) else 1.0)
            words = f"{where} multiplies or divides by {number}, which may be how many rows or elements the batch had"
            return words if size else self._sum(inputs[0], 1.0)
        if name in _SCALARS or (name == "mul" and any(self._place(each) == R for each in inputs)):
            faults = [self._sum(each, weight) for each in inputs if self._place(each) != R]
            return next(filter(None, faults), "")
        return f"{where} is no sum over rows that could count for nothing"

    def _size_of(self, at: int, number: float) -> bool:
        """Whether a number, or one over it, is that of rows, or of elements of something with rows."""
        graph = self._graph(at)
        sizes = {
            math.prod(graph.values[name].shape)
            for op in graph.ops
            for name in op.tensors
            if op.phase is Phase.FORWARD and isinstance(self._place((at, name)), Shard)
        }
        sizes = {*sizes, self.program.batch_size} - {1}
        return any(math.isclose(abs(number), x) or math.isclose(abs(number) * x, 1.0) for x in sizes)

    def _mixed(self) -> str:
        """Where the filled inputs would make what is not finite, or read out of range; "" where nowhere."""
        for at in range(len(self.program.segments)):
            for op in self._graph(at).ops:
                known = [(self.concrete((at, name)), name) for name in op.tensors] if op.phase is Phase.FORWARD else []
                if not any(x is None for x, _ in known):
                    continue
                for x, name in known:
                    if (at, name) in self._filled and x is not None and not self._safe(at, op, name, x):
                        return f"{op.target} ({self._graph(at).source_of(op)}) cannot have {sorted(self.fills)} filled"
        return ""

    def _safe(self, at: int, op: Op, name: str, x: Tensor) -> bool:
        """Whether an op may read what follows from filled inputs beside what does not."""
        short = _short(op)
        if short in ("ce_loss", "ce_target", "embedding", "where"):
            return short != "where" or not x.is_floating_point() or bool(x.isfinite().all())
        if short == "nll_loss_forward":
            return self._ignored(at, op.args[1], op.args[4])
        if short == "div" and op.tensors[-1] == name:
            return bool((x != 0).all())
        if short in _INDEXED and not x.is_floating_point():
            of = self._graph(at).values[op.tensors[0]].shape
            return x.dtype == torch.bool or (bool((x >= 0).all()) and bool((x < min(of, default=1)).all()))
        return not x.is_floating_point() or bool(x.isfinite().all())


def _short(op: Op) -> str:
    return target_parts(op.target).name


def _handed(program: Program) -> list[tuple[int, str, str]]:
    """What segments hand on: (segment, its name there, its name outside)."""
    return [
        (at, local, outer)
        for at, segment in enumerate(program.segments)
        for local, outer in zip(program.kinds[segment.kind].outputs, segment.outputs, strict=True)
    ]
