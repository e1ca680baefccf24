"""Digests of whole values, of what is not read attribute by attribute: variables around functions, a loss function's
attributes, hooks.

A difference is no refusal yet: it makes a plan's model be captured again and the programs be compared
(`jobs.model_identity`).
Equal content gives an equal digest in every process: no addresses, no order of sets.
"""

from __future__ import annotations

import functools
import hashlib
import types
from typing import Any

from torch import Tensor, nn

from paraplan.capture.python_state.code import HOOKS, bytecode_text, is_library
from paraplan.capture.python_state.values import CONTAINERS, is_data, text_of

_DEEPEST = 8
_REGISTRIES = ("_parameters", "_buffers", "_modules")


def content_digest(value: object) -> str:
    """ "value:<digest>" of all a value holds, as a program keeps it beside the digests of code."""
    return f"value:{hashlib.sha256(_content(value, ()).encode()).hexdigest()[:16]}"


def hooks_text(module: nn.Module) -> str:
    """Of a module's hooks, in order; "" where it has none."""
    held = [list(vars(module).get(kind, {}).values()) for kind in HOOKS]
    return content_digest(held) if any(held) else ""


def _content(value: Any, around: tuple[int, ...]) -> str:
    if id(value) in around or len(around) > _DEEPEST:
        return type(value).__qualname__
    within = (*around, id(value))
    if isinstance(value, nn.Parameter):
        return f"parameter {tuple(value.shape)}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_content(key, within)}: {_content(item, within)}' for key, item in value.items())}}}"
    if isinstance(value, CONTAINERS):
        items = [_content(item, within) for item in value]
        return f"[{', '.join(sorted(items) if isinstance(value, (set, frozenset)) else items)}]"
    if isinstance(value, functools.partial):
        return f"partial{_content([value.func, value.args, value.keywords], within)}"
    if isinstance(value, types.MethodType):
        return f"{_content(value.__func__, within)} of {_content(value.__self__, within)}"
    if isinstance(value, types.FunctionType):
        return _function(value, within)
    if isinstance(value, (Tensor, type, types.ModuleType)) or (is_data(value) and not hasattr(value, "__dict__")):
        return text_of(value)
    return f"{type(value).__qualname__}({_content(_held(value), within)})"


def _function(value: Any, within: tuple[int, ...]) -> str:
    if is_library(value):
        return str(value.__qualname__)
    cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
    held = [cells, value.__defaults__, value.__kwdefaults__]
    return f"{value.__qualname__} {bytecode_text(value)} {_content(held, within)}"


def _attributes(value: Any) -> dict[str, Any]:
    """An object's own, past the recorder of what a forward reads."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _held(value: Any) -> dict[str, Any]:
    """An object's attributes; of a module those of forward alone, not what torch keeps in it."""
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if hasattr(value, name)]
    held = {name: getattr(value, name) for name in slots if not name.startswith("__")}
    held |= _attributes(value)
    if not isinstance(value, nn.Module):
        return held
    own = vars(nn.Module())
    return {name: item for name, item in held.items() if name not in own or name in (*_REGISTRIES, "training")}
