"""Loops over time: dims that every op of a step leaves apart may be sharded (`rules.loop_dims`), time is whole."""

from __future__ import annotations

from paraplan.ir.model.graph import Arg, Op
from paraplan.ir.model.scan import SCAN, scan_of, scan_text
from paraplan.rules.dims import WHOLE, DimNames, LocalContext, OpDims, Specs, register
from paraplan.rules.loop_dims import local_scan, loop_dims
from paraplan.rules.workspace import loop_workspace


def _localised(args: tuple[Arg, ...], ctx: LocalContext) -> tuple[Arg, ...]:
    return (*args[:3], ":" + scan_text(local_scan(str(args[3]), ctx.local_inputs)))


@register(SCAN, localise=_localised, workspace=loop_workspace.scan)
def scan(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`_ a b, a b, c -> a b, _ a b, c`: per-step inputs, carries, constants; ends, results and histories, sums."""
    loop, found = scan_of(op.args), loop_dims(str(op.args[3]))
    names = found.names
    stacked = [*loop.result_names, *(loop.carry_names[index] for index in loop.histories)]
    given: list[DimNames] = [(WHOLE, *names[name]) for name in loop.input_names]
    given += [names[name] for name in (*loop.carry_names, *loop.constant_names)]
    made: list[DimNames] = [names[name] for name in loop.next_names]
    made += [(WHOLE, *names[name]) for name in stacked]
    made += [names[name] for name in loop.addend_names]
    there = {name for each in given for name in each}
    ends = (*loop.result_names, *loop.addend_names)
    return OpDims(
        inputs=tuple(given),
        outputs=tuple(
            None if spec is None else tuple(name if name in there else WHOLE for name in each)
            for spec, each in zip(outputs, made, strict=True)
        ),
        sizes={name: size for name, size in found.sizes.items() if name in there},
        contracted={name: "sum" for name in there if name != WHOLE and not found.partial[name].isdisjoint(ends)},
    )
