"""Which loops of a function's Python say all that their steps do.

Two recorded steps say nothing of what a body hides from them: a tensor changed in place that has other names, a history
read at some distance, a state that a cell, a closure or an object keeps. So a body may do no more than give names to
expressions that change nothing, append to lists it does not read, and add to what only it has a name for. What an
expression calls and takes parts of is judged by its value when the loop runs (`pure_calls`).
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

_PURE = (
    *(ast.Name, ast.Constant, ast.Tuple, ast.List, ast.Slice, ast.Attribute, ast.Subscript, ast.Call, ast.keyword),
    *(ast.BinOp, ast.UnaryOp, ast.Compare, ast.operator, ast.unaryop, ast.cmpop, ast.expr_context),
)
"""What expressions of a body may consist of."""
_OF_STORAGE = frozenset(
    {
        *("is_contiguous", "stride", "storage_offset", "as_strided", "as_strided_copy", "data_ptr", "untyped_storage"),
        *("requires_grad", "is_leaf", "grad_fn", "grad", "retains_grad", "_base", "_is_view", "_version"),
    }
)
"""What a tensor of one step may have otherwise than that of another: how it is stored, and what it was made of."""
_FRESH = frozenset({"zeros", "ones", "full", "empty"})
"""What functions of torch, with `_like` or without, and with `new_` methods of tensors make that has no other name."""
_JOINS = frozenset({"torch.stack", "torch.cat", "torch.concat", "torch.concatenate"})
"""Functions that make one tensor of a list."""
ADDED = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
"""What `acc += x` may be instead."""


def impure_line(node: ast.For, before: Sequence[ast.stmt]) -> ast.stmt | None:
    """The first statement of a body that does more than give names to pure expressions, append to lists that the body
    does not read, or add to what nothing else has a name for; None where there is none.

    Args:
        node: the loop.
        before: the statements before it in its block.
    """
    stored, lists = set(stored_names(node)), appended_names(node)
    for statement in node.body:
        if isinstance(statement, ast.Expr) and (call := append_of(statement)) is not None:
            values = call.args
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if not all(isinstance(each, (ast.Name, ast.Tuple)) for each in targets):
                return statement
            values = [statement.value, *targets]
        elif isinstance(statement, ast.AugAssign) and _adds_to_its_own(statement, node, before):
            values = [statement.value]
        else:
            return statement
        inside = [each for value in values for each in ast.walk(value)]
        if not all(_is_pure(each, stored) for each in inside) or not _names_of(inside).isdisjoint(lists):
            return statement
    return None


def _is_pure(node: ast.AST, stored: set[str]) -> bool:
    """Whether a part of an expression may change nothing."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Attribute) and node.attr in _OF_STORAGE:
        return False
    if isinstance(node, ast.Compare) and any(isinstance(each, (ast.Is, ast.IsNot)) for each in node.ops):
        return all(isinstance(each, ast.Constant) for each in node.comparators)
    return _may_be_called(node, stored) if isinstance(node, ast.Call) else isinstance(node, _PURE)


def _may_be_called(node: ast.Call, stored: set[str]) -> bool:
    """Whether a call may be of something that changes none of its arguments, nor itself."""
    if isinstance(node.func, ast.Name) and node.func.id in stored:
        return False
    if isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
        return False
    if not isinstance(node.func, (ast.Name, ast.Attribute)):
        return False
    return all(each.arg not in (None, "out", "inplace") for each in node.keywords)


def _adds_to_its_own(statement: ast.AugAssign, loop: ast.For, before: Sequence[ast.stmt]) -> bool:
    """Whether what is added to in place was made right before the loop, for it alone, and a step does nothing else with
    it."""
    if not isinstance(statement.target, ast.Name) or type(statement.op) not in ADDED:
        return False
    name = statement.target.id
    inside = [each for line in loop.body for each in ast.walk(line) if isinstance(each, ast.Name) and each.id == name]
    added = [line for line in loop.body if isinstance(line, ast.AugAssign)]
    own = [each.target for each in added if isinstance(each.target, ast.Name) and each.target.id == name]
    return len(inside) == len(own) and made_for_it(name, before)


def made_for_it(name: str, before: Sequence[ast.stmt], numbers: bool = True) -> bool:
    """Whether what a name is for was made right before a loop, for it alone.

    Args:
        name: which.
        before: the statements before the loop in its block.
        numbers: whether it may be a number.
    """
    made = next((line for line in reversed(before) if name in names_in(line)), None)
    if not isinstance(made, ast.Assign) or len(made.targets) > 1:
        return False
    targets, values = [made.targets[0]], [made.value]
    if isinstance(targets[0], ast.Tuple) and isinstance(made.value, ast.Tuple):
        targets, values = targets[0].elts, made.value.elts
    if [ast.unparse(each) for each in targets].count(name) != 1 or len(targets) != len(values):
        return False
    value = next(v for target, v in zip(targets, values, strict=True) if ast.unparse(target) == name)
    alone = not any(isinstance(each, ast.Starred) for each in (*targets, *values))
    return alone and _is_fresh(value) and (numbers or not isinstance(value, ast.Constant))


def is_summed(name: str, loop: ast.For) -> bool:
    """Whether all that a step does to a name is to add to it."""

    def adds(line: ast.stmt) -> bool:
        if isinstance(line, ast.AugAssign):
            return isinstance(line.op, ast.Add)
        value = line.value if isinstance(line, (ast.Assign, ast.AnnAssign)) else None
        terms = [value.left, value.right] if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) else []
        return any(isinstance(each, ast.Name) and each.id == name for each in terms)

    return all(adds(line) for line in loop.body if name in used_names(line, True))


def is_only_joined(name: str, loop: ast.For, before: Sequence[ast.stmt], function: ast.FunctionDef) -> bool:
    """Whether a list that a loop fills is made right before it, and nothing but what joins lists reads it.

    Args:
        name: of the list.
        loop: its code.
        before: the statements before it in its block.
        function: all of the code.
    """
    made = next((line for line in reversed(before) if name in names_in(line)), None)
    if not isinstance(made, ast.Assign) or ast.unparse(made) != f"{name} = []":
        return False
    every = [each for each in ast.walk(function) if isinstance(each, ast.Name) and each.id == name]
    calls = (append_of(line) for line in ast.walk(loop) if isinstance(line, ast.Expr))
    appends = [call for call in calls if call is not None and name in names_in(call.func)]
    reads = [each for each in ast.walk(function) if isinstance(each, ast.Call) and _joins(each, name)]
    return len(every) == 1 + len(appends) + len(reads)


def _joins(call: ast.Call, name: str) -> bool:
    if ast.unparse(call.func) not in _JOINS or not call.args:
        return False
    of = call.args[0]
    of = of.value if isinstance(of, ast.Subscript) and isinstance(of.slice, ast.Slice) else of
    return isinstance(of, ast.Name) and of.id == name


def _is_fresh(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return isinstance(value.value, (int, float))
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    if any(each.arg in (None, "out") for each in value.keywords):
        return False
    of, name = ast.unparse(value.func.value), value.func.attr
    if of == "torch":
        return name.removesuffix("_like") in _FRESH
    return of != "self" and name.startswith("new_") and name.removeprefix("new_") in _FRESH


def append_of(node: ast.Expr) -> ast.Call | None:
    """The call of `x.append(y)` as a statement."""
    call = node.value
    if not isinstance(call, ast.Call) or len(call.args) != 1 or call.keywords:
        return None
    of = call.func
    known = isinstance(of, ast.Attribute) and of.attr == "append" and isinstance(of.value, ast.Name)
    return call if known and not isinstance(call.args[0], ast.Starred) else None


def names_in(node: ast.AST) -> set[str]:
    """All names of a part of the code."""
    return _names_of(list(ast.walk(node)))


def _names_of(nodes: Sequence[ast.AST]) -> set[str]:
    return {each.id for each in nodes if isinstance(each, ast.Name)}


OWN_SCOPES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
"""What binds names for itself."""


def _bound(node: ast.AST) -> set[str]:
    """Names that a comprehension or a lambda binds for itself."""
    inside = ast.walk(node)
    return {
        each.arg if isinstance(each, ast.arg) else str(getattr(each, "id", ""))
        for each in inside
        if isinstance(each, ast.arg) or (isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
    }


def used_names(node: ast.AST, store: bool) -> list[str]:
    """Names of the function's own that something assigns, or reads, in order."""
    if isinstance(node, ast.Name):
        return [node.id] if isinstance(node.ctx, ast.Store) == store else []
    found = [name for child in ast.iter_child_nodes(node) for name in used_names(child, store)]
    own = _bound(node) if isinstance(node, OWN_SCOPES) else set()
    return [name for name in found if name not in own]


def stored_names(node: ast.For) -> list[str]:
    """Names that a loop's body assigns, in order."""
    return [*dict.fromkeys(name for statement in node.body for name in used_names(statement, True))]


def appended_names(node: ast.For) -> list[str]:
    """Names of lists that a loop's body appends to."""
    calls = (append_of(each) for statement in node.body for each in ast.walk(statement) if isinstance(each, ast.Expr))
    return [*dict.fromkeys(call.func.value.id for call in calls if call is not None)]  # type: ignore[attr-defined]
