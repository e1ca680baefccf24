"""Small blocks by hand."""

from __future__ import annotations

from paraplan.ir.execution.rank_program import Block, BlockRole, Instr, InstrKind, LocalValue
from paraplan.ir.model.graph import Arg


def vector(name: str, base: str = "") -> LocalValue:
    """Four doubles; a view where a base is named."""
    return LocalValue(dtype="float64", shape=(4,), strides=(1,), base=base or name, storage_bytes=0 if base else 32)


def op(target: str, args: tuple[Arg, ...], out: str, frees: str = "", **kwargs: Arg) -> Instr:
    """An op with one result; freed names separated by blanks."""
    return Instr(target=target, args=args, kwargs=kwargs, outs=(out,), frees=tuple(frees.split()))


def issue(source: str, out: str, frees: str = "") -> Instr:
    """An all-gather over axis 0."""
    return Instr(
        kind=InstrKind.COLLECTIVE,
        target="all_gather",
        args=(f"%{source}", ":"),
        outs=(out,),
        axis=0,
        frees=tuple(frees.split()),
    )


def wait(issued: str, held: str, out: str, frees: str = "") -> Instr:
    """Its wait, holding the input."""
    return Instr(
        kind=InstrKind.WAIT,
        target="wait",
        args=(f"%{issued}", f"%{held}"),
        outs=(out,),
        axis=0,
        frees=tuple(frees.split()),
    )


def block(inputs: str, outputs: str, names: str, *instrs: Instr, views: dict[str, str] | None = None) -> Block:
    """A block of vectors."""
    values = {name: vector(name) for name in (*inputs.split(), *names.split())}
    values |= {name: vector(name, base) for name, base in (views or {}).items()}
    return Block(
        name="b.0.F",
        role=BlockRole.FORWARD,
        inputs=tuple(inputs.split()),
        outputs=tuple(outputs.split()),
        saved=(),
        values=values,
        instrs=instrs,
    )
