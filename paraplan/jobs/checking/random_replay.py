"""The random numbers of a captured program, drawn by the eager model too.

A dispatch mode over the eager run. Every draw of a program is uniform numbers keyed by (seed of the segment, slot,
global element index); the eager model's op at the same place gets those, and makes its distribution of them by
inversion, with the parameters of its own call: a probability that was captured wrongly shows. Places are told by order
of occurrence among the draws of as many rows and columns; where the program has a draw in another view of what the
eager model draws, among those of as many elements.

Every draw takes a number of torch's generator as its ticket, by which an op that runs again in a backward finds its
place: checkpointing restores the generator. Where places cannot be matched, all draws of as many rows and columns have
the same numbers, in the eager model and in the program (`shared_draws`): then order does not matter.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from paraplan.capture.cutting.flow import aten_name
from paraplan.ir.model.graph import Op, Phase, target_parts
from paraplan.ir.model.program import Program, SegmentKind
from paraplan.kernels.random_kernels import dropout, uniform
from paraplan.kernels.torch_private import OpOverload, TorchDispatchMode, in_backward

SHARED_SEED = 20
Places = dict[tuple[int, ...], deque["RandomOp"]]
Found = dict[str, Any]


class RandomOp(NamedTuple):
    """A random op of a program: its seed, which of the seed's it is, whether it makes a mask of its numbers (a
    dropout), and the rows and columns of what it draws."""

    seed: int
    slot: int
    is_mask: bool
    rows: int
    columns: int


def draws_of(program: Program) -> tuple[RandomOp, ...]:
    """The random ops of a program, in order."""
    return tuple(
        RandomOp(m * program.seeds + number, slot, is_mask, *rows_and_columns(shape))
        for m in range(program.apart)
        for segment in program.segments
        for number, slot, is_mask, shape in _slots(program.kinds[segment.kind], segment.seeds)
    )


def rows_and_columns(shape: Sequence[int]) -> tuple[int, int]:
    """Of a tensor as `random_kernels` sees it: all dims but the last, and the last."""
    return math.prod(shape[:-1]), (shape[-1] if shape else 1)


def repeated(program: Program) -> RandomOp | None:
    """A draw that has the numbers of an earlier one; None where each has its own."""
    seen: set[tuple[int, int]] = set()
    for draw in draws_of(program):
        if (draw.seed, draw.slot) in seen:
            return draw
        seen.add((draw.seed, draw.slot))
    return None


def shared_draws(program: Program) -> Program:
    """The program in which all draws of a seed have slot 0; with one number for all seeds they share numbers."""

    def shared(kind: SegmentKind) -> SegmentKind:
        if not kind.seeds:
            return kind
        ops = tuple(op if _drawn_of(kind, op) is None else _with_slot(op, 0) for op in kind.graph.ops)
        return msgspec.structs.replace(kind, graph=msgspec.structs.replace(kind.graph, ops=ops))

    return msgspec.structs.replace(program, kinds=tuple(map(shared, program.kinds)))


def _drawn_of(kind: SegmentKind, op: Op) -> int | None:
    """Which of the kind's seeds an op draws of."""
    at = next((at for at, seed in enumerate(kind.seeds) if f"%{seed}" in op.args), None)
    return at if at is not None and "slot" in _names(op) else None


def _names(op: Op) -> list[str]:
    """The names of an op's arguments."""
    target = target_parts(op.target)
    if not target.is_canonical:
        return []
    overload = getattr(torch.ops.paraplan, target.name).default
    return [argument.name for argument in overload._schema.arguments]


def _with_slot(op: Op, slot: int) -> Op:
    at = _names(op).index("slot")
    return msgspec.structs.replace(op, args=(*op.args[:at], slot, *op.args[at + 1 :]))


def _slots(kind: SegmentKind, seeds: Sequence[int]) -> list[tuple[int, int, bool, tuple[int, ...]]]:
    """Of each forward op that draws: seed, slot, whether it is a mask, global shape; those that drop everything draw
    nothing in eager."""
    found = []
    for op in kind.graph.ops:
        at = _drawn_of(kind, op)
        if op.phase is not Phase.FORWARD or at is None:
            continue
        names = _names(op)
        p = op.args[names.index("p")] if "p" in names else 0.0
        if isinstance(p, (int, float)) and p < 1:
            shape = op.args[names.index("starts") - 1]
            found.append((seeds[at], int(op.args[names.index("slot")]), "p" in names, tuple(shape)))
    return found


class Replay(TorchDispatchMode):
    """Under it, random ops of aten draw what a program's do.

    Args:
        program: whose draws.
        seeds: a step's; None for numbers that all draws of one shape share.
        by_size: whether places are told among draws of as many elements.

    Attributes:
        count: draws that were replaced.
        unmatched: why the eager model's draws are not the program's; empty where each had its place.
    """

    def __init__(self, program: Program, seeds: Sequence[int] | None, by_size: bool = False) -> None:
        super().__init__()
        self.count, self.unmatched, self._seeds, self._by_size = 0, "", seeds, by_size
        self._places: Places = {}
        self._tickets: dict[int, RandomOp] = {}
        for draw in draws_of(program):
            self._places.setdefault(self._place(draw.rows, draw.columns), deque()).append(draw)

    def _place(self, rows: int, columns: int) -> tuple[int, ...]:
        return (rows * columns,) if self._by_size else (rows, columns)

    def finish(self) -> None:
        """To be called after the forward: every draw of the program must have been made."""
        left = [draw for places in self._places.values() for draw in places]
        if left and self._seeds is not None and not self.unmatched:
            at = left[0]
            self.unmatched = f"the program draws {at.rows} x {at.columns} numbers more than the eager model"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an op; a random one gives the program's numbers."""
        make = _MAKERS.get(aten_name(func).rstrip("_"))
        if make is None:
            return func(*args, **(kwargs or {}))
        ticket = int(torch.empty((), dtype=torch.int64).random_())
        found = _arguments(func, args, kwargs or {})
        given = found["input"].clone() if "input" in found else None
        result = func(*args, **(kwargs or {}))
        out = result[0] if isinstance(result, tuple) else result
        is_mask = aten_name(func) in _MASKS and isinstance(found.get("p"), float)
        numbers = self._numbers(ticket, out, is_mask)
        if numbers is not None:
            self.count += 1
            made = make(numbers, found)
            if given is not None:  # native_dropout: the values and the mask
                result[1].copy_(made)
                made = given * made / (1.0 - found["p"])
            out.copy_(made)
        return result

    def _numbers(self, ticket: int, out: Tensor, is_mask: bool) -> Numbers | None:
        rows, columns = rows_and_columns(out.shape)
        if self._seeds is None:
            return Numbers(SHARED_SEED, 0, is_mask, out, (rows, columns))
        draw = self._tickets.get(ticket) if in_backward() else self._next(rows, columns, is_mask)
        if draw is None:
            again = "an op that runs again in the backward draws" if in_backward() else "the eager model draws"
            self.unmatched = self.unmatched or f"{again} {rows} x {columns} numbers that the program does not"
            return None
        self._tickets[ticket] = draw
        return Numbers(self._seeds[draw.seed], draw.slot, draw.is_mask and is_mask, out, (draw.rows, draw.columns))

    def _next(self, rows: int, columns: int, is_mask: bool) -> RandomOp | None:
        """The program's next draw of a shape: a mask for a mask; numbers may be one too (⌊p + rand⌋)."""
        waiting = self._places.get(self._place(rows, columns), deque())
        fitting = [draw for draw in waiting if draw.is_mask == is_mask] or ([] if is_mask else list(waiting))
        if not fitting:
            return None
        waiting.remove(fitting[0])
        return fitting[0]


class Numbers:
    """What one draw is made of.

    Args:
        seed, slot: of the program's op.
        is_mask: whether the program makes a mask of them as dropout does.
        out: what is drawn: shape, dtype and device.
        shape: rows and columns of the program's draw.
    """

    def __init__(self, seed: int, slot: int, is_mask: bool, out: Tensor, shape: tuple[int, int]) -> None:
        self._is_mask, self.out, self._shape = is_mask, out, shape
        self._at = (torch.tensor(seed, device=out.device), slot, shape, (0, 0))

    def unit(self) -> Tensor:
        """Uniform in (0, 1), as the program has them."""
        dtype = torch.float64 if self.out.dtype == torch.float64 else torch.float32
        like = torch.empty(self._shape, dtype=dtype, device=self.out.device)
        return uniform(like, *self._at).view(self.out.shape)

    def below(self, p: float | Tensor) -> Tensor:
        """1 with probability p, else 0."""
        if isinstance(p, Tensor) or not self._is_mask:
            return (self.unit() < p).to(self.out.dtype)
        if p in (0.0, 1.0):
            return torch.full_like(self.out, p)
        seed, *rest = self._at
        ones = torch.ones(self._shape, dtype=torch.float64, device=self.out.device)
        return (dropout(ones, seed, 1.0 - p, *rest) > 0).to(self.out.dtype).view(self.out.shape)


def _arguments(func: OpOverload, args: Sequence[Any], kwargs: Found) -> Found:
    schema = func._schema.arguments
    found = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return found | {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs


def _uniform(numbers: Numbers, found: Found) -> Tensor:
    low, high = float(found.get("from", 0.0)), float(found.get("to", 1.0))
    made = numbers.unit() * (high - low) + low
    if (low, high) != (0.0, 1.0) or not numbers.out.is_floating_point():
        return made
    return made.clamp(max=1.0 - torch.finfo(numbers.out.dtype).eps / 2)


def _normal(numbers: Numbers, found: Found) -> Tensor:
    mean, std = found.get("mean", 0.0), found.get("std", 1.0)
    return torch.erfinv(2.0 * numbers.unit() - 1.0) * math.sqrt(2.0) * std + mean


def _exponential(numbers: Numbers, found: Found) -> Tensor:
    return -torch.log(numbers.unit()) / float(found["lambd"])


def _bernoulli(numbers: Numbers, found: Found) -> Tensor:
    return numbers.below(found.get("p", found.get("self")))  # type: ignore[arg-type]


def _integers(numbers: Numbers, found: Found) -> Tensor:
    low, high = int(found.get("low", 0)), int(found["high"])
    return torch.floor(numbers.unit() * float(high - low)) + low


_MASKS = frozenset({"bernoulli", "bernoulli_", "native_dropout"})
_MAKERS: dict[str, Callable[[Numbers, Found], Tensor]] = {
    **dict.fromkeys(("rand", "rand_like", "uniform"), _uniform),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_functional"), _normal),
    "exponential": _exponential,
    "bernoulli": _bernoulli,
    "native_dropout": lambda numbers, found: numbers.below(1.0 - float(found["p"])),
    **dict.fromkeys(("randint", "randint_like"), _integers),
}
"""Random ops of aten, by name without the underscore of those in place, and what they make of the numbers."""
