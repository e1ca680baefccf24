"""Running a block node by node, instruction by instruction, before an observer.

A `Tape` is an emitted graph prepared for this: per instruction its nodes, and the nodes nobody reads after it.
`Player.play` is a generator: it yields while a collective it must wait for is not done, so one thread can step many
ranks. It holds nothing but the environment, so that what an account says died did die.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_arg

from paraplan.ir.execution.rank_program import Block, Instr, InstrKind, Step, in_place
from paraplan.ir.machine.collectives import COLLECTIVES
from paraplan.ir.model.graph import arg_text
from paraplan.runtime.executing.instructions import COPIER, COPY_KERNELS, INSTR, LAYOUT_KERNELS, OFFSET, wait_copy
from paraplan.runtime.executing.observers import Observer
from paraplan.runtime.executing.tracker import is_kernel
from paraplan.runtime.transport.collectives import UnevenRoute
from paraplan.runtime.transport.transport import Handle, Port


@dataclass(frozen=True)
class Line:
    """One instruction.

    Attributes:
        index: in the block.
        nodes: the node that computes, then one per result of a tuple.
        outs: nodes of the results that exist.
        dead: nodes last read here.
        plain: whether all it makes are its results, which are then booked without the dispatch mode having to see
            the call: one kernel of torch's own, or a change of layout.
    """

    index: int
    nodes: tuple[fx.Node, ...]
    outs: tuple[fx.Node, ...]
    dead: tuple[fx.Node, ...]
    plain: bool


@dataclass(frozen=True)
class Tape:
    """An emitted graph, ready to be played.

    Attributes:
        block: what it was emitted from.
        inputs: placeholders of the block's inputs, then of offsets, then the copier's.
        offsets: offset texts, in order.
        copies: whether there is one.
        unread: positions of the inputs nobody reads.
        lines: per instruction.
        results: nodes returned, None where absent.
    """

    block: Block
    inputs: tuple[fx.Node, ...]
    offsets: tuple[str, ...]
    unread: tuple[int, ...]
    lines: tuple[Line, ...]
    results: tuple[fx.Node | None, ...]
    copies: bool


def make_tape(module: fx.GraphModule, block: Block) -> Tape:
    """Prepare an emitted module."""
    grouped: dict[int, list[fx.Node]] = {index: [] for index in range(len(block.instrs))}
    inputs: list[fx.Node] = []
    results: tuple[fx.Node | None, ...] = ()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            inputs.append(node)
        elif node.op == "output":
            results = node.args[0]
        else:
            grouped[node.meta[INSTR]].append(node)
    kept = set(results)
    dead: dict[int, list[fx.Node]] = {index: [] for index in grouped}
    for node in module.graph.nodes:
        if node.op != "output" and node not in kept:
            last = max((user.meta[INSTR] for user in node.users), default=node.meta.get(INSTR, -1))
            dead.setdefault(last, []).append(node)
    lines = tuple(
        Line(
            index,
            tuple(nodes),
            _results(nodes, any(out is not None for out in block.instrs[index].outs)),
            tuple(dead[index]),
            is_kernel(nodes[0].target) or nodes[0].target in LAYOUT_KERNELS | COPY_KERNELS,
        )
        for index, nodes in grouped.items()
    )
    offsets = tuple(node.meta[OFFSET] for node in inputs if OFFSET in node.meta)
    idle = set(dead.get(-1, ()))
    unread = tuple(position for position, node in enumerate(inputs) if node in idle)
    copies = any(COPIER in node.meta for node in inputs)
    return Tape(block, tuple(inputs), offsets, unread, lines, results, copies)


def _results(nodes: list[fx.Node], has_outs: bool) -> tuple[fx.Node, ...]:
    if len(nodes) > 1:
        return tuple(nodes[1:])
    return tuple(nodes) if has_outs else ()


class Player:
    """Plays a rank's blocks, on through the collectives that one issues and a later one waits for.

    Args:
        port: where collectives go.

    Attributes:
        index: of the instruction under way.
    """

    def __init__(self, port: Port) -> None:
        self.port, self.index = port, -1
        self._pending: dict[int, Handle] = {}  # left to later blocks, by the id of the result

    def play(
        self, tape: Tape, given: list[Any], step: Step, observer: Observer
    ) -> Generator[None, None, list[Tensor | None]]:
        """Run a block.

        Args:
            tape: the block.
            given: inputs, then offsets, then the copier; emptied.
            step: whose call it is.
            observer: is told of each instruction.
        Returns:
            Outputs, then saved values.
        """
        env: dict[fx.Node, Any] = dict(zip(tape.inputs, given, strict=True))
        given.clear()
        handles: dict[fx.Node, Handle] = {}
        for line in tape.lines:
            self.index = line.index
            observer.begin(step, line.index)
            head, instr = line.nodes[0], tape.block.instrs[line.index]
            if instr.kind is InstrKind.COLLECTIVE:
                handles[head] = self._issue(head, instr, tape.block, env)
                env[head] = handles[head].out
            elif instr.kind is InstrKind.WAIT and head.target is not wait_copy:
                issued: fx.Node = head.args[0]  # type: ignore[assignment]
                handle = handles.pop(issued) if issued in handles else self._pending.pop(id(env[issued]))
                while not self.port.ready(handle):
                    yield
                env[head] = handle.out
                del handle
            else:
                args, kwargs = map_arg(head.args, env.__getitem__), map_arg(head.kwargs, env.__getitem__)
                env[head] = observer.call(line.plain, head.target, args, kwargs)  # type: ignore[arg-type]
                del args, kwargs
                if len(line.nodes) > 1:
                    for node in line.nodes[1:]:
                        env[node] = env[head][node.args[1]]
                    env[head] = None
            observer.made([env[node] for node in line.outs])
            for node in line.dead:
                del env[node]
            observer.played(instr)
        self._pending.update({id(handle.out): handle for handle in handles.values()})
        return [None if node is None else env[node] for node in tape.results]

    def _issue(self, head: fx.Node, instr: Instr, block: Block, env: dict[fx.Node, Any]) -> Handle:
        reduction = instr.args[1]
        assert isinstance(reduction, str)
        uneven = COLLECTIVES[instr.target].uneven
        route = UnevenRoute(*map_arg(head.args[4:], env.__getitem__)) if uneven else None
        source = env[head.args[0]]  # type: ignore[index]
        overwrites = in_place(block, instr)
        return self.port.issue(instr.target, source, arg_text(reduction), instr.axis, overwrites, route)
