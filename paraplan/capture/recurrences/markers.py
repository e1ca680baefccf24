"""Ops that mark a loop over time in an exported graph, between which one step stands for all.

    carries = loop_begin(carried values, loop)      x_t = loop_step(x, dim, loop)      ... one step ...
    ends, stacked results = loop_end(next carries, results, steps, loop)

They have shapes only: `roll.roll_loops` turns what they enclose into `paraplan.scan` before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from paraplan.capture.canonical.canonical import define
from paraplan.ir.errors import CaptureError

MIN_STEPS = 8
"""A loop of fewer steps is written out: its steps are pieces that can be cut apart."""


class NotALoop(CaptureError):
    """What was taken for a loop is none.

    Attributes:
        where: the loop's place in the user's code; "" for torch's recurrent layers.
        why: it is none.
        made: where and why of those made since this was emptied: forward may catch one, and the export it was made in
            is none all the same.
    """

    made: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where or 'a recurrent layer'}: {why}")
        self.where, self.why = where, why
        self.made.append((where, why))


def _never(*args: object) -> list[Tensor]:
    raise AssertionError("a marked loop was run")


def _alike(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _begin(carries: Sequence[Tensor], loop: int, run: int) -> list[Tensor]:
    return [*map(_alike, carries)]


def _step(x: Tensor, dim: int, loop: int, run: int) -> Tensor:
    return x.new_empty((*x.shape[:dim], *x.shape[dim + 1 :]))


def _end(
    outs: Sequence[Tensor], again: Sequence[Tensor], carries: int, steps: int, reverse: bool, loop: int, where: str
) -> list[Tensor]:
    return [*map(_alike, outs[:carries]), *(x.new_empty((steps, *x.shape)) for x in outs[carries:])]


define("loop_begin(Tensor[] carries, int loop, int run) -> Tensor[]", _never, _begin)
define("loop_step(Tensor x, int dim, int loop, int run) -> Tensor", _never, _step)
define(
    "loop_end(Tensor[] outs, Tensor[] again, int carries, int steps, bool reverse, int loop, str where) -> Tensor[]",
    _never,
    _end,
)

BEGIN = torch.ops.paraplan.loop_begin.default
STEP = torch.ops.paraplan.loop_step.default
END = torch.ops.paraplan.loop_end.default
