"""What a loop over time computes: its body, op by op, once a step.

Results, histories and sums are allocated before the first step and written in place; of a step's values each lives
until the last op that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paraplan.ir.errors import CodegenError
from paraplan.ir.model.graph import Arg, ArgKind, arg_kind, arg_text, decode_number, target_parts
from paraplan.ir.model.scan import Scan, parse_scan
from paraplan.ir.model.tensor import DTYPE_BYTES
from paraplan.ir.process.memo import SESSION
from paraplan.kernels import reference_kernels

_VIEWS = frozenset({"aten.view.default", "aten._unsafe_view.default", "paraplan.mergeable"})
"""Ops that copy where strides do not allow a view."""

Values = dict[str, Tensor]


class _Call(NamedTuple):
    """One op of a body: how it is called, the names it makes, and those nobody reads afterwards."""

    run: Callable[..., Any]
    args: tuple[Arg, ...]
    kwargs: dict[str, Arg]
    outs: tuple[str | None, ...]
    drops: tuple[str, ...]


def _function(target: str) -> Callable[..., Any]:
    parts = target_parts(target)
    if target in _VIEWS:
        return (lambda x: x.contiguous()) if parts.is_canonical else torch.reshape
    found: Any = None
    if not parts.is_canonical:
        found = getattr(torch.ops, parts.namespace)
        for attribute in parts.attributes:
            found = getattr(found, attribute, None)
    elif parts.name in reference_kernels.__all__:
        found = getattr(reference_kernels, parts.name)
    if found is None:
        raise CodegenError(f"no op of a loop's body is called {target!r}")
    return found  # type: ignore[no-any-return]


def _literal(arg: Arg) -> Arg:
    """What is no name of a value, decoded."""
    if isinstance(arg, tuple):
        return tuple(map(_literal, arg))
    kind = arg_kind(arg)
    if kind is None or kind is ArgKind.VALUE:
        return arg
    if kind is ArgKind.NUMBER:
        return decode_number(arg)
    text = arg_text(arg)
    return getattr(torch, text) if text in DTYPE_BYTES else text


def _calls(scan: Scan) -> tuple[_Call, ...]:
    needed = {*scan.outs, *scan.constant_names}
    found: list[_Call] = []
    for op in reversed(scan.body.ops):
        drops = tuple(name for name in dict.fromkeys((*op.tensors, *filter(None, op.outs))) if name not in needed)
        needed.update(op.tensors)
        kwargs = {key: _literal(arg) for key, arg in op.kwargs.items()}
        found.append(_Call(_function(op.target), tuple(map(_literal, op.args)), kwargs, op.outs, drops))
    return tuple(reversed(found))


@SESSION.cached(256)
def _compiled(text: str) -> tuple[Scan, tuple[_Call, ...]]:
    scan = parse_scan(text)
    return scan, _calls(scan)


def _given(arg: Arg, values: Values) -> Any:
    if isinstance(arg, str):
        return values[arg_text(arg)] if arg_kind(arg) is ArgKind.VALUE else arg
    if isinstance(arg, tuple) and arg and not isinstance(arg[0], (int, float)):
        return [_given(item, values) for item in arg]
    return arg


def _step(calls: Sequence[_Call], values: Values, device: torch.device) -> None:
    for call in calls:
        kwargs = {key: _given(arg, values) for key, arg in call.kwargs.items()}
        args = [_given(arg, values) for arg in call.args]
        if not any(isinstance(arg, (Tensor, list)) for arg in args):
            if call.run is reference_kernels.constant:
                made: Any = reference_kernels.constant(*args).to(device)
            else:
                made = call.run(*args, **kwargs, device=device)
        else:
            made = call.run(*args, **kwargs)
        for name, value in zip(call.outs, made if isinstance(made, (tuple, list)) else (made,), strict=True):
            if name is not None:
                values[name] = value
        for name in call.drops:
            values.pop(name, None)


def run_scan(xs: Sequence[Tensor], carries: Sequence[Tensor], constants: Sequence[Tensor], text: str) -> list[Tensor]:
    """Runs a loop (`ir.model.scan`).

    Args:
        xs: per-step inputs, each [steps, ...].
        carries: the carried values as they begin.
        constants: the same in every step.
        text: the loop.
    Returns:
        Carried values as they end, stacked results, histories, sums.
    """
    scan, calls = _compiled(text)
    like = (*xs, *carries, *constants)[0]
    made = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=like.device) for spec in scan.out_specs()]
    ends, rest = made[: scan.carries], made[scan.carries :]
    stacks, rest = rest[: scan.results], rest[scan.results :]
    kept, sums = rest[: len(scan.histories)], rest[len(scan.histories) :]
    for history, index in zip(kept, scan.histories, strict=True):
        history[scan.steps if scan.reverse else 0].copy_(carries[index])
    values: Values = dict(zip(scan.constant_names, constants, strict=True))
    values.update(zip(scan.carry_names, carries, strict=True))
    order = range(scan.steps - 1, -1, -1) if scan.reverse else range(scan.steps)
    for count, t in enumerate(order):
        values.update(zip(scan.input_names, (x.select(0, t) for x in xs), strict=True))
        _step(calls, values, like.device)
        nexts = [values[name] for name in scan.next_names]
        for stack, name in zip(stacks, scan.result_names, strict=True):
            stack.select(0, t).copy_(values[name])
        for history, index in zip(kept, scan.histories, strict=True):
            history.select(0, t if scan.reverse else t + 1).copy_(nexts[index])
        for total, name in zip(sums, scan.addend_names, strict=True):
            total.add_(values[name]) if count else total.copy_(values[name])
        values = dict(zip(scan.constant_names, constants, strict=True))
        values.update(zip(scan.carry_names, nexts, strict=True))
        del nexts
    for end, name in zip(ends, scan.carry_names, strict=True):
        end.copy_(values[name])
    return made


def scan(
    xs: Sequence[Tensor], carries: Sequence[Tensor], constants: Sequence[Tensor], text: str
) -> list[Tensor] | Tensor:
    """`run_scan`; the tensor itself where there is one result.

    Args:
        xs, carries, constants, text: as `run_scan` takes them.
    """
    made = run_scan(xs, carries, constants, text)
    return made if len(made) > 1 else made[0]
