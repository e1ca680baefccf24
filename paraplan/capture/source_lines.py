"""Where in the user's code an op or an error comes from."""

from __future__ import annotations

import functools
import inspect
import linecache
import re
import traceback
from pathlib import Path, PurePath

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n(?:\s+(?P<code>[^\n]*))?')
_TORCH = re.compile(r"[\\/](torch|functorch)[\\/]")
_LIBRARY = re.compile(r"[\\/](transformers|accelerate|einops|torchvision|timm)[\\/]")
_STANDARD = re.compile(r"[\\/]python3[\w.]*[\\/][\w.]+\.py$")
_OURS = re.compile(re.escape(str(Path(__file__).parents[1])) + r"[\\/]")

DATA_DEPENDENT = (
    "control flow, a Python number or a shape depends on tensor data; use torch.where instead of `if`, keep values as "
    "tensors instead of .item(), masks instead of boolean indexing, x[i.unsqueeze(0)] instead of x[i] where i has no "
    "dims, bincount with a minlength instead of without"
)


def depends_on_data(fault: Exception) -> bool:
    """Whether fake tensors could not tell a size or a number because data decides it."""
    said = type(fault).__name__ + str(fault)
    return any(word in said for word in ("DataDependent", "data-dependent", "unbacked", "DynamicOutputShape"))


def is_of_trace(fault: Exception) -> bool:
    """Whether torch refused what it does to tensors that have data."""
    return any(word in str(fault) for word in ("Cannot access data pointer", "not supported for tensor subclasses"))


def _spell(file: str, line: str | int, function: str, code: str) -> str:
    return f"{PurePath(file).name}:{line}, in {function}: {code.strip()}"


def _pick(frames: list[tuple[str, str]]) -> str:
    """Of (file, text) from outermost to innermost: the user's innermost, else the innermost outside torch."""
    ours = [
        (file, text)
        for file, text in frames
        if not (file.startswith("<") or any(kind.search(file) for kind in (_TORCH, _OURS, _STANDARD)))
    ]
    for file, text in reversed(ours):
        if not _LIBRARY.search(file):
            return text
    return ours[-1][1] if ours else ""


def line_of_stack(stack: str | None) -> str:
    """The line to show for an fx node's stack trace; "" where there is none."""
    found = _FRAME.finditer(stack or "")
    frames = [(m["file"], _spell(m["file"], m["line"], m["function"], m["code"] or "")) for m in found]
    return _pick(frames)


def stack_of(function: object) -> str:
    """What a traceback says of the first line of a function of the user's; "" where it has no Python code."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if code is None:
        return ""
    line = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return f'  File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}\n    {line}\n'


def line_of_error(fault: BaseException) -> str:
    """The user's line an exception was raised under, following its causes; "" where none is known."""
    seen: BaseException | None = fault
    while seen is not None:
        frames = [
            (
                f.filename,
                _spell(f.filename, f.lineno or 0, f.name, f.line or linecache.getline(f.filename, f.lineno or 0)),
            )
            for f in traceback.extract_tb(seen.__traceback__)
        ]
        if line := _pick(frames):
            return line
        seen = seen.__cause__ or seen.__context__
    return ""
