"""Marked loops become one op each (`paraplan.scan`).

What depends on a loop's marks is its step; what a step reads from outside is a constant of the loop, made once. Where
a step was recorded twice, the second time from the carries of the first, both must be the same ops on the same
values: a step that keeps something elsewhere than in what it carries, or that counts, shows there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, fx

from paraplan.capture.canonical import autograd
from paraplan.capture.canonical.scan import scan
from paraplan.capture.recurrences.markers import BEGIN, END, STEP, NotALoop
from paraplan.capture.recurrences.steps import trace_step
from paraplan.capture.rewriting.rewrite import Rewriter, remove_dead

aten = torch.ops.aten


class _Loop(NamedTuple):
    """A marked loop.

    Attributes:
        end: its last mark.
        inside: the nodes that depend on its marks, in order.
        marks: its per-step inputs and carries, of every run.
    """

    end: fx.Node
    inside: dict[fx.Node, None]
    marks: frozenset[fx.Node]

    @property
    def where(self) -> str:
        return str(self.end.args[6])

    def cone(self, outs: Sequence[fx.Node]) -> list[fx.Node]:
        """The step's nodes that some of its outputs need, in order."""
        needed = set(outs)
        for node in reversed(self.inside):
            if node in needed and node not in self.marks:
                needed.update(node.all_input_nodes)
        return [node for node in self.inside if node in needed and node not in self.marks]


def roll_loops(graph: fx.Graph, rewriter: Rewriter) -> None:
    """Replaces every marked loop of a forward graph.

    Raises:
        NotALoop: a step draws random numbers, is not the same every time, or is read from outside of the loop.
        CaptureError: the gradient of a step cannot be traced.
    """
    for end in [node for node in graph.nodes if node.target is END]:
        loop = _found(graph, end)
        _roll(loop, rewriter)
        remove_dead(graph)
        if any(node.target in (BEGIN, STEP) and _id(node) == end.args[5] for node in graph.nodes):
            raise NotALoop(loop.where, "a value of one step is read outside of the loop")
    if any(node.target in (BEGIN, STEP) for node in graph.nodes):
        raise NotALoop("", "a value of one step is read outside of a loop")


def _id(node: fx.Node) -> object:
    return node.args[1] if node.target is BEGIN else node.args[2]


def _found(graph: fx.Graph, end: fx.Node) -> _Loop:
    inside: dict[fx.Node, None] = {}
    marks, begins = set(), set()
    for node in graph.nodes:
        if node is end:
            continue
        marked = node.target in (BEGIN, STEP) and _id(node) == end.args[5]
        if marked and node.target is BEGIN:
            begins.add(node)
            inside[node] = None
        elif marked or (node.target is operator.getitem and node.args[0] in begins):
            marks.add(node)
            inside[node] = None
        elif any(source in inside for source in node.all_input_nodes):
            inside[node] = None
    return _Loop(end, inside, frozenset(marks))


def _roll(loop: _Loop, rewriter: Rewriter) -> None:
    outs: Sequence[fx.Node] = loop.end.args[0]  # type: ignore[assignment]
    again: Sequence[fx.Node] = loop.end.args[1]  # type: ignore[assignment]
    carries, steps, reverse = (loop.end.args[index] for index in (2, 3, 4))
    assert isinstance(carries, int) and isinstance(steps, int)
    nodes = loop.cone(outs)
    if again:
        _compare(loop, outs, again)
    _check_effects(loop)
    read = _read(nodes, outs)
    run = _first_run(loop)
    inputs = [node for node in loop.inside if node.target is STEP and node in read]
    given = [_carry(loop, run, index) for index in range(carries)]
    given = [node for node in given if node is not None]
    if len(given) < carries or any(_run(node) != run for node in (*inputs, *(g for g in given))):
        raise NotALoop(loop.where, "a step reads what another one made")
    constants = [node for node in read if node not in loop.inside]
    _check_alike(loop, given, outs[:carries])
    step = trace_step(nodes, (inputs, given, constants), outs, (steps, bool(reverse)), rewriter.mode)
    text = msgspec.json.encode(step).decode()
    xs = [_time_first(rewriter, loop.end, node) for node in inputs]
    begins = [node.args[0].args[0][node.args[1]] for node in given]  # type: ignore[union-attr,index]
    made = rewriter.call(loop.end, scan, xs, begins, constants, text)
    loop.end.replace_all_uses_with(made)
    rewriter.graph.erase_node(loop.end)


def _first_run(loop: _Loop) -> object:
    return min((node.args[-1] for node in loop.inside if node.target in (BEGIN, STEP)), default=0)  # type: ignore[type-var]


def _run(node: fx.Node) -> object:
    return node.args[-1] if node.target is STEP else node.args[0].args[-1]  # type: ignore[union-attr]


def _carry(loop: _Loop, run: object, index: int) -> fx.Node | None:
    """A carry as a step is given it; made where no step reads it."""
    for node in loop.inside:
        if node.target is operator.getitem and node in loop.marks and node.args[1] == index and _run(node) == run:
            return node
    begin = next((node for node in loop.inside if node.target is BEGIN and node.args[-1] == run), None)
    if begin is None:
        return None
    with begin.graph.inserting_after(begin):
        made = begin.graph.call_function(operator.getitem, (begin, index))
    made.meta["val"] = begin.meta["val"][index]
    return made


def _check_alike(loop: _Loop, given: Sequence[fx.Node], nexts: Sequence[fx.Node]) -> None:
    for before, after in zip(given, nexts, strict=True):
        first, then = before.meta["val"], after.meta["val"]
        if not isinstance(then, Tensor) or (first.shape, first.dtype) != (then.shape, then.dtype):
            raise NotALoop(loop.where, "what is carried from step to step changes its shape or dtype")


def _time_first(rewriter: Rewriter, before: fx.Node, mark: fx.Node) -> fx.Node:
    source, dim = mark.args[0], mark.args[1]
    assert isinstance(source, fx.Node) and isinstance(dim, int)
    rest = [each for each in range(source.meta["val"].dim()) if each != dim]
    return source if dim == 0 else rewriter.call(before, aten.permute.default, source, [dim, *rest])


class _Keys:
    """Numbers of nodes: equal for the same op on the same values, marks of every run standing for each other."""

    def __init__(self, loop: _Loop) -> None:
        self.loop = loop
        self.numbers: dict[object, int] = {}
        self.of: dict[fx.Node, int] = {}

    def number(self, nodes: Iterable[fx.Node]) -> None:
        """Numbers nodes in order."""
        for node in nodes:
            self.of[node] = self.numbers.setdefault(self._said(node), len(self.numbers))

    def _said(self, node: fx.Node) -> object:
        if node.op != "call_function":
            return node.name
        if node.target is STEP:
            return "step", self.of[node.args[0]], node.args[1]  # type: ignore[index]
        if node in self.loop.marks:
            return "carry", node.args[1]
        return str(node.target), str(fx.map_arg((node.args, node.kwargs), lambda x: _Numbered(self.of[x])))


class _Numbered:
    """An argument, printed as its number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"%{self.number}"


def _compare(loop: _Loop, outs: Sequence[fx.Node], again: Sequence[fx.Node]) -> None:
    """Two runs of a step are the same ops on the same values, and each has marks of its own alone."""
    before: list[fx.Node] = []
    for node in loop.end.graph.nodes:
        if node is loop.end:
            break
        before.append(node)
    keys = _Keys(loop)
    keys.number(before)
    runs = [{_run(node) for node in _read(loop.cone(ends), ends) if node in loop.marks} for ends in (outs, again)]
    if [keys.of[node] for node in outs] != [keys.of[node] for node in again]:
        raise NotALoop(loop.where, "its steps are not alike")
    if any(len(found) != 1 for found in runs) or runs[0] == runs[1]:
        raise NotALoop(loop.where, "a step reads what another one left elsewhere than in what it carries")


def _check_effects(loop: _Loop) -> None:
    """What a step computes without its marks is the same every time, and nothing of it is left behind."""
    between, order = False, {node: place for place, node in enumerate(loop.end.graph.nodes)}
    last = order[loop.end]
    for node in loop.end.graph.nodes:
        if node is loop.end:
            return
        between = between or node in loop.inside
        if not between or node.op != "call_function":
            continue
        if node.target in autograd.RANDOM:
            raise NotALoop(loop.where, "a step draws random numbers")
        if node not in loop.inside and any(order[user] > last for user in node.users):
            raise NotALoop(loop.where, "a step leaves something behind")


def _read(nodes: Sequence[fx.Node], ends: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """What nodes read, and what a loop ends with."""
    return dict.fromkeys((*(source for node in nodes for source in node.all_input_nodes), *ends))
