"""A hand-written program that goes through every collective, and a plan small enough to write down."""

from __future__ import annotations

from paraplan.ir.execution.name import Role
from paraplan.ir.execution.rank_program import (
    Block,
    BlockRole,
    Instr,
    InstrKind,
    LocalValue,
    OuterValue,
    RankProgram,
    Step,
    StepKind,
)
from paraplan.ir.machine.mesh import Mesh, make_mesh
from paraplan.ir.model.graph import Arg
from paraplan.ir.model.strides import contiguous_strides
from paraplan.ir.model.tensor import DTYPE_BYTES
from tests.named import all_named, named, some_named

Dims = tuple[int, ...]


def own(name: str, shape: Dims, dtype: str = "float64") -> LocalValue:
    """A contiguous value with its own storage."""
    nbytes = DTYPE_BYTES[dtype]
    for size in shape:
        nbytes *= size
    return LocalValue(dtype=dtype, shape=shape, strides=contiguous_strides(shape), base=name, storage_bytes=nbytes)


def view(base: str, shape: Dims, dtype: str = "float64") -> LocalValue:
    """A contiguous view of another value."""
    return LocalValue(dtype=dtype, shape=shape, strides=contiguous_strides(shape), base=base, storage_bytes=0)


def op(
    target: str, args: tuple[Arg, ...], outs: tuple[str | None, ...], frees: str = "", workspace_bytes: int = 0
) -> Instr:
    """An op; freed names separated by blanks."""
    return Instr(target=target, args=args, outs=outs, frees=tuple(frees.split()), workspace_bytes=workspace_bytes)


def issue(target: str, source: str, out: str, axis: int = 0, reduction: str = "", frees: str = "") -> Instr:
    """A collective."""
    return Instr(
        kind=InstrKind.COLLECTIVE,
        target=target,
        args=(f"%{source}", f":{reduction}"),
        outs=(out,),
        axis=axis,
        frees=tuple(frees.split()),
    )


def wait(issued: str, out: str, held: str = "", axis: int = 0, frees: str = "") -> Instr:
    """A wait that holds the collective's input."""
    args = (f"%{issued}", f"%{held}") if held else (f"%{issued}",)
    return Instr(kind=InstrKind.WAIT, target="wait", args=args, outs=(out,), axis=axis, frees=tuple(frees.split()))


def collectives_block() -> Block:
    """x: [4, 3] -> r (sum), m (max), g (gathered rows), s (scattered sum), t (transposed blocks), n (the previous
    rank's t); offsets too."""
    values = {"x": own("x", (4, 3)), "idle": own("idle", (5,)), "y": own("y", (4, 3))}
    for name, shape in (("r", (4, 3)), ("m", (4, 3)), ("g", (8, 3)), ("s", (2, 3)), ("t", (4, 3)), ("n", (4, 3))):
        values |= {name + "!": own(name + "!", shape), name: view(name + "!", shape)}
    values |= {
        "part": own("part", (2, 3)),
        "z": own("z", (2, 3)),
        "top": own("top", (4,)),
        "at": own("at", (4,), "int64"),
    }
    instrs = (
        issue("all_reduce", "x", "r!", reduction="sum"),
        issue("all_reduce", "x", "m!", reduction="max"),
        issue("all_gather", "x", "g!"),
        issue("reduce_scatter", "x", "s!", reduction="sum"),
        op("aten.mul.Tensor", ("%x", 2.0), ("y",)),
        issue("all_to_all", "y", "t!"),
        wait("r!", "r", frees="r!"),
        wait("m!", "m", frees="m!"),
        op("aten.max.dim", ("%m", 1), (None, "at"), frees="m", workspace_bytes=32),
        wait("g!", "g", held="x", frees="g!"),
        wait("s!", "s", held="x", frees="s! x"),
        wait("t!", "t", held="y", frees="t! y"),
        issue("permute", "t", "n!"),
        wait("n!", "n", held="t", frees="n!"),
        op("paraplan.shard", ("%r", 0, 2, "#0:2"), ("part",)),
        op("aten.add.Tensor", ("%part", "%s"), ("z",), frees="part s"),
    )
    values.pop("top")
    return Block(
        name="k0.0.F",
        role=BlockRole.FORWARD,
        inputs=("x", "idle"),
        outputs=("r", "g", None, "z", "t", "n"),
        saved=("at",),
        values=values,
        instrs=instrs,
    )


def collectives_program() -> RankProgram:
    """Two microbatches of `collectives_block`, accumulating its sum; on a mesh of two."""
    steps = []
    for m in range(2):
        given, outs = all_named(f"x@{m} idle@{m}"), some_named(f"r@{m} g@{m} - z@{m} t@{m} n@{m} at@{m}")
        steps += [
            Step(
                kind=StepKind.CALL,
                action=f"0F{m}",
                block="k0.0.F",
                args=given,
                outs=outs,
                drops=given,
                microbatch=m,
                segment=0,
            ),
            Step(kind=StepKind.ACCUMULATE, action=f"0F{m}", args=all_named(f"total r@{m}"), microbatch=m, segment=0),
            Step(kind=StepKind.DROP, action=f"0F{m}", drops=all_named(f"g@{m} at@{m}"), microbatch=m, segment=0),
        ]
    outer = {}
    for m in range(2):
        outer[named(f"x@{m}")] = OuterValue(
            role=Role.BATCH, source="x", dtype="float64", shape=(4, 3), layout="S0", nbytes=96
        )
        outer[named(f"idle@{m}")] = OuterValue(
            role=Role.BATCH, source="idle", dtype="float64", shape=(5,), layout="R", nbytes=40
        )
    return RankProgram(
        mesh_axes=("dp",),
        mesh_shape=(2,),
        num_microbatches=2,
        blocks={"k0.0.F": collectives_block()},
        outer=outer,
        steps=tuple(steps),
        loss=named("total"),
        grads={},
        optimizer_bytes=0,
        update_workspace_bytes=0,
    )


def pair() -> Mesh:
    """A mesh of two ranks."""
    return make_mesh((2,), ("dp",))
