"""Ops in order over named values: the body of a segment kind.

An argument of an op is JSON: a number, bool, null, a list of arguments, or a string. Strings speak:

    "%name"   the value called name
    ":text"   the literal text (dtypes, devices, modes)
    "~inf"    the numbers JSON cannot write: ~inf, ~-inf, ~nan, and complex ones such as ~1.5+2j
    "#..."    in lowered programs only: a rank-dependent offset (see `ir.execution.rank_program`)

so a graph reads and round-trips without any torch type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from paraplan.ir.model.op_rule import OpRule
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.process.memo import SESSION
from paraplan.ir.struct import Value

Arg = Any  # None | bool | int | float | str | tuple["Arg", ...]


class ArgKind(Enum):
    """What an argument that is text stands for, by its first character (see the module's head)."""

    VALUE = "%"
    TEXT = ":"
    NUMBER = "~"
    OFFSET = "#"


_ARG_KINDS = {kind.value: kind for kind in ArgKind}


def arg_kind(arg: Arg) -> ArgKind | None:
    """What an argument stands for; None where it is itself."""
    return _ARG_KINDS.get(arg[:1]) if isinstance(arg, str) else None


def arg_text(arg: str) -> str:
    """An argument without its first character: a value's name, or the literal text."""
    return arg[1:]


class Target(NamedTuple):
    """An op's target in parts, as torch names ops.

    Attributes:
        namespace: `aten`, `paraplan` of the canonical ops, or a library's of custom ones.
        name: of the op.
        overload: of torch's ops; "" of the canonical ones.
    """

    namespace: str
    name: str
    overload: str

    @property
    def is_canonical(self) -> bool:
        """Whether it is one of the canonical ops, which are ours."""
        return self.namespace == "paraplan"

    @property
    def base(self) -> str:
        """Without its overload: "aten.mm" of "aten.mm.default"."""
        return f"{self.namespace}.{self.name}"

    @property
    def attributes(self) -> tuple[str, ...]:
        """Where `torch.ops.<namespace>` has it."""
        return (self.name, self.overload) if self.overload else (self.name,)

    @property
    def word(self) -> str:
        """What people call it: "layer_norm" of `aten.native_layer_norm.default`."""
        return self.name.removeprefix("native_").strip("_")


@SESSION.cached(1 << 12)
def target_parts(target: str) -> Target:
    """An op's target, read."""
    namespace, _, path = target.partition(".")
    name, _, overload = path.partition(".")
    return Target(namespace, name, overload)


def writes_first(target: str) -> bool:
    """Whether a canonical op writes its first argument; as torch has it, its name ends in "_" then."""
    return target.endswith("_")


class Phase(Enum):
    """When an op runs."""

    FORWARD = "F"
    BACKWARD = "B"
    STEP = "S"  # once a step, before: in lowering alone (`lower.held`)


class Op(Value, frozen=True, kw_only=True, dict=True):
    """One operation.

    Attributes:
        target: `aten.<name>.<overload>` or `paraplan.<name>` for the canonical ops.
        args: positional arguments, see the module's head.
        kwargs: keyword arguments likewise.
        outs: names of the values it makes; None where an output of a multi-output op is absent.
        phase: forward or backward.
        source: index into `Graph.sources`; -1 where unknown.
        rule: its own sharding rule where `rules` has none for the target: discovered, registered, or said to be
            missing.
    """

    target: str
    args: tuple[Arg, ...]
    kwargs: dict[str, Arg] = {}
    outs: tuple[str | None, ...]
    phase: Phase = Phase.FORWARD
    source: int = -1
    rule: OpRule | None = None

    def __post_init__(self) -> None:
        """Arguments decode as lists; equal ops must be equal."""
        msgspec.structs.force_setattr(self, "args", freeze(self.args))
        msgspec.structs.force_setattr(self, "kwargs", {key: freeze(arg) for key, arg in self.kwargs.items()})

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """Names of the input values in argument order, repeats kept."""
        return tuple(name for name in refs((self.args, tuple(self.kwargs.values()))))


class Graph(Value, frozen=True, kw_only=True):
    """Ops in execution order.

    Attributes:
        inputs: names of the values that come from outside, in order.
        outputs: names of the results; None for an absent one (a gradient that does not exist).
        values: spec (global shape) of every value, inputs included.
        ops: in order; every input of an op is a graph input or an earlier op's output.
        sources: "file.py:line, in function: code" lines ops point to.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]
    values: dict[str, TensorSpec]
    ops: tuple[Op, ...]
    sources: tuple[str, ...] = ()

    def source_of(self, op: Op) -> str:
        """The user's line an op comes from, or "unknown line"."""
        return self.sources[op.source] if op.source >= 0 else "unknown line"


def refs(arg: Arg) -> Iterator[str]:
    """Names of the values an argument refers to, in order."""
    if isinstance(arg, str):
        if arg.startswith("%"):
            yield arg[1:]
    elif isinstance(arg, (tuple, list)):
        for item in arg:
            yield from refs(item)


def map_refs(arg: Arg, rename: Callable[[str], str]) -> Arg:
    """The argument with every "%name" replaced by "%" + rename(name)."""
    if isinstance(arg, str):
        return "%" + rename(arg[1:]) if arg.startswith("%") else arg
    if isinstance(arg, (tuple, list)):
        return tuple(map_refs(item, rename) for item in arg)
    return arg


def encode_number(number: complex) -> float | str:
    """A number as an argument; those JSON cannot write become "~inf", "~-inf", "~nan" or, if complex, "~1.5+2j"."""
    if isinstance(number, complex):
        return f"~{str(number).strip('()')}"
    if math.isfinite(number):
        return number
    return "~nan" if math.isnan(number) else ("~inf" if number > 0 else "~-inf")


def decode_number(text: str) -> complex:
    """The inverse of `encode_number` for its string forms."""
    return complex(text[1:]) if text.endswith("j") else float(text[1:])


def freeze(arg: Arg) -> Arg:
    """Lists to tuples, all the way down (JSON decodes to lists)."""
    return tuple(freeze(item) for item in arg) if isinstance(arg, (list, tuple)) else arg


def users(graph: Graph) -> dict[str, tuple[int, ...]]:
    """For each value, the indices of the ops that read it, in order, without repeats."""
    found: dict[str, list[int]] = {name: [] for name in graph.values}
    for index, op in enumerate(graph.ops):
        for name in dict.fromkeys(op.tensors):
            found[name].append(index)
    return {name: tuple(indices) for name, indices in found.items()}
