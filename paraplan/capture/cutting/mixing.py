"""Which main nodes see several samples of the batch, and what follows from them: the tail of the program.

The whole forward is recorded once more, every op under the name of the node it comes from, and gone through along a
microbatch axis (`rules.time_axis`). Nodes that mix samples, and all that reads them, are put into segments of their
own at the end, which run once on the whole batch: a contrastive loss, a function of sums over the batch. Where they
hold most of the model (batch norm) nothing is moved.
"""

from __future__ import annotations

import math

from torch import fx

from paraplan.capture.cutting.kinds import make_whole
from paraplan.capture.cutting.segments import ForwardGraph, Piece, make_piece
from paraplan.capture.discovery.discover import attach_rules
from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.mesh import Placement, R, S
from paraplan.ir.model.program import Program
from paraplan.kernels.torch_private import FakeTensorMode
from paraplan.rules.time_axis import mixing_ops, program_micro, smallest_divisor


def tail_nodes(forward: ForwardGraph, program: Program, mode: FakeTensorMode) -> frozenset[fx.Node]:
    """The main nodes of the tail; none where no op mixes samples, or too much follows from those that do.

    Args:
        forward: the graph.
        program: as captured without a tail.
        mode: the fake mode values live in.
    """
    if not _mixes(program):
        return frozenset()
    main = [node for node in forward.graph.nodes if forward.is_main(node)]
    piece = make_piece(forward, main)
    graph = attach_rules((), (make_whole(forward, piece, mode),))[1][0].graph
    m = smallest_divisor(program.batch_size)
    given = {
        local: _place(forward.names[node], program)
        for local, node in zip(graph.inputs, (*piece.params, *piece.inputs), strict=False)
    }
    named = {str(node): node for node in piece.nodes}
    found = _after({named[graph.source_of(op)] for op in mixing_ops(graph, given, m)})
    tail = frozenset(node for node in main if node in found)
    return tail if 2 * _size(make_piece(forward, [n for n in main if n in tail])) <= _size(piece) else frozenset()


def _mixes(program: Program) -> bool:
    """Whether a segment of the program has an op that mixes samples."""
    if program.batch_size == 1:
        return False
    try:
        return program_micro(program, smallest_divisor(program.batch_size)).has_tail
    except ConstraintError:
        return True


def _place(name: str, program: Program) -> Placement:
    kind, key = name.split(":", 1)
    dim = program.batch[key].batch_dim if kind == "batch" else None
    return R if dim is None else S(dim)


def _after(nodes: set[fx.Node]) -> set[fx.Node]:
    """Nodes and all that reads them."""
    found, queue = set(nodes), list(nodes)
    while queue:
        for user in queue.pop().users:
            if user not in found:
                found.add(user)
                queue.append(user)
    return found


def _size(piece: Piece) -> int:
    """Elements of the parameters a piece reads."""
    return sum(math.prod(node.meta["val"].shape) for node in piece.params)
