"""What instructions allocate and drop inside at the sizes of whole models, beside what their programs say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.parity import ADAMW, called, watched
from benchmarks.gpu.place import Place
from benchmarks.gpu.training import Make, full_sizes
from benchmarks.table import Case, Row
from paraplan.capture import capture
from paraplan.ir.execution.rank_program import Instr, LocalValue
from paraplan.jobs.measuring.local_ops import whole_plan
from paraplan.lowering import lower
from paraplan.runtime.in_process import InProcessTrainer

TOLD = 6


class Inside:
    """An instruction's kernel, whose bytes inside are noted beside those its program says."""

    def __init__(
        self,
        instr: Instr,
        values: Mapping[str, LocalValue],
        call: Callable[..., Any],
        found: dict[tuple[str, int], int],
    ) -> None:
        self.instr, self.call, self.found = instr, call, found
        self.shapes = ", ".join(str(values[name].shape) for name in instr.outs if name is not None)
        self.__name__ = "inside"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made, inside = called(self.call, args, kwargs)
        key = f"{self.instr.target} as {self.instr.kernel or 'reference'} {self.shapes}", self.instr.workspace_bytes
        self.found[key] = max(self.found.get(key, 0), inside)
        return made


def insides(place: Place, make: Make) -> Row:
    """The largest differences of a model's step, in MB; those of more than said are what a peak may lack."""
    torch.manual_seed(0)
    model, batch = make()
    program = capture(model.train(), batch, precision="bf16")
    plan = whole_plan(program, place.cluster(), ADAMW)
    programs = lower(plan)
    found: dict[tuple[str, int], int] = {}
    with place.alone():
        modules = [watched(each, place.device, partial(Inside, found=found)) for each in programs]
        trainer = InProcessTrainer(plan, programs, modules, model, device=place.device)
        trainer.record = False
        trainer.step(batch)
    off = sorted(((inside - said, name, said) for (name, said), inside in found.items()), key=lambda each: -each[0])
    told = [f"{name}: {more / 1e6:+.1f} MB of {said / 1e6:.1f}" for more, name, said in (*off[:TOLD], *off[-2:])]
    return {"note": "; ".join(told), "points": off, "failures": []}


def cases(place: Place) -> dict[str, dict[str, Case]]:
    """By part."""
    return {"inside": {name: partial(insides, place, make) for name, make in full_sizes(place).items()}}
