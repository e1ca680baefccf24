"""The user's functions that a forward and a loss function call, and what they read of globals and closures.

Found without running them: from the forwards on, a name that a function's bytecode mentions is followed where it is a
function, a class, or a method of one of the user's classes met so far. What torch, transformers and Python's library
do is theirs. A function's digest is that of its bytecode (of one Python version) and of its source without comments and
docstrings (of any), so that a plan is known again in another process.
"""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import inspect
import os
import sys
import sysconfig
import textwrap
import time
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.autograd import Function

from paraplan.capture.python_state.setting_keys import SettingKey, SettingKind, setting_key
from paraplan.ir.process.memo import SESSION

_STARTED = time.time()
_MOST = 2000
_OWN = str(Path(__file__).parents[2])
_TORCH = str(Path(nn.__file__).parents[1])
_STANDARD = tuple({f"{path}/" for path in (_OWN, _TORCH, *map(sysconfig.get_path, ("stdlib", "platstdlib")))})
_PACKAGES = ("torch", "transformers", "numpy", "functorch", "torchgen", "accelerate", "paraplan")


class Outside(NamedTuple):
    """A value of a global or a closure that a function's code names, or of a default argument.

    Attributes:
        where: what messages call it: "global tau of train.py".
        key: "global <module>:<path>" where another process finds it too, else "".
        root: the namespace, the closure's cell, or the function whose default it is.
        path: what is looked up in it, one after another: names, and items as one-tuples.
    """

    where: str
    key: str
    root: Any
    path: tuple[Any, ...]

    def value(self) -> object:
        """What it is now; KeyError or AttributeError where it is not there."""
        found = self.root
        for step in self.path:
            if isinstance(step, tuple):
                found = found[step[0]]
            else:
                found = found[step] if isinstance(found, dict) else getattr(found, step)
        return found


def module_name(namespace: Mapping[str, Any]) -> str:
    """A module's name, that of the main one by its file: what it is called when it is imported."""
    name = str(namespace.get("__name__", ""))
    return Path(str(namespace.get("__file__", name))).stem if name == "__main__" else name


def from_key(key: str) -> Outside | None:
    """The global of a program's setting ("global train:CONFIG.tau") if its module is loaded; nothing is imported."""
    _, module, name = setting_key(key)
    main = sys.modules.get("__main__")
    found = main if main is not None and module_name(vars(main)) == module else sys.modules.get(module)
    if found is None:
        return None
    first, *path = name.split(".")
    return Outside(f"global {name!r} of {module}", key, vars(found), ((first,), *path))


class Reached:
    """The functions reached from some roots.

    Args:
        roots: functions, modules, or whatever is called.

    Attributes:
        functions: by id.
        outside: what they name of globals and closures.
        objects: what stands before a dot in those names.
        caches: functions of functools.lru_cache among those reached.
        classes: the user's, in the order met.
        mentioned: names that the functions' code has; what a class holds under one is followed.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self.functions: dict[int, Any] = {}
        self.outside: dict[tuple[int, tuple[Any, ...]], Outside] = {}
        self.objects: dict[int, object] = {}
        self.caches: list[Any] = []
        self._named: dict[str, list[Any]] = {}
        self.mentioned: set[str] = set()
        self.classes: dict[type, None] = {}
        self._queue: list[object] = list(roots)
        met: dict[int, object] = {}  # a module may hold a method bound to itself
        while self._queue and len(self.functions) < _MOST:
            value = self._queue.pop()
            if id(value) not in met:
                met[id(value)] = value
                self._follow(value)

    def digests(self) -> dict[str, str]:
        """Per function's name, digests of its code; of several of one name, all."""
        found: dict[str, dict[str, set[str]]] = {}
        for function in self.functions.values():
            kinds = found.setdefault(function.__qualname__, {})
            for part in code_text(function).split():
                kind, _, digest = part.partition(":")
                kinds.setdefault(kind, set()).add(digest)
        return {
            name: " ".join(f"{kind}:{'+'.join(sorted(digests))}" for kind, digests in sorted(kinds.items()))
            for name, kinds in sorted(found.items())
        }

    def _follow(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            for module in value.modules():
                own = [held for held in vars(module).values() if isinstance(held, _CALLED)]
                own += [hook for kind in HOOKS for hook in vars(module)[kind].values()]
                self._queue += [*own, type(module)]
            self._mention("forward")
        elif isinstance(value, functools.partial):
            self._queue += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, types.MethodType):
            self._queue += [value.__func__, value.__self__]
        elif isinstance(value, _CACHED):
            self.caches.append(value)
            self._queue.append(value.__wrapped__)
        elif isinstance(value, (staticmethod, classmethod)):
            self._queue.append(value.__func__)
        elif isinstance(value, property):
            self._queue += [value.fget]
        elif isinstance(value, type):
            self._follow_class(value)
        elif isinstance(value, types.FunctionType):
            self._follow_function(value)
        elif callable(value):
            self._queue.append(type(value))

    def _follow_class(self, cls: type) -> None:
        for each in cls.__mro__:
            if each in self.classes or is_library(each):
                continue
            self.classes[each] = None
            for name, held in vars(each).items():
                if isinstance(held, (*_CALLED, staticmethod, classmethod, property)):
                    self._named.setdefault(name, []).append(held)
                    if name in self.mentioned:
                        self._queue.append(held)
            for name in ("__call__", "__init__", "__post_init__") if not issubclass(each, nn.Module) else ():
                self._mention(name)
            for name in ("backward", "setup_context", "forward") if issubclass(each, Function) else ():
                self._mention(name)

    def _mention(self, name: str) -> None:
        if name not in self.mentioned:
            self.mentioned.add(name)
            self._queue += self._named.get(name, [])

    def _follow_function(self, function: Any) -> None:
        if id(function) in self.functions or is_library(function):
            return
        self.functions[id(function)] = function
        wrapped = getattr(function, "__wrapped__", None)
        self._queue += [wrapped] if wrapped is not None else []
        self._follow_defaults(function)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for path in _paths(function.__code__):
            name = path[0]
            if name in cells:
                self._look(("variable", f"around {function.__qualname__}"), "", cells[name], "cell_contents", path)
            elif name in function.__globals__ and name != "__class__":
                file = Path(function.__code__.co_filename).name
                key = str(SettingKey(SettingKind.GLOBAL, module_name(function.__globals__), name))
                self._look(("global", f"of {file}"), key, function.__globals__, (name,), path)
        for name in names_in(function.__code__):
            self._mention(name)

    def _follow_defaults(self, function: Any) -> None:
        """Default arguments are variables around a function too."""
        code, values = function.__code__, function.__defaults__ or ()
        first = code.co_argcount - len(values)
        found = {code.co_varnames[first + i]: ("__defaults__", (i,)) for i in range(len(values))}
        found |= {name: ("__kwdefaults__", (name,)) for name in function.__kwdefaults__ or ()}
        for name, path in found.items():
            each = Outside(f"default {name!r} of {function.__qualname__}", "", function, path)
            value = each.value()
            self.outside[id(function), path] = each
            if callable(value):
                self._queue.append(value)

    def _look(self, words: tuple[str, str], key: str, root: Any, first: Any, path: tuple[Any, ...]) -> None:
        """Follow what is called, note what is data."""
        taken: tuple[Any, ...] = (first,)
        shown = str(path[0])
        try:
            found = Outside("", key, root, taken).value()
        except (KeyError, AttributeError, ValueError):
            return
        for step in path[1:]:
            self.objects[id(found)] = found
            if isinstance(found, types.ModuleType) and is_library(found):
                return
            if isinstance(step, tuple) != isinstance(found, (dict, list, tuple)) or isinstance(found, nn.Module):
                break
            try:
                found = Outside("", key, root, (*taken, step)).value()
            except (KeyError, AttributeError, IndexError, TypeError):
                break
            taken = (*taken, step)
            shown += f"[{step[0]!r}]" if isinstance(step, tuple) else f".{step}"
            key += ("." + str(step[0] if isinstance(step, tuple) else step)) if key else ""
        if isinstance(found, (*_CALLED, type)) or callable(found):
            self._queue.append(found)
        where = f"{words[0]} {shown} {words[1]}"
        self.outside.setdefault((id(root), taken), Outside(where, key, root, taken))


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CACHED = type(functools.lru_cache(id))
_CALLED = (types.FunctionType, functools.partial, types.MethodType, _CACHED)


@contextmanager
def caches_restored(caches: Sequence[Any]) -> Iterator[None]:
    """After it, functions of functools.lru_cache have forgotten what they cached under it, fake tensors perhaps."""
    before = [each.cache_info().misses for each in caches]
    try:
        yield
    finally:
        for each, misses in zip(caches, before, strict=True):
            if each.cache_info().misses != misses:
                each.cache_clear()


def is_users(frame: types.FrameType | None) -> bool:
    """Whether a frame runs the user's code."""
    return frame is not None and not _in_library(frame.f_code.co_filename)


def is_library(what: object) -> bool:
    """Whether a function, class or Python module is torch's, transformers', Python's or ours."""
    if isinstance(what, types.FunctionType):
        return _in_library(what.__code__.co_filename)
    module = what if isinstance(what, types.ModuleType) else sys.modules.get(getattr(what, "__module__", ""))
    file = getattr(module, "__file__", None)
    return _in_library(file) if file else getattr(module, "__name__", "") in sys.builtin_module_names


@SESSION.cached(4096)
def _in_library(file: str) -> bool:
    if file.startswith("<frozen"):
        return True
    parts = Path(file).parts
    sites = [index for index, part in enumerate(parts) if part in ("site-packages", "dist-packages")]
    if sites:
        return parts[sites[-1] + 1].removesuffix(".py") in _PACKAGES
    return file.startswith(_STANDARD)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


@SESSION.cached(4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Names of globals and attributes in code."""
    return frozenset(name for each in _codes(code) for name in each.co_names)


@SESSION.cached(4096)
def _paths(code: types.CodeType) -> tuple[tuple[Any, ...], ...]:
    """What code reads of globals and of variables around it: names, with attributes and constant items read next."""
    found: dict[tuple[Any, ...], None] = {}
    for each in _codes(code):
        steps = list(dis.get_instructions(each))
        for index, step in enumerate(steps):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"):
                if "DEREF" in step.opname and step.argval not in code.co_freevars:
                    continue
                found[(step.argval, *_after(steps, index + 1))] = None
    return tuple(found)


def _after(steps: list[dis.Instruction], at: int) -> Iterator[Any]:
    while at < len(steps):
        name = steps[at].opname
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            yield steps[at].argval
            at += 1
        elif name == "LOAD_CONST" and at + 1 < len(steps) and steps[at + 1].opname == "BINARY_SUBSCR":
            yield (steps[at].argval,)
            at += 2
        else:
            return


def read_next(frame: types.FrameType) -> tuple[Any, ...] | None:
    """The constant item that a frame takes of what it is just reading (`self.options["tau"]`), as a one-tuple."""
    steps = _instructions(frame.f_code)
    at = steps.get(frame.f_lasti)
    if at is None:
        return None
    following = next(_after(_ordered(frame.f_code), at + 1), None)
    return following if isinstance(following, tuple) else None


@SESSION.cached(1024)
def _ordered(code: types.CodeType) -> list[dis.Instruction]:
    return list(dis.get_instructions(code))


@SESSION.cached(1024)
def _instructions(code: types.CodeType) -> Mapping[int, int]:
    return {step.offset: index for index, step in enumerate(_ordered(code))}


def code_text(function: Any) -> str:
    """Digests of a function's code: "3.11:<bytecode> ast:<source>"."""
    source = _source_digest(function.__code__)
    return f"{bytecode_text(function)} ast:{source}" if source else bytecode_text(function)


def bytecode_text(function: Any) -> str:
    """The first of them, which is the same in every process; the source may be lacking where it was just written."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    defaults = [repr(v) for v in (function.__defaults__ or ()) if isinstance(v, PLAIN_DEFAULTS)]
    return f"{version}:{_digest(repr((_spelled(function.__code__, function.__doc__), defaults)))}"


PLAIN_DEFAULTS = (bool, int, float, str, type(None))
"""Default arguments that are part of a function's digest."""


def _spelled(code: types.CodeType, doc: str | None = None) -> object:
    consts = [None if doc is not None and const == doc else const for const in code.co_consts]
    told = [_spelled(c) if isinstance(c, types.CodeType) else _const(c) for c in consts]
    arguments = (code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, code.co_flags)
    return code.co_code.hex(), told, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, arguments


def _const(value: object) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


@SESSION.cached(4096)
def _source_digest(code: types.CodeType) -> str:
    """Of the source as Python reads it; "" where there is none, or its file changed after this process began."""
    try:
        if os.stat(code.co_filename).st_mtime > _STARTED:
            return ""
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return ""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and body and _is_docstring(body[0]):
            node.body = body[1:] or [ast.Pass()]
    return _digest(ast.unparse(tree))


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
