"""The rewriting of a block's graph, as an ordered list of small passes `(module, context) -> module`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from paraplan.codegen.boxed import box
from paraplan.ir.errors import CodegenError
from paraplan.ir.execution.rank_program import Block, InstrKind, in_place
from paraplan.ir.struct import Value
from paraplan.runtime.executing import instructions, targets
from paraplan.runtime.executing.instructions import INSTR
from paraplan.runtime.transport.collectives import IMPLEMENTATIONS


class EmitContext(Value, frozen=True, kw_only=True):
    """What binds a block to where it runs.

    Attributes:
        mesh_shape: of the stage.
        groups: process group name per mesh axis ("" where the axis has one rank); None leaves collectives
            unbound, for an interpreter that hands them to a transport.
        device: where factories make their tensors.
    """

    mesh_shape: tuple[int, ...]
    groups: tuple[str, ...] | None = None
    device: str = "cpu"


Pass = Callable[[fx.GraphModule, Block, EmitContext], fx.GraphModule]


def place_factories(module: fx.GraphModule, block: Block, context: EmitContext) -> fx.GraphModule:
    """Tensors made from numbers alone are made on the context's device.

    Args:
        module: of a block, changed in place.
        block: that it was emitted from.
        context: the device.
    """
    for node in module.graph.nodes:
        index = node.meta.get(INSTR)
        if index is None or context.device == "cpu":
            continue
        target = block.instrs[index].target
        if block.instrs[index].kind is InstrKind.OP and targets.is_factory(target):
            node.kwargs = {
                **node.kwargs,
                "device": context.device if target == "paraplan.constant" else torch.device(context.device),
            }
    return module


def bind_collectives(module: fx.GraphModule, block: Block, context: EmitContext) -> fx.GraphModule:
    """Unbound collectives become starts on the axis' process group; copies where it has one rank.

    Args:
        module: of a block, changed in place.
        block: that it was emitted from.
        context: process groups by mesh axis.
    """
    if context.groups is None:
        return module
    for node in module.graph.nodes:
        if node.target is instructions.collective:
            source, _, reduction, axis, *more = node.args
            size = context.mesh_shape[axis]
            overwrites = in_place(block, block.instrs[node.meta[INSTR]])
            if size == 1:
                node.target, node.args = instructions.same if overwrites else instructions.copy_alone, (source,)
            else:
                node.target = _start(block, node.meta[INSTR], overwrites)
                node.args = (source, reduction, size, context.groups[axis], *more)
        elif node.target is instructions.wait:
            if context.mesh_shape[block.instrs[node.meta[INSTR]].axis] == 1:
                node.target = instructions.same
            elif len(node.args) == 1:
                node.target = torch.ops._c10d_functional.wait_tensor.default
            else:
                node.target = instructions.wait_holding
    return module


def _start(block: Block, index: int, overwrites: bool) -> Callable[..., Tensor]:
    """What starts an instruction's collective over a process group."""
    found = IMPLEMENTATIONS.get(block.instrs[index].target)
    start = None if found is None else found.start_in_place if overwrites else found.start
    if start is None:
        how = "in place " if overwrites else ""
        raise CodegenError(f"{block.name}[{index}]: no collective {how}is called {block.instrs[index].target!r}")
    return start


def box_inputs(module: fx.GraphModule, block: Block, context: EmitContext) -> fx.GraphModule:
    """The boxed calling convention.

    Args:
        module: of a block, changed in place.
        block, context: as every pass takes them; not read.
    """
    box(module.graph)
    module.recompile()
    return module


PASSES: tuple[Pass, ...] = (place_factories, bind_collectives, box_inputs)
