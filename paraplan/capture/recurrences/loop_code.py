"""The code of a function with its loops over `range` handed to `loop_runs`, which may run one step for all.

    for t in range(n):                   loop = __paraplan_loop__("file.py:12", range(n))
        h = f(x[:, t], h)                for t in loop:
        out.append(h)          ->            h, = loop.enter(locals(), ("h",))
                                             h = f(x[:, t], h)
                                             loop.append(out, h)
                                             loop.leave(locals(), ("h",), (), ())
                                         h, = loop.ends(locals(), ("h",))
                                         out = loop.collected(out)

A loop over `x.unbind(dim)`, counted or not, is one over the numbers of the parts, and one that writes `out[:, t]` one
that appends (`written_parts`). What a body calls or takes parts of
is asked about when the loop runs where its text does not say that it is pure (`loop_purity`): `self.cell(x, h)` becomes
`loop.pure(self.cell)(x, h)`, `scale[0]` becomes `loop.fixed(scale)[0]`, and `total += h` becomes
`total = loop.added(total, "+", h)`. All other loops are run step by step. Lines stay where they were.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
import types
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

from paraplan.capture.recurrences.loop_purity import (
    ADDED,
    OWN_SCOPES,
    append_of,
    appended_names,
    impure_line,
    is_only_joined,
    is_summed,
    names_in,
    stored_names,
    used_names,
)
from paraplan.capture.recurrences.unbound_loops import over_range, parsed
from paraplan.capture.recurrences.written_parts import as_appended

HELPER = "__paraplan_loop__"
MOST_TEXT = 60
"""Characters of a line that are told."""
_BUILTINS = ("range", "reversed", "enumerate", "zip", "min", "slice", "locals")
_LEAVES = (ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal)
_OTHERS = (ast.Delete, ast.Try, ast.While, ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.NamedExpr)


def looped_code(function: types.FunctionType) -> types.CodeType | None:
    """A function's code with its loops handed over; None where it has none, or its source is not to be had."""
    try:
        source, first = inspect.getsourcelines(function.__code__)
        tree = ast.parse(textwrap.dedent("".join(source)))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return None
    made = tree.body[0]
    if not isinstance(made, ast.FunctionDef) or _mangled(made):
        return None
    ast.increment_lineno(tree, first - 1)
    code = function.__code__
    if any(name in _BUILTINS for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)):
        return None
    if any(name in function.__globals__ for name in _BUILTINS) or "locals" in code.co_names:
        return None
    if function.__globals__.get("torch", torch) is not torch or "torch" in (*code.co_varnames, *code.co_freevars):
        return None
    given = made.args  # what parameters are by default is the function's, whatever its code
    given.defaults, given.kw_defaults, made.returns = [], [None] * len(given.kwonlyargs), None
    rewriter = _Rewriter(code.co_filename, made, code.co_cellvars)
    made.body = rewriter.block(made.body)
    if not rewriter.count:
        return None
    made.decorator_list = []
    outer = ast.parse(f"def outer({', '.join(code.co_freevars)}):\n    pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [made]
    module = ast.fix_missing_locations(ast.Module([outer], []))
    whole = compile(module, code.co_filename, "exec", dont_inherit=True)
    inner = next(each for each in whole.co_consts if isinstance(each, types.CodeType))
    found = next(each for each in inner.co_consts if isinstance(each, types.CodeType))
    return found if found.co_freevars == code.co_freevars else None


def _mangled(tree: ast.AST) -> bool:
    """Whether a name is private to its class, which only its compilation within the class can say."""
    names = (getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree))
    return any(str(name).startswith("__") and not str(name).endswith("__") for name in names)


class _Rewriter:
    """Rewrites the statements of one function."""

    def __init__(self, path: str, function: ast.FunctionDef, shared: Sequence[str]) -> None:
        self.path, self.function, self.shared, self.count = path, function, shared, 0
        self.original = copy.deepcopy(function)

    def block(self, body: Sequence[ast.stmt], within: bool = False) -> list[ast.stmt]:
        """What stands for statements; `within`: they are run again and again."""
        known = [copy.deepcopy(each) for each in body]
        return [each for at, line in enumerate(body) for each in self._statement(line, known[:at], within)]

    def _statement(self, node: ast.stmt, lines: Sequence[ast.stmt], within: bool) -> list[ast.stmt]:
        """What stands for a statement after others."""
        if isinstance(node, ast.For):
            before, looped = over_range(node, f"{HELPER}.__self__.unbound", self.count)
            if _takes_steps(looped):
                written = as_appended(looped, lines, self.shared, self.count)
                if written is not None and _takes_steps(written.loop) and self._why_not(written.loop, lines) is None:
                    after = parsed(written.after(self._name), node)
                    return [*before, *written.before, *self._loop(written.loop, lines, within, written.lists), *after]
                if (why := self._why_not(looped, lines)) is None:
                    return [*before, *self._loop(looped, lines, within)]
                if looped is node:  # told of where it is long
                    (begun,) = parsed([self._begun(node, why)], node)
                    assert isinstance(begun, ast.Expr)
                    node.iter = begun.value
                    self.count += 1
        repeats = within or isinstance(node, (ast.For, ast.While))
        for field in ("body", "orelse", "finalbody"):
            inner = getattr(node, field, None)
            if isinstance(inner, list) and inner and isinstance(inner[0], ast.stmt):
                setattr(node, field, self.block(inner, repeats))
        return [node]

    @property
    def _name(self) -> str:
        """Of the next loop's object."""
        return f"__paraplan_loop_{self.count}__"

    def _loop(self, node: ast.For, lines: Sequence[ast.stmt], within: bool, own: Sequence[str] = ()) -> list[ast.stmt]:
        """What stands for a loop; `own`: lists that nothing but what joins them reads."""
        name = self._name
        self.count += 1
        carried, made, lists = _carried(node), stored_names(node), appended_names(node)
        after = [each for each in made if each not in carried and self._read_after(each, node, within)]
        begin = f"{name} = {self._begun(node)}"
        read = {each for line in node.body for each in used_names(line, False)}
        outer = tuple(sorted(read - {*made, *lists, node.target.id}))  # type: ignore[attr-defined]
        enter = f"{_targets(carried)}{name}.enter(locals(), {tuple(carried)!r}, {outer!r})"
        summed = [each for each in carried if is_summed(each, node)]
        leave = f"{name}.leave(locals(), {tuple(carried)!r}, {tuple(after)!r}, {tuple(summed)!r})"
        ends = f"{_targets([*carried, *after])}{name}.ends(locals(), {(*carried, *after)!r})"
        joined = [
            each in own or (each not in self.shared and is_only_joined(each, node, lines, self.original))
            for each in lists
        ]
        collected = [f"{each} = {name}.collected({each}, {alone})" for each, alone in zip(lists, joined, strict=True)]
        asked = _Asked(name)
        body = [_Appends(name).visit(asked.visit(statement)) for statement in node.body]
        node.iter = ast.Name(name, ast.Load())
        node.body = [*parsed([enter], node), *body, *parsed([leave], node)]
        return [*parsed([begin], node), node, *parsed([ends, *collected], node)]

    def _why_not(self, node: ast.For, before: Sequence[ast.stmt]) -> str | None:
        assert isinstance(node.target, ast.Name)
        if self._read_after(node.target.id, node, False):
            return "its index is read after it"
        if not set(self.shared).isdisjoint((*stored_names(node), *appended_names(node))):
            return "a function within this one knows what a step names"
        return _why_not(node, before)

    def _begun(self, node: ast.For, why: str = "") -> str:
        """The code of a loop handed over; `why` it is run step by step, where it is."""
        given, indices = node.iter, ast.unparse(node.iter)
        if isinstance(given, ast.Call) and ast.unparse(given.func) == "reversed":
            indices = f"{ast.unparse(given.args[0])}[::-1]"
        return f"{HELPER}({f'{self.path}:{node.lineno}'!r}, {indices}{f', {why!r}' if why else ''})"

    def _read_after(self, name: str, loop: ast.For, within: bool) -> bool:
        """Whether a name may be read after a loop, as the loop has left it; `within`: the loop is run again."""
        end = loop.end_lineno or loop.lineno
        return any(line > end or (within and line <= loop.lineno) for line in _lines_read(name, self.function, loop))


def _lines_read(name: str, node: ast.AST, loop: ast.For) -> Iterator[int]:
    """Lines in which a part of the code reads a name of the function's own, but for those where another loop after
    this one has just assigned it."""
    if isinstance(node, OWN_SCOPES) and name not in used_names(node, False):
        return
    if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
        yield node.lineno
    later = isinstance(node, ast.For) and node.lineno > (loop.end_lineno or loop.lineno)
    binds = later and isinstance(node, ast.For) and name in used_names(node.target, True)
    for child in ast.iter_child_nodes(node):
        if not (binds and isinstance(node, ast.For) and child in node.body):
            yield from _lines_read(name, child, loop)


class _Asked(ast.NodeTransformer):
    """Has a loop asked about what its text does not say: calls, parts, and what is added to.

    Args:
        name: the loop's.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """A call of what is to be pure."""
        self.generic_visit(node)
        count = ast.copy_location(ast.Constant(len(node.args)), node)
        return _at(node, ast.Call(self._of("pure", node.func, count), node.args, node.keywords))

    def visit_Subscript(self, node: ast.Subscript) -> ast.Subscript:
        """A part of what is to be fixed."""
        self.generic_visit(node)
        return _at(node, ast.Subscript(self._of("fixed", node.value), node.slice, node.ctx))

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.Assign:
        """A sum in place."""
        assert isinstance(node.target, ast.Name)
        value = self.visit(node.value)
        read = ast.copy_location(ast.Name(node.target.id, ast.Load()), node)
        added = self._of("added", read, ast.copy_location(ast.Constant(ADDED[type(node.op)]), node), value)
        return _at(node, ast.Assign([node.target], added))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        """Its value alone: what a name is declared as is no call."""
        node.value = None if node.value is None else self.visit(node.value)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        """What is appended."""
        if (call := append_of(node)) is not None:
            call.args = [self.visit(each) for each in call.args]
        return node

    def _of(self, what: str, *given: ast.expr) -> ast.Call:
        made = ast.Call(ast.Attribute(ast.Name(self.name, ast.Load()), what, ast.Load()), list(given), [])
        return _at(given[0], made)


_Node = TypeVar("_Node", bound=ast.AST)


def _at(place: ast.AST, node: _Node) -> _Node:
    """A part of the code at another's place, with what in it has none."""
    return ast.fix_missing_locations(ast.copy_location(node, place))


class _Appends(ast.NodeTransformer):
    """`x.append(y)` as a statement is the loop's."""

    def __init__(self, loop: str) -> None:
        self.loop = loop

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        """Rewrites one statement."""
        if (call := append_of(node)) is None:
            return node
        made = parsed([f"{self.loop}.append(None, None)"], node)[0]
        assert isinstance(made, ast.Expr) and isinstance(made.value, ast.Call)
        assert isinstance(call.func, ast.Attribute)
        made.value.args = [call.func.value, call.args[0]]
        return made


def _tuple(names: Sequence[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names)})"


def _targets(names: Sequence[str]) -> str:
    return f"{_tuple(names)} = " if names else ""


def _takes_steps(node: ast.For) -> bool:
    """Whether a loop is one over `range` whose index takes parts of something."""
    source = node.iter
    if isinstance(source, ast.Call) and ast.unparse(source.func) == "reversed" and len(source.args) == 1:
        source = source.args[0]
    if not isinstance(source, ast.Call) or ast.unparse(source.func) != "range" or not isinstance(node.target, ast.Name):
        return False
    inside = [each for statement in node.body for each in ast.walk(statement)]
    return any(isinstance(each, ast.Subscript) and node.target.id in names_in(each.slice) for each in inside)


def _why_not(node: ast.For, before: Sequence[ast.stmt]) -> str | None:
    """Why a loop is none that its steps say all of; None where it may be one.

    Args:
        node: a loop that takes steps.
        before: the statements of its block before it.
    """
    assert isinstance(node.target, ast.Name)
    for statement in node.body:
        inside = list(ast.walk(statement))
        stored = [each for each in inside if isinstance(getattr(each, "ctx", None), ast.Store)]
        ends = any(isinstance(each, (*_LEAVES, *_OTHERS)) for each in inside)
        if ends or any(isinstance(each, (ast.Attribute, ast.Starred)) for each in stored):
            return _told(statement)
        if node.target.id in {each.id for each in stored if isinstance(each, ast.Name)}:
            return _told(statement)
    found = impure_line(node, before)
    if node.orelse:
        return "it has an else"
    return None if found is None else _told(found)


def _told(line: ast.stmt) -> str:
    text = ast.unparse(line).splitlines()[0]
    text = text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}..."
    return f"line {line.lineno}, `{text}`, may do more than name what functions of torch give, or append it"


def _carried(node: ast.For) -> list[str]:
    """Names that a step reads before it assigns them: what it is given by the step before."""
    stored = set(stored_names(node))
    return [*dict.fromkeys(name for name in _read_first(node.body, set()) if name in stored)]


def _read_first(body: Sequence[ast.stmt], known: set[str]) -> Iterator[str]:
    """Names that statements may read before they have assigned them; `known` are assigned."""
    known = set(known)
    for statement in body:
        heads = [each for each in ast.iter_child_nodes(statement) if not isinstance(each, ast.stmt)]
        if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            yield from {statement.target.id} - known
        yield from (name for head in heads for name in used_names(head, False) if name not in known)
        inside = known | {name for head in heads for name in used_names(head, True)}
        for field in ("body", "orelse"):
            inner = getattr(statement, field, None)
            if isinstance(inner, list):
                yield from _read_first(inner, inside)
        known |= _surely_stored(statement)


def _surely_stored(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.With):
        return {name for each in statement.body for name in _surely_stored(each)}
    if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        return set()
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return {
        each.id
        for target in targets
        for each in ast.walk(target)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
