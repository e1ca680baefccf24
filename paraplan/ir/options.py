"""Options declared once: what a field of an `Options` struct says of itself serves Python and the command line alike.

A field is `name: Annotated[type, Option(help, doc, ...)] = default`. From it follow the struct's field, the keyword of
the functions that take it, its line in their reference, its checks, and the option of `paraplan` commands
(`terminal.command_options`). A struct is checked as it is made, so one that exists has values of its types that make
sense one by one, however they were given.
"""

from __future__ import annotations

import difflib
import inspect
import math
import textwrap
from collections import abc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from paraplan.ir.errors import ConstraintError
from paraplan.ir.option_words import OptionValue
from paraplan.ir.process.memo import SESSION
from paraplan.ir.struct import Value

Check = Callable[[str, Any], None]
"""Refuses a value of a keyword with a ConstraintError."""


@dataclass(frozen=True)
class Option:
    """What is said of an option beside its type and default.

    Attributes:
        help: one line, shown by the command line; "": Python alone has the option.
        doc: what the reference says; "": the help.
        group: heading under which the command line shows it.
        keyword: its name as an argument of functions, where that is not the field's.
        flag: its name on the command line, where that is not the keyword's.
        metavar: how the command line shows its value.
        parse: a text of the command line as a value; a text it cannot read stays one, and is refused as such.
        convert: a value as callers give it as one of the field's type; what is of that type stays as it is, and what
            it cannot convert raises a TypeError, ValueError or ConstraintError.
        check: refuses values that make no sense whatever the other options are.
        wanted: what a value is, for the message that refuses one of another type; "": as the type says.
        example: a value to show there.
    """

    help: str
    doc: str = ""
    group: str = ""
    keyword: str = ""
    flag: str = ""
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None
    convert: Callable[[Any], Any] | None = None
    check: Check | None = None
    wanted: str = ""
    example: Any = None

    @property
    def reference(self) -> str:
        """What the reference says."""
        return self.doc or self.help


class OptionField(NamedTuple):
    """A field of an `Options` struct."""

    name: str
    keyword: str
    type: Any
    default: Any
    option: Option


class Options(Value, frozen=True, kw_only=True):
    """A struct whose fields are options, converted and checked when it is made; None stands for a default.

    Raises:
        ConstraintError: a value is of another type, or makes no sense whatever the others are; names the option.
    """

    def __post_init__(self) -> None:
        for field in fields_of(type(self)).values():
            given = getattr(self, field.name)
            value = field.default if given is None else _converted(field, given)
            if value is not given:
                msgspec.structs.force_setattr(self, field.name, value)
            if value is not field.default and value is not None and field.option.check is not None:
                field.option.check(field.keyword, value)


O = TypeVar("O", bound=Options)
C = TypeVar("C", bound=type[Options])
F = TypeVar("F", bound=Callable[..., Any])


@SESSION.cached()
def fields_of(kind: type[Options]) -> dict[str, OptionField]:
    """The fields of a struct by keyword, in order."""
    found = {}
    for each in msgspec.structs.fields(kind):
        kept, option = get_args(each.type)
        default = each.default if each.default is not msgspec.NODEFAULT else each.default_factory()  # type: ignore[misc, operator]
        keyword = option.keyword or each.name
        found[keyword] = OptionField(each.name, keyword, kept, default, option)
    return found


def _converted(field: OptionField, given: Any) -> Any:
    """A value as one of the field's type.

    Raises:
        ConstraintError: it is none.
    """
    option, value = field.option, given
    try:
        value = given if option.convert is None else option.convert(given)
    except (TypeError, ValueError, ConstraintError):
        value = NotImplemented
    if _is_of(value, field.type):
        return value
    wanted = option.wanted or _said_of(field.type)
    if option.example is None:
        raise ConstraintError("{}: give {}", OptionValue(field.keyword, given), wanted)
    example = OptionValue(field.keyword, option.example)
    raise ConstraintError("{}: give {}, e.g. {}", OptionValue(field.keyword, given), wanted, example)


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of a type as fields have them; True and False are no numbers, and nan is none."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any or kind is object:
        return True
    if origin in (Union, UnionType):
        return any(_is_of(value, each) for each in args)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = args[:1] * len(value) if args[-1] is ... else args
        return len(kinds) == len(value) and all(map(_is_of, value, kinds))
    if origin in (dict, abc.Mapping):
        return isinstance(value, origin) and all(_is_of(k, args[0]) and _is_of(v, args[1]) for k, v in value.items())
    if origin is abc.Sequence:
        return isinstance(value, abc.Sequence) and not isinstance(value, str) and all(_is_of(v, args[0]) for v in value)
    if origin is abc.Callable:
        return callable(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    return isinstance(value, kind)


_SAID = {bool: "True or False", int: "a whole number", float: "a number", str: "a text", Path: "a path"}
"""What a value of a type is called."""


def _said_of(kind: Any) -> str:
    """What a value of a field's type is called."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return " or ".join(_SAID.get(each, "a function") for each in kinds if each is not NoneType)


def check_keywords(function: str, given: Mapping[str, Any], *kinds: type[Options]) -> None:
    """Refuse keywords that no struct has.

    Args:
        function: its name, for the message.
        given: keywords it was called with.
        kinds: structs whose fields it takes.
    Raises:
        TypeError: names the keyword, and those that are spelled alike.
    """
    known = [keyword for kind in kinds for keyword in fields_of(kind)]
    for keyword in given:
        if keyword not in known:
            near = difflib.get_close_matches(keyword, known, 3)
            meant = f"; did you mean {' or '.join(near)}?" if near else f"; its options are {', '.join(known)}"
            raise TypeError(f"{function}() has no option {keyword!r}{meant}")


def from_keywords(kind: type[O], given: Mapping[str, Any]) -> O:
    """The options of a struct among keywords; None stands for the default.

    Raises:
        ConstraintError: a value cannot be read.
    """
    fields = fields_of(kind)
    return kind(**{field.name: given[word] for word, field in fields.items() if given.get(word) is not None})


def keywords_of(options: Options) -> dict[str, Any]:
    """The options that differ from their defaults, by keyword."""
    values = {word: getattr(options, field.name) for word, field in fields_of(type(options)).items()}
    return {word: value for word, value in values.items() if value != fields_of(type(options))[word].default}


def with_keywords(kind: type[O], options: O | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options given as a struct of a kind and as keywords, all as keywords.

    Args:
        kind: of the struct.
        options: the struct; None for none.
        given: keywords.
    Raises:
        ConstraintError: both are given for an option, and differ.
        TypeError: the struct is of another kind.
    """
    if options is None:
        return dict(given)
    if not isinstance(options, kind):
        raise TypeError(f"{options!r:.80} is a {type(options).__name__}; give a {kind.__name__}")
    said = keywords_of(options)
    for word in said:
        field = fields_of(kind)[word]
        if given.get(word) is not None and getattr(from_keywords(kind, given), field.name) != said[word]:
            raise ConstraintError(
                f"{word}={given[word]!r} beside {kind.__name__}({field.name}={said[word]!r}): they contradict each "
                "other; give one of them"
            )
    return {**given, **said}


def at_least(least: float) -> Check:
    """Numbers from one on."""

    def check(keyword: str, value: Any) -> None:
        if value < least:
            raise ConstraintError("{}: must be at least {}", OptionValue(keyword, value), least)

    return check


def one_of(*names: str, beside: str = "") -> Check:
    """Some texts alone; `beside` ends the message."""

    def check(keyword: str, value: Any) -> None:
        if value not in names:
            raise ConstraintError("{}: one of {}{}", OptionValue(keyword, value), names, beside)

    return check


def documented(kind: C) -> C:
    """The struct with the attributes in its docstring."""
    lines = (f"{field.name}: {field.option.reference}" for field in fields_of(kind).values())
    kind.__doc__ = f"{inspect.cleandoc(kind.__doc__ or '')}\n\nAttributes:\n{_indented(lines)}\n"
    return kind


def takes_options(keywords: Any, *kinds: type[Options]) -> Callable[[F], F]:
    """The function with every option in its signature and docstring, where `help` and editors look for them.

    Args:
        keywords: a TypedDict of its `**options`.
        kinds: the structs that define them.
    """
    types = get_type_hints(keywords)
    fields = {word: field for kind in kinds for word, field in fields_of(kind).items()}

    def described(function: F) -> F:
        own = inspect.signature(function)
        before = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
        named = [
            inspect.Parameter(word, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[word])
            for word, field in fields.items()
        ]
        function.__signature__ = own.replace(parameters=[*before, *named])  # type: ignore[attr-defined]
        head, raises, tail = inspect.cleandoc(function.__doc__ or "").partition("Raises:\n")
        lines = _indented(f"{word}: {field.option.reference}" for word, field in fields.items())
        function.__doc__ = f"{head.rstrip()}\n\nOptions:\n{lines}\n{raises}{tail}"
        return function

    return described


def _indented(lines: Iterable[str]) -> str:
    return "\n".join(textwrap.fill(line, 116, initial_indent="    ", subsequent_indent="        ") for line in lines)
