"""Rules and costs that users register for their own ops: one line over named dims.

    x s _, _ f, f _ -> x s _        contracted={"f": "sum"}

A term per tensor argument in the op's order, a term per result; dims apart by spaces, `()` for a scalar, `_` for a
dim that must be whole, `...` for leading dims of any number. A registration is asked for at capture, where the op's
arguments and shapes are known; the program then carries the result (`ir.model.op_rule`), so a plan needs no
registration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paraplan.ir.errors import ConstraintError

WHOLE, MANY = "_", "..."
_RESERVED = frozenset({"ring"})  # a strategy of its own
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*$")
_OP = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(::|\.)[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)?$")
Names = tuple[str, ...]
Work = Callable[..., float]


@dataclass(frozen=True)
class Annotation:
    """A registered rule.

    Attributes:
        target: the op, as programs write it ("mylib.fused_mlp.default").
        text: the line as it was given.
        inputs, outputs: named dims.
        contracted: dim -> "sum" or "max".
        linear: sets of tensor arguments that may be partial sums together.
        addends: tensor arguments added once where a contracted dim is sharded.
        whole: dims that name a size and are never sharded.
        size_args: dim -> names of the integer arguments that count it.
        checked: it was held against example arguments.
    """

    target: str
    text: str
    inputs: tuple[Names, ...]
    outputs: tuple[Names, ...]
    contracted: dict[str, str]
    linear: tuple[tuple[int, ...], ...]
    addends: tuple[int, ...]
    whole: frozenset[str]
    size_args: dict[str, tuple[str, ...]]
    checked: bool = False


@dataclass(frozen=True)
class RegisteredCost:
    """A registered cost: functions of the tensor arguments' shapes, in the op's order."""

    target: str
    flops: Work | None
    traffic_bytes: Work | None


_RULES: dict[str, Annotation] = {}
_COSTS: dict[str, RegisteredCost] = {}


def target_of(op: str) -> str:
    """ "mylib::fused_mlp" or "mylib.fused_mlp" to "mylib.fused_mlp.default".

    Raises:
        ConstraintError: no op is called so.
    """
    if not _OP.match(op):
        raise ConstraintError(f'{op!r} names no op; write "namespace::name", as the op was registered with torch')
    name = op.replace("::", ".")
    return name if name.count(".") == 2 else f"{name}.default"


def parse(
    op: str,
    text: str,
    contracted: Mapping[str, str],
    linear: Sequence[int | Sequence[int]],
    addends: Sequence[int],
    whole: Sequence[str],
    size_args: Mapping[str, str | Sequence[str]],
) -> Annotation:
    """A rule from its line.

    Args:
        op: "namespace::name" as registered with torch.
        text: the line.
        contracted, linear, addends, whole, size_args: as in `Annotation`; a set of one may be given without its tuple.
    Raises:
        ConstraintError: malformed, a dim that stands nowhere, an output's dim that no input has, a dim
            neither in an output nor contracted, an input that does not exist.
    """
    target = target_of(op)

    def fail(why: str) -> ConstraintError:
        return ConstraintError(f"rule of {op}, {text!r}: {why}")

    sides = text.split("->")
    if len(sides) != 2 or not all(side.strip() for side in sides):
        raise fail('write "inputs -> outputs", terms apart by commas, e.g. "b s _, _ f, f _ -> b s _"')
    inputs, outputs = (tuple(_term(term, fail) for term in side.split(",")) for side in sides)
    groups = tuple((group,) if isinstance(group, int) else tuple(group) for group in linear)
    sized = {dim: (names,) if isinstance(names, str) else tuple(names) for dim, names in size_args.items()}
    found = Annotation(target, text, inputs, outputs, dict(contracted), groups, tuple(addends), frozenset(whole), sized)
    _check(found, fail)
    return found


def _term(text: str, fail: Callable[[str], ConstraintError]) -> Names:
    names = tuple(text.split())
    if names == ("()",):
        return ()
    if not names:
        raise fail("a term is empty; write () for a scalar")
    for name in names:
        if name not in (WHOLE, MANY) and (not _NAME.match(name) or name in _RESERVED):
            raise fail(f"{name!r} is no name of a dim; letters and digits, `_` for a whole dim, `...` for leading dims")
    named = [name for name in names if name != WHOLE]
    if len(set(named)) != len(named):
        raise fail(f"a name stands twice in {text.strip()!r}")
    if MANY in names[1:]:
        raise fail(f"`...` must lead in {text.strip()!r}")
    return names


def _check(rule: Annotation, fail: Callable[[str], ConstraintError]) -> None:
    given = {name for names in rule.inputs for name in names} - {WHOLE}
    made = {name for names in rule.outputs for name in names} - {WHOLE}
    if unknown := sorted(made - given):
        raise fail(f"output dim {unknown[0]!r} stands in no input; write `_` where the op makes a dim")
    for what, dims in (("contracted", rule.contracted), ("whole", rule.whole), ("size_args", rule.size_args)):
        if unknown := sorted(set(dims) - given):
            raise fail(
                f"{what} names {unknown[0]!r}, but the inputs have {', '.join(sorted(given)) or 'no named dims'}"
            )
    for dim, how in rule.contracted.items():
        if how not in ("sum", "max"):
            raise fail(f"{dim!r} is contracted by {how!r}; say sum or max")
    for dim in sorted(given - rule.whole):
        if dim not in rule.contracted and not all(dim in names for names in rule.outputs):
            raise fail(
                f"{dim!r} is missing in an output: say contracted={{{dim!r}: 'sum'}} if its shards add up there, "
                f"or whole={dim!r} if it must not be sharded"
            )
    indices = [*rule.addends, *(index for group in rule.linear for index in group)]
    if bad := [index for index in indices if not 0 <= index < len(rule.inputs)]:
        raise fail(f"there is no input {bad[0]}; it has {len(rule.inputs)}, counted from 0")


def add_rule(rule: Annotation) -> None:
    """Registers a rule; a later one for the same op replaces it."""
    _RULES[rule.target] = rule


def add_cost(cost: RegisteredCost) -> None:
    """Registers a cost; a later one for the same op replaces it."""
    _COSTS[cost.target] = cost


def rule_for(target: str) -> Annotation | None:
    """The rule registered for an op."""
    return _RULES.get(target)


def cost_for(target: str) -> RegisteredCost | None:
    """The cost registered for an op."""
    return _COSTS.get(target)


def forget(target: str) -> None:
    """Drops what is registered for an op."""
    _RULES.pop(target, None)
    _COSTS.pop(target, None)
