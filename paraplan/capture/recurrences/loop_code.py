"""The code of a function with its loops over `range` handed to `loop_runs`, which may run one step for all.

    for t in range(n):                   loop = __paraplan_loop__("file.py:12", range(n))
        h = f(x[:, t], h)                for t in loop:
        out.append(h)          ->            h, = loop.enter(locals(), ("h",))
                                             h = f(x[:, t], h)
                                             loop.append(out, h)
                                             loop.leave(locals(), ("h",), ())
                                         h, = loop.ends(locals(), ("h",))
                                         out = loop.collected(out)

A loop over `x.unbind(dim)`, counted or not, is one over the numbers of the parts. Two recorded steps say nothing of
what a body hides from them: a tensor changed in place that has other names, a history read at some distance, a state
that a cell, a closure or an object keeps. So a body may do no more than give names to expressions of torch's functions
and methods that change nothing (`_is_pure`) and append to lists it does not read (`_body_is_pure`); all other loops are
run step by step. Lines stay where they were.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator, Sequence

from torch import Tensor

HELPER = "__paraplan_loop__"
_LEAVES = (ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal)
_OTHERS = (ast.Delete, ast.Try, ast.While, ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.NamedExpr)


def looped_code(function: types.FunctionType) -> types.CodeType | None:
    """A function's code with its loops handed over; None where it has none, or its source is not to be had."""
    try:
        source, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(source)))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return None
    made = tree.body[0]
    if not isinstance(made, ast.FunctionDef) or _mangled(made):
        return None
    ast.increment_lineno(tree, first - 1)
    code = function.__code__
    rewriter = _Rewriter(code.co_filename, made)
    made.body = [each for statement in made.body for each in rewriter.statement(statement)]
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

    def __init__(self, path: str, function: ast.FunctionDef) -> None:
        self.path, self.function, self.count = path, function, 0

    def statement(self, node: ast.stmt, within: bool = False) -> list[ast.stmt]:
        """What stands for a statement; `within`: it is run again and again."""
        if isinstance(node, ast.For):
            before, looped = self._over_range(node)
            if not within and _may_be_rolled(looped):
                return [*before, *self._loop(looped, within)]
        repeats = within or isinstance(node, (ast.For, ast.While))
        for field in ("body", "orelse", "finalbody"):
            inner = getattr(node, field, None)
            if isinstance(inner, list) and inner and isinstance(inner[0], ast.stmt):
                made = [each for statement in inner for each in self.statement(statement, repeats)]
                setattr(node, field, made)
        return [node]

    def _over_range(self, node: ast.For) -> tuple[list[ast.stmt], ast.For]:
        """A loop over the parts of `x.unbind(dim)` as one over their numbers, and what stands before it."""
        counted = _is_call(node.iter, "enumerate") and isinstance(node.target, ast.Tuple) and len(node.target.elts) == 2
        source = node.iter.args[0] if counted and isinstance(node.iter, ast.Call) and node.iter.args else node.iter
        parts, index = _unbound(source), f"__paraplan_step_{self.count}__"
        if parts is None:
            return [], node
        of = f"__paraplan_parts_{self.count}__"
        before = _parsed([f"{of} = {parts[0]}"], node)
        index = ast.unparse(node.target.elts[0]) if counted else index  # type: ignore[attr-defined]
        target = ast.unparse(node.target.elts[1]) if counted else ast.unparse(node.target)  # type: ignore[attr-defined]
        part = _parsed([f"{target} = {of}[(slice(None),) * {parts[1]} + ({index},)]"], node)
        bounds = f"range({of}.shape[{parts[1]}])"
        loop = _parsed([f"for {index} in {bounds}:\n    pass"], node)[0]
        assert isinstance(loop, ast.For)
        loop.body, loop.orelse, loop.end_lineno = [*part, *node.body], node.orelse, node.end_lineno
        return before, loop

    def _loop(self, node: ast.For, within: bool) -> list[ast.stmt]:
        name = f"__paraplan_loop_{self.count}__"
        self.count += 1
        carried, made, lists = _carried(node), _stored(node), _appended(node)
        after = [each for each in made if each not in carried and self._read_after(each, node, within)]
        indices = ast.unparse(node.iter)
        if isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) == "reversed":
            indices = f"{ast.unparse(node.iter.args[0])}[::-1]"
        begin = f"{name} = {HELPER}({f'{self.path}:{node.lineno}'!r}, {indices})"
        enter = f"{_targets(carried)}{name}.enter(locals(), {tuple(carried)!r})"
        leave = f"{name}.leave(locals(), {tuple(carried)!r}, {tuple(after)!r})"
        ends = f"{_targets([*carried, *after])}{name}.ends(locals(), {(*carried, *after)!r})"
        collected = [f"{each} = {name}.collected({each})" for each in lists]
        body = [_Appends(name).visit(statement) for statement in node.body]
        node.iter = ast.Name(name, ast.Load())
        node.body = [*_parsed([enter], node), *body, *_parsed([leave], node)]
        return [*_parsed([begin], node), node, *_parsed([ends, *collected], node)]

    def _read_after(self, name: str, loop: ast.For, within: bool) -> bool:
        end = loop.end_lineno or loop.lineno
        return any(
            isinstance(each, ast.Name)
            and each.id == name
            and isinstance(each.ctx, ast.Load)
            and (within or each.lineno > end)
            for each in ast.walk(self.function)
        )


class _Appends(ast.NodeTransformer):
    """`x.append(y)` as a statement is the loop's."""

    def __init__(self, loop: str) -> None:
        self.loop = loop

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        """Rewrites one statement."""
        if (call := _append_of(node)) is None:
            return node
        made = _parsed([f"{self.loop}.append(None, None)"], node)[0]
        assert isinstance(made, ast.Expr) and isinstance(made.value, ast.Call)
        assert isinstance(call.func, ast.Attribute)
        made.value.args = [call.func.value, call.args[0]]
        return made


def _parsed(lines: Sequence[str], at: ast.stmt) -> list[ast.stmt]:
    made = ast.parse("\n".join(lines)).body
    for statement in made:
        for node in ast.walk(statement):
            if "lineno" in node._attributes:
                node.lineno = node.end_lineno = at.lineno  # type: ignore[attr-defined]
                node.col_offset = node.end_col_offset = 0  # type: ignore[attr-defined]
    return made


def _tuple(names: Sequence[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names)})"


def _targets(names: Sequence[str]) -> str:
    return f"{_tuple(names)} = " if names else ""


def _is_call(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == name


def _unbound(node: ast.expr) -> tuple[str, int] | None:
    """What is unbound along which dim, counted from the front, where that is written out."""
    if not isinstance(node, ast.Call) or node.keywords or not all(map(_is_plain, node.args[-1:])):
        return None
    given = list(node.args)
    if ast.unparse(node.func) != "torch.unbind":
        if not isinstance(node.func, ast.Attribute) or node.func.attr != "unbind":
            return None
        given.insert(0, node.func.value)
    dim = given[1] if len(given) > 1 else ast.Constant(0)
    known = len(given) in (1, 2) and isinstance(dim, ast.Constant) and isinstance(dim.value, int)
    return (ast.unparse(given[0]), dim.value) if known else None  # type: ignore[attr-defined,return-value]


def _is_plain(node: ast.expr) -> bool:
    return not isinstance(node, ast.Starred)


def _may_be_rolled(node: ast.For) -> bool:
    """Whether a loop is one that its steps say all of."""
    source = node.iter
    if isinstance(source, ast.Call) and ast.unparse(source.func) == "reversed" and len(source.args) == 1:
        source = source.args[0]
    if not isinstance(source, ast.Call) or ast.unparse(source.func) != "range":
        return False
    if not isinstance(node.target, ast.Name) or node.orelse:
        return False
    inside = [each for statement in node.body for each in ast.walk(statement)]
    if any(isinstance(each, (*_LEAVES, *_OTHERS)) for each in inside):
        return False
    if any(isinstance(each, (ast.Attribute, ast.Starred)) and isinstance(each.ctx, ast.Store) for each in inside):
        return False
    if any(isinstance(each, ast.Expr) and _append_of(each) is None and not _is_text(each) for each in inside):
        return False
    index = node.target.id
    if not _body_is_pure(node, index):
        return False
    if any(isinstance(each, ast.Name) and each.id == index and isinstance(each.ctx, ast.Store) for each in inside):
        return False
    return any(isinstance(each, ast.Subscript) and index in _names(each.slice) for each in inside)


_PURE = (
    *(ast.Name, ast.Constant, ast.Tuple, ast.List, ast.Slice, ast.Attribute, ast.Subscript, ast.Call, ast.keyword),
    *(ast.BinOp, ast.UnaryOp, ast.Compare, ast.operator, ast.unaryop, ast.cmpop, ast.expr_context),
)
"""What expressions of a body may consist of."""
_MODULES = frozenset({"torch", "torch.special", "torch.linalg", "torch.nn.functional", "nn.functional", "F"})


def _body_is_pure(node: ast.For, index: str) -> bool:
    """Whether a body does nothing but give names to pure expressions, and append to lists that it does not read."""
    stored, lists = set(_stored(node)), _appended(node)
    for statement in node.body:
        if isinstance(statement, ast.Expr) and (call := _append_of(statement)) is not None:
            values = call.args
        elif isinstance(statement, ast.Expr) and _is_text(statement):
            continue
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if not all(isinstance(each, (ast.Name, ast.Tuple)) for each in targets):
                return False
            values = [statement.value, *targets]
        else:
            return False
        inside = [each for value in values for each in ast.walk(value)]
        if not all(_is_pure(each, index, stored) for each in inside) or not _names_of(inside).isdisjoint(lists):
            return False
    return True


def _is_pure(node: ast.AST, index: str, stored: set[str]) -> bool:
    """Whether a part of an expression changes nothing and reads nothing that the body may have changed."""
    if isinstance(node, ast.Subscript):
        of, taken = node.value, index in _names(node.slice)
        own = isinstance(of, ast.Name) and of.id in stored
        return isinstance(node.ctx, ast.Load) and (taken or own or not isinstance(of, (ast.Name, ast.Attribute)))
    if isinstance(node, ast.Call):
        return _calls_purely(node, stored)
    return isinstance(node, _PURE)


def _calls_purely(node: ast.Call, stored: set[str]) -> bool:
    """Whether a call is of a function of torch, or of a method of a tensor made in the body, that changes none of its
    arguments; of no module, which may keep a state."""
    if isinstance(node.func, ast.Name):
        return node.func.id == "slice"
    if not isinstance(node.func, ast.Attribute) or node.func.attr.endswith("_"):
        return False
    flags = any(isinstance(each, ast.Constant) and isinstance(each.value, bool) for each in node.args)
    if flags or any(each.arg in (None, "out", "inplace") for each in node.keywords):  # a flag may be "in place"
        return False
    of = node.func.value
    made = of.id in stored if isinstance(of, ast.Name) else not isinstance(of, ast.Attribute)
    return ast.unparse(of) in _MODULES or (made and hasattr(Tensor, node.func.attr))


def _names_of(nodes: Sequence[ast.AST]) -> set[str]:
    return {each.id for each in nodes if isinstance(each, ast.Name)}


def _is_text(node: ast.Expr) -> bool:
    return isinstance(node.value, ast.Constant)


def _append_of(node: ast.Expr) -> ast.Call | None:
    call = node.value
    if not isinstance(call, ast.Call) or len(call.args) != 1 or call.keywords:
        return None
    of = call.func
    known = isinstance(of, ast.Attribute) and of.attr == "append" and isinstance(of.value, ast.Name)
    return call if known and not isinstance(call.args[0], ast.Starred) else None


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


_OWN_SCOPES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


def _bound(node: ast.AST) -> set[str]:
    """Names that a comprehension or a lambda binds for itself."""
    inside = ast.walk(node)
    return {
        each.arg if isinstance(each, ast.arg) else str(getattr(each, "id", ""))
        for each in inside
        if isinstance(each, ast.arg) or (isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
    }


def _used(node: ast.AST, store: bool) -> list[str]:
    """Names of the function's own that something assigns, or reads, in order."""
    if isinstance(node, ast.Name):
        return [node.id] if isinstance(node.ctx, ast.Store) == store else []
    found = [name for child in ast.iter_child_nodes(node) for name in _used(child, store)]
    own = _bound(node) if isinstance(node, _OWN_SCOPES) else set()
    return [name for name in found if name not in own]


def _stored(node: ast.For) -> list[str]:
    """Names that a loop's body assigns, in order."""
    return [*dict.fromkeys(name for statement in node.body for name in _used(statement, True))]


def _appended(node: ast.For) -> list[str]:
    """Names of lists that a loop's body appends to."""
    calls = (_append_of(each) for statement in node.body for each in ast.walk(statement) if isinstance(each, ast.Expr))
    return [*dict.fromkeys(call.func.value.id for call in calls if call is not None)]  # type: ignore[attr-defined]


def _carried(node: ast.For) -> list[str]:
    """Names that a step reads before it assigns them: what it is given by the step before."""
    stored = set(_stored(node))
    return [*dict.fromkeys(name for name in _read_first(node.body, set()) if name in stored)]


def _read_first(body: Sequence[ast.stmt], known: set[str]) -> Iterator[str]:
    """Names that statements may read before they have assigned them; `known` are assigned."""
    known = set(known)
    for statement in body:
        heads = [each for each in ast.iter_child_nodes(statement) if not isinstance(each, ast.stmt)]
        if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            yield from {statement.target.id} - known
        yield from (name for head in heads for name in _used(head, False) if name not in known)
        inside = known | {name for head in heads for name in _used(head, True)}
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
