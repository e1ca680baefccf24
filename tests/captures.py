"""Programs that tests share: of models of the zoo, captured once a session, whichever process of it asks first, and
of a file's own model, planned in many ways.

Programs are frozen, so tests share them; models are not (`build` makes equal ones). What is tested of capture itself
is captured anew.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from benchmarks.zoo import build
from paraplan import api
from paraplan.baselines.planners import choosing
from paraplan.capture import capture
from paraplan.ir.errors import CaptureError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.ir.struct import from_json, to_json
from paraplan.planner.assemble import Job

FOLDER = "PARAPLAN_TEST_CAPTURES"
"""Environment variable: the folder of one session's programs; without it each process captures its own."""


@cache
def program_of(name: str, dropout: float, precision: str = "fp64") -> Program:
    """The program of `build(name, dropout)`: of floats in float64, or of the model and batch in float32 where the
    precision is another."""
    file = _file(f"{name} {dropout} {precision}.json")
    if file is not None and file.exists():
        return from_json(file.read_bytes(), Program, file.name, CaptureError)
    small = build(name, dropout)
    double = precision == "fp64"
    batch = {key: x.float() if x.is_floating_point() and not double else x for key, x in small.batch.items()}
    model = small.model if double else small.model.float()
    found = capture(model, batch, loss_fn=small.loss_fn, precision=precision, batch_dims=small.batch_dims)
    if file is not None:
        made = file.with_suffix(f".{os.getpid()}")
        made.write_bytes(to_json(found))
        assert from_json(made.read_bytes(), Program, file.name, CaptureError) == found
        made.rename(file)
    return found


def _file(name: str) -> Path | None:
    folder = os.environ.get(FOLDER)
    return None if folder is None else Path(folder) / name


_CAPTURED: dict[object, Any] = {}


def compiled(model: nn.Module, cluster: str, certify: bool = False, alike: bool = True, **options: Any) -> api.Plan:
    """`paraplan.compile`: what differs in the plans of a model alone is captured once.

    Args:
        model, cluster, options: as of `compile`.
        certify: whether a bound of the step is looked for.
        alike: whether all models of its class are equal; else it is itself given again and again.
    """
    captured = api._captured

    def known(given: nn.Module, asked: Any, apart: int) -> Any:
        inputs = {name: (x.shape, x.dtype) for name, x in asked.example_inputs.items()}
        asks = (asked.precision, asked.loss, asked.batch_dims, asked.dynamic, apart)
        key = (type(given) if alike else given, given.training, str(inputs), asked.loss_fn, *map(repr, asks))
        if key not in _CAPTURED:
            _CAPTURED[key] = captured(given, asked, apart)
        return _CAPTURED[key]

    room = choosing.search_room
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(api, "_captured", known)
        patched.setattr(choosing, "search_room", lambda *asked: room(*asked[:4], certify, *asked[5:]))
        return api.compile(model, cluster, **options)


def zoo_job(name: str, devices: int) -> Job:
    """A model of the zoo in float32, without dropout, on local processes."""
    program = program_of(name, 0.0, "fp32")
    return Job(program, ClusterSpec.local(devices), OPTIMIZERS["adamw"], ModelRef(display="tiny"), {})
