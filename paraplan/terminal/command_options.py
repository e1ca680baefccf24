"""Options of commands, made of the structs that define them (`ir.options`)."""

from __future__ import annotations

import difflib
import functools
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import typer

from paraplan.ir.errors import ConstraintError
from paraplan.ir.options import OptionField, Options, fields_of, from_keywords

F = TypeVar("F", bound=Callable[..., Any])

ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="hf:<model_type>, module:factory or file.py:factory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="A setting of an hf: model; repeatable.", rich_help_panel="Model and batch"
    ),
]


def with_options(*kinds: type[Options], only: tuple[str, ...] | None = None) -> Callable[[F], F]:
    """The command with the options of structs, which it gets as values of its `**options`, by keyword.

    Args:
        kinds: the structs, in the order their options are shown in.
        only: the keywords of those options that the command has; left out, all that a command line can give.
    """
    fields = {word: field for kind in kinds for word, field in fields_of(kind).items() if field.option.help}
    taken = [fields[word] for word in only] if only is not None else list(fields.values())

    def decorated(function: F) -> F:
        @functools.wraps(function)
        def command(**given: Any) -> Any:
            return function(**given | {field.keyword: _value(field, given[field.keyword]) for field in taken})

        own = [each for each in _parameters(function) if each.kind is not each.VAR_KEYWORD]
        at = sum(each.kind is not each.KEYWORD_ONLY for each in own)
        shown = [each.replace(kind=each.KEYWORD_ONLY) for each in (*own[:at], *map(_parameter, taken), *own[at:])]
        command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in shown}
        return command  # type: ignore[return-value]

    return decorated


def flags_of(*kinds: type[Options]) -> dict[str, str]:
    """Keywords of structs to their flags, of those that the command line has."""
    return {word: f"--{_flag(field)}" for kind in kinds for word, field in fields_of(kind).items() if field.option.help}


def parse_pins(text: str, kind: type[Options]) -> dict[str, Any]:
    """`tp=8,pp=4` as options by keyword, by the names and with the values that the command line has for them.

    Args:
        text: options joined by commas; a value may have commas of its own (`mesh=8,8,pp=4`), a flag is its name.
        kind: the struct that defines them.
    Raises:
        ConstraintError: there is no such option, it is given twice, or its value cannot be read; says what can.
    """
    fields = {_flag(field): field for field in fields_of(kind).values() if field.option.help}
    found: list[tuple[str, str | None]] = []
    for part in map(str.strip, text.split(",")):
        name, equals, value = part.removeprefix("--").partition("=")
        name = name.strip().replace("_", "-")
        if equals or name in fields:
            found.append((name, value.strip() if equals else None))
        elif found and found[-1][1] is not None:  # a value goes on
            found[-1] = (found[-1][0], f"{found[-1][1]},{part}")
        else:
            raise ConstraintError(f"{part!r} is no option with a value: write e.g. tp=8,pp=4")
    pins: dict[str, Any] = {}
    for name, given in found:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 3, 0.5)
            meant = f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(fields)}"
            raise ConstraintError(f"{name!r} is no option of a plan{meant}")
        if fields[name].keyword in pins:
            raise ConstraintError(f"{name} is given twice")
        pins[fields[name].keyword] = _read(name, fields[name], given)
    made = from_keywords(kind, pins)
    return {word: getattr(made, fields_of(kind)[word].name) for word in pins}


def _read(name: str, field: OptionField, value: str | None) -> Any:
    """A value as the command line reads it."""
    kind = _terminal_type(field)
    if kind is bool:
        if value not in (None, "true", "false"):
            raise ConstraintError(f"{name}={value}: is there or not: write {name} alone, or {name}=false")
        return value != "false"
    if not value:
        raise ConstraintError(f"{name} has no value: write {name}={field.option.metavar or 'VALUE'}")
    return _value(field, value)


def _flag(field: OptionField) -> str:
    return field.option.flag or field.keyword.replace("_", "-")


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function, eval_str=True).parameters.values())


def _parameter(field: OptionField) -> inspect.Parameter:
    """The option as a parameter that typer reads."""
    kind, option = _terminal_type(field), field.option
    flag = f"--{_flag(field)}"
    default = None if field.default in ("", ()) else field.default
    metavar = option.metavar or _METAVARS.get(kind)
    kind = str if kind in _METAVARS else kind
    shown = typer.Option(flag, metavar=metavar, help=option.help, rich_help_panel=option.group or None)
    annotation: Any = Annotated[kind if default is not None else kind | None, shown]
    return inspect.Parameter(field.keyword, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _terminal_type(field: OptionField) -> Any:
    """What the command line reads: a text where the option parses it itself, else what the field holds."""
    if field.option.parse is not None:
        return str
    union = get_origin(field.type) in (Union, types.UnionType)
    held = [each for each in (get_args(field.type) if union else (field.type,)) if each is not type(None)]
    if get_origin(held[0]) is tuple:
        return list[str]
    return next(each for each in (bool, int, float, Path, str) if each in held)


_METAVARS = {int: "INTEGER", float: "FLOAT"}
"""How the command line shows numbers, which are read as texts: those that are none are refused as Python's are."""


def _value(field: OptionField, given: Any) -> Any:
    if field.option.parse is not None and given is not None:
        return field.option.parse(given)
    kind = _terminal_type(field)
    if kind not in _METAVARS or not isinstance(given, str):
        return given
    try:
        return kind(given)
    except ValueError:
        return given
