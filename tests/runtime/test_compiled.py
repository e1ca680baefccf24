"""Compiled blocks are used where they equal eager, and refused, with the reason, where they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from paraplan.codegen import EmitContext, build_block
from paraplan.ir.mesh import make_mesh
from paraplan.ir.rank_program import Block
from paraplan.runtime.compiled import CheckedBlock
from paraplan.runtime.distributed import DistributedTransport

from .programs import op, own


def checked(backend: Any) -> CheckedBlock:
    values = {name: own(name, (4,)) for name in ("x", "y", "z")}
    instrs = (
        op("aten.mul.Tensor", ("%x", 2.0), ("y",), frees="x"),
        op("aten.add.Tensor", ("%y", 1.0), ("z",), frees="y"),
    )
    made = Block(name="k0.0.F", inputs=("x",), outputs=("z",), saved=(), values=values, instrs=instrs)
    transport = DistributedTransport(make_mesh((1,), ("dp",)))
    return CheckedBlock("k0.0.F", build_block(made, EmitContext(mesh_shape=(1,))), transport, backend)


def wrong(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """A compiler that adds one."""
    return lambda *args: tuple(result + 1 for result in module(*args))


def test_equal_code_is_used() -> None:
    calls: list[int] = []

    def counting(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return lambda *args: calls.append(1) or module(*args)

    block = checked(counting)
    for expected in (1, 2):
        boxed: list[Any] = [torch.ones(4, dtype=torch.float64)]
        assert block(boxed)[0].tolist() == [3.0] * 4
        assert boxed == [] and len(calls) == expected
    assert block.chosen is not block.eager


def test_a_miscompiled_block_stays_eager() -> None:
    block = checked(wrong)
    with pytest.warns(UserWarning, match=r"block k0.0.F stays eager: result 0 differs by 3.3e-01"):
        assert block([torch.ones(4, dtype=torch.float64)])[0].tolist() == [3.0] * 4
    assert block.chosen is block.eager
    assert block([torch.ones(4, dtype=torch.float64)])[0].tolist() == [3.0] * 4
