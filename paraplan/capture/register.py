"""`paraplan.register_rule` and `paraplan.register_cost`: what users say of their own ops.

Said once, where the op is defined, and applied at capture: programs and plans carry the result, so whoever loads a
plan needs the op to run it but no registration to read, price or re-plan it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from paraplan.capture.apply_registered import check_annotation
from paraplan.capture.register_schema import fits_schema
from paraplan.ir.errors import ConstraintError
from paraplan.rules import op_def
from paraplan.rules.registered_rules import (
    RegisteredCost,
    Work,
    add_cost,
    add_rule,
    parse,
    target_of,
)


def register_rule(
    op: str,
    rule: str,
    *,
    contracted: Mapping[str, str] | None = None,
    linear: Sequence[int | Sequence[int]] = (),
    addends: Sequence[int] = (),
    whole: Sequence[str] = (),
    size_args: Mapping[str, str | Sequence[str]] | None = None,
    check: Sequence[object] | None = None,
) -> None:
    """Says how an op of yours may be sharded, in one line over named dims.

        pp.register_rule("mylib::fused_mlp", "b s _, _ f, f _ -> b s _", contracted={"f": "sum"})

    A named dim may be sharded wherever it stands. The op's backward, if it is an op of its own, gets its own rule; ops
    without one are tried out at capture (see the design, section 5).

    Args:
        op: "namespace::name" as registered with torch.
        rule: a term per tensor argument, `->`, a term per result; `_` is a dim that must be whole, `()` a scalar, `...`
            leading dims of any number.
        contracted: dim -> "sum" or "max": how its shards are joined in results that lack it.
        linear: tensor arguments, counted from 0, that may be partial sums: alone, or a set of them together.
        addends: tensor arguments added once (a bias): where a contracted dim is sharded, one rank adds them.
        whole: dims that name a size and are never sharded.
        size_args: dim -> the integer arguments that count it, divided where it is sharded.
        check: example arguments; the op is run on them in shards, and a rule that does not hold is refused. Without, it
            is run on random values at capture, which an op may need `check` for that takes no others than its own.
    Raises:
        ConstraintError: no such op is registered with torch, the rule is malformed, contradicts itself or the op, or
            `check` shows it wrong.
    """
    if not isinstance(op, str) or not isinstance(rule, str):
        raise ConstraintError(
            f'register_rule takes an op\'s name and a rule as text, e.g. ("mylib::fused_mlp", "b s _, _ f -> b s f"); '
            f"given: {op!r:.80}, {rule!r:.80}"
        )
    found = parse(op, rule, contracted or {}, linear, addends, whole, size_args or {})
    if op_def(found.target) is not None:
        raise ConstraintError(f"{op} has a rule of its own; register rules for your own ops")
    fits_schema(found)
    if check is not None:
        check_annotation(found, tuple(check))
        found = replace(found, checked=True)
    add_rule(found)


def register_cost(op: str, *, flops: Work | None = None, bytes: Work | None = None) -> None:
    """Says what an op of yours costs; otherwise it is taken to read its inputs and write its results once.

        pp.register_cost("mylib::fused_mlp", flops=lambda x, w1, w2: 4 * x[0] * x[1] * x[2] * w1[1])

    Evaluated at capture on the op's shapes, whole and with dims halved; the plan carries the numbers.

    Args:
        op: "namespace::name" as registered with torch.
        flops: shapes of the tensor arguments, in order -> floating-point operations.
        bytes: likewise -> bytes moved to and from device memory.
    Raises:
        ConstraintError: no function, or a malformed name.
    """
    if flops is None and bytes is None:
        raise ConstraintError(f"cost of {op}: give flops=, bytes= or both")
    add_cost(RegisteredCost(target_of(op), flops, bytes))
