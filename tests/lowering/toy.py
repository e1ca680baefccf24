"""A program written by hand: loss = sum((x + a) + b), whose two parameters share one gradient value."""

from __future__ import annotations

import torch
from torch import Tensor

from paraplan.ir.machine.mesh import make_mesh
from paraplan.ir.model.graph import Graph, Op, Phase
from paraplan.ir.model.program import BatchInput, LossTerm, ParamSpec, Program, Segment, SegmentKind
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.param_layouts import ParamLayouts
from paraplan.planner.assemble import Decisions, Job, assemble


def f64(*shape: int) -> TensorSpec:
    return TensorSpec("float64", shape)


def back(target: str, args: tuple[object, ...], out: str) -> Op:
    return Op(target=target, args=args, outs=(out,), phase=Phase.BACKWARD)


def toy_graph() -> Graph:
    return Graph(
        inputs=("a", "b", "x", "t"),
        outputs=("loss", "g"),
        sources=("toy.py:1, in forward: x + a + b",),
        values={
            "a": f64(4),
            "b": f64(4),
            "x": f64(8, 4),
            "h": f64(8, 4),
            "y": f64(8, 4),
            "loss": f64(),
            "t": f64(),
            "dy": f64(8, 4),
            "g": f64(4),
        },
        ops=(
            Op(target="aten.add.Tensor", args=("%x", "%a"), outs=("h",), source=0),
            Op(target="aten.add.Tensor", args=("%h", "%b"), outs=("y",), source=0),
            Op(target="aten.sum.default", args=("%y",), outs=("loss",), source=0),
            back("aten.expand.default", ("%t", (8, 4)), "dy"),
            back("aten.sum.dim_IntList", ("%dy", (0,)), "g"),
        ),
    )


def toy_program() -> Program:
    kind = SegmentKind(
        name="k0",
        graph=toy_graph(),
        params=("a", "b"),
        inputs=("x",),
        outputs=("loss",),
        tangents=("t",),
        input_grads=(None,),
        param_grads=("g", "g"),
    )
    return Program(
        name="toy",
        fingerprint="toy",
        precision="fp64",
        batch_size=8,
        batch={"x": BatchInput(spec=f64(8, 4))},
        params={"a": ParamSpec(spec=f64(4)), "b": ParamSpec(spec=f64(4))},
        buffers={},
        kinds=(kind,),
        segments=(Segment(kind=0, params=("a", "b"), inputs=("batch:x",), outputs=("s0.0",)),),
        loss=(LossTerm(numerator="s0.0"),),
    )


def toy_values() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    a, b, x = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4,), (4,), (8, 4)))
    return {"a": a, "b": b}, {"x": x}


def toy_decisions(num_microbatches: int = 1, grad: str = "P") -> Decisions:
    """Data parallel on two ranks."""
    return Decisions(
        mesh=make_mesh((2,), ("dp",)),
        num_microbatches=num_microbatches,
        ops=(("a", "a", "a", "a", "a"),),
        input_grads=((None,),),
        params=(ParamLayouts(stored="R", grad=grad, state="R"), ParamLayouts(stored="R", grad=grad, state="S0")),
        batch={"x": "S0"},
    )


def toy_plan(job: Job, num_microbatches: int = 1, grad: str = "P"):  # type: ignore[no-untyped-def]
    return assemble(job, toy_decisions(num_microbatches, grad))
