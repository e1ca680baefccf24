"""A block as an fx graph: one node per instruction, collectives still unbound.

Placeholders are the block's inputs, then one integer per distinct offset text ("#0:256,m:1024"), whose value
depends on rank and microbatch, then the rank's copier where the block copies to or from a tier; results are the outputs
followed by the saved values (None where absent).
Instructions with several results get one `getitem` node per result that exists.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from paraplan.ir.errors import CodegenError
from paraplan.ir.execution.offsets import parse_offset
from paraplan.ir.execution.rank_program import Block, Instr, InstrKind
from paraplan.ir.model.graph import Arg, ArgKind, arg_kind, arg_text
from paraplan.kernels.torch_private import lazy_module
from paraplan.runtime.executing import instructions, targets
from paraplan.runtime.executing.instructions import COPIER, INSTR, LOCAL, OFFSET


def emit_block(block: Block) -> fx.GraphModule:
    """The block's graph.

    node.meta: "instr" is the index of the instruction a node belongs to, "local" the block's name for its
    value, "offset" the text of an offset placeholder; "copier" marks the copier.

    Raises:
        CodegenError: an argument names nothing, or an op does not exist.
    """
    graph = fx.Graph()
    env: dict[str, fx.Node] = {}
    for name in block.inputs:
        env[name] = _placeholder(graph, name, LOCAL)
    for text in offset_texts(block):
        env[text] = _placeholder(graph, text, OFFSET)
    if any(map(_copies, block.instrs)):
        env[COPIER] = _placeholder(graph, COPIER, COPIER)
    for index, instr in enumerate(block.instrs):
        try:
            _emit_instr(graph, env, instr, index)
        except KeyError as missing:
            raise CodegenError(f"{block.name}[{index}] {instr.target}: reads {missing}, which nothing made") from None
    results = (*block.outputs, *block.saved)
    graph.output(tuple(None if name is None else env[name] for name in results))
    return lazy_module(graph, _identifier(block.name))


def _copies(instr: Instr) -> bool:
    """Whether it begins a copy or waits for one."""
    return instr.kind is InstrKind.COPY or (instr.kind is InstrKind.WAIT and instr.axis < 0)


def offset_texts(block: Block) -> tuple[str, ...]:
    """Distinct offsets of a block that are not always 0, in order of appearance."""
    found: dict[str, None] = {}
    for instr in block.instrs:
        for text in _offsets((instr.args, tuple(instr.kwargs.values()))):
            found[text] = None
    return tuple(found)


def _offsets(arg: Arg) -> Iterator[str]:
    if isinstance(arg, (tuple, list)):
        for item in arg:
            yield from _offsets(item)
    elif arg_kind(arg) is ArgKind.OFFSET and parse_offset(arg):
        yield arg


def _placeholder(graph: fx.Graph, name: str, role: str) -> fx.Node:
    node = graph.create_node("placeholder", _identifier(name), name=_identifier(name))
    node.target = node.name
    node.meta[role] = name
    return node


def _identifier(name: str) -> str:
    text = "".join(c if c.isalnum() and c.isascii() else "_" for c in name)
    return text if text[:1].isalpha() else f"v{text}"


def _decode(arg: Arg, env: dict[str, fx.Node]) -> object:
    if isinstance(arg, (tuple, list)):
        return tuple(_decode(item, env) for item in arg)
    kind = arg_kind(arg)
    if kind is ArgKind.VALUE:
        return env[arg_text(arg)]
    if kind is ArgKind.OFFSET:
        return env[arg] if parse_offset(arg) else 0
    return targets.decode_literal(arg)


def _emit_instr(graph: fx.Graph, env: dict[str, fx.Node], instr: Instr, index: int) -> None:
    args = tuple(_decode(arg, env) for arg in instr.args)
    kwargs = {key: _decode(arg, env) for key, arg in instr.kwargs.items()}
    many = False
    function: Callable[..., Any]
    if instr.kind is InstrKind.COLLECTIVE:
        function, args = instructions.collective, (args[0], instr.target, args[1], instr.axis, *args[2:])
    elif _copies(instr):
        function = instructions.COPIES[instr.target] if instr.kind is InstrKind.COPY else instructions.wait_copy
        args = (*args, env[COPIER])
    elif instr.kind is InstrKind.WAIT:
        function = instructions.wait
    else:
        function, many = (
            targets.resolve(instr.target, instr.kernel),
            targets.returns_many(instr.target, len(instr.outs)),
        )
    name = _identifier(
        f"{instr.outs[0]}_all" if many else (instr.outs[0] if instr.outs and instr.outs[0] else f"effect{index}")
    )
    node = graph.create_node("call_function", function, args, kwargs, name=name)  # type: ignore[arg-type]
    node.meta[INSTR] = index
    if not many:
        if instr.outs and instr.outs[0] is not None:
            _define(env, instr.outs[0], node)
        return
    for position, out in enumerate(instr.outs):
        if out is not None:
            item = graph.create_node("call_function", operator.getitem, (node, position), name=_identifier(out))
            item.meta[INSTR] = index
            _define(env, out, item)


def _define(env: dict[str, fx.Node], name: str, node: fx.Node) -> None:
    if name in env:
        raise CodegenError(f"value {name} is made twice")
    env[name] = node
    node.meta[LOCAL] = name
