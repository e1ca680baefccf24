"""Running a block node by node, instruction by instruction, with an account of its memory.

A `Tape` is an emitted graph prepared for this: per instruction its nodes, and the nodes nobody reads after it.
`play` is a generator: it yields while a collective it must wait for is not done, so one thread can step many
ranks. It holds nothing but the environment, so that what the account says died did die.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_arg

from paraplan.ir.collectives import COLLECTIVES
from paraplan.ir.rank_program import Block, InstrKind, in_place
from paraplan.runtime.collectives import Route
from paraplan.runtime.ops import COPIER, COPY_KERNELS, INSTR, LAYOUT_KERNELS, OFFSET, wait_copy
from paraplan.runtime.torch_private import untracked
from paraplan.runtime.tracker import Ledger, Tiers, changes, is_kernel
from paraplan.runtime.transport import Handle, Port


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


Note = Callable[[int, tuple[tuple[int, ...], ...], int, int, int, Tiers], None]


def play(
    tape: Tape, given: list[Any], port: Port, ledger: Ledger, note: Note | None, pending: dict[int, Handle],
    progress: list[int], timed: Callable[[int, float], None] | None = None,
) -> Generator[None, None, list[Tensor | None]]:  # fmt: skip
    """Run a block.

    Args:
        tape: the block.
        given: inputs, then offsets, then the copier; emptied.
        port: where collectives go.
        ledger: where memory is booked.
        note: called after each instruction with its index, result shapes, bytes allocated, bytes freed, bytes made and
            dropped inside (workspace), and what it did to tiers; None where nobody asks.
        pending: collectives that earlier blocks issued and left to later ones, by the id of their result; brought up
            to date.
        progress: its item is set to the index of the instruction under way.
        timed: called with an instruction's index and the seconds of this thread's processor time that it took.
    Returns:
        Outputs, then saved values.
    """
    env: dict[fx.Node, Any] = dict(zip(tape.inputs, given, strict=True))
    given.clear()
    handles: dict[fx.Node, Handle] = {}
    for line in tape.lines:
        progress[0] = line.index
        head = line.nodes[0]
        before, tiers = ledger.open_window(), ledger.levels()
        kind = tape.block.instrs[line.index].kind
        if kind is InstrKind.COLLECTIVE:
            _issue(head, line.index, tape, env, handles, port)
        elif kind is InstrKind.WAIT and head.target is not wait_copy:
            issued: fx.Node = head.args[0]  # type: ignore[assignment]
            handle = handles.pop(issued) if issued in handles else pending.pop(id(env[issued]))
            while not port.ready(handle):
                yield
            env[head] = handle.out
            del handle
        else:
            with untracked() if line.plain and note is not None else nullcontext():
                _call(line, env, timed)
            if line.plain and note is not None:
                ledger.register_all(env[head])
            if len(line.nodes) > 1:
                env[head] = None
        if note is None:
            for node in line.dead:
                del env[node]
            continue
        shapes = tuple(tuple(env[node].shape) for node in line.outs)
        middle, there = ledger.live_bytes, ledger.levels()
        workspace = max(0, ledger.window_bytes - max(middle, before))
        for node in line.dead:
            del env[node]
        changed = changes(tiers, there, ledger.levels())
        note(line.index, shapes, middle - before, middle - ledger.live_bytes, workspace, changed)
    pending.update({id(handle.out): handle for handle in handles.values()})
    return [None if node is None else env[node] for node in tape.results]


def _call(line: Line, env: dict[fx.Node, Any], timed: Callable[[int, float], None] | None) -> None:
    """Call an instruction's nodes; the time is of the first, the kernel."""
    for node in line.nodes:
        args, kwargs = map_arg(node.args, env.__getitem__), map_arg(node.kwargs, env.__getitem__)
        started = 0.0 if timed is None else time.thread_time()
        env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        if timed is not None and node is line.nodes[0]:
            timed(line.index, time.thread_time() - started)
        del args, kwargs


def _issue(
    head: fx.Node, index: int, tape: Tape, env: dict[fx.Node, Any], handles: dict[fx.Node, Handle], port: Port
) -> None:
    instr = tape.block.instrs[index]
    source = head.args[0]
    reduction = instr.args[1]
    assert isinstance(reduction, str)
    overwrites = in_place(tape.block, instr)
    uneven = COLLECTIVES[instr.target].uneven
    route = Route(*map_arg(head.args[4:], env.__getitem__)) if uneven else None
    handle = port.issue(instr.target, env[source], reduction.removeprefix(":"), instr.axis, overwrites, route)  # type: ignore[index]
    handles[head] = handle
    env[head] = handle.out
