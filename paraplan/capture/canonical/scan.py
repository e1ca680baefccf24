"""`paraplan.scan` for tracing, and its differentiable form.

A step of a loop with its gradient travels as text in the call of `scan`, a function of tensors; the joint trace records
two loops, `ir.model.scan_gradient` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paraplan.capture.canonical.canonical import define, ops
from paraplan.ir.model.scan import parse_scan, scan_text
from paraplan.ir.model.scan_gradient import Gradient, InputSource, LateGradient, forward_alone, gradient_of, parse_step
from paraplan.kernels.scan_kernels import run_scan


def _shape(xs: Sequence[Tensor], carries: Sequence[Tensor], constants: Sequence[Tensor], body: str) -> list[Tensor]:
    like = (*xs, *carries, *constants)[0]
    return [like.new_empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in parse_scan(body).out_specs()]


define("scan(Tensor[] xs, Tensor[] carries, Tensor[] constants, str body) -> Tensor[]", run_scan, _shape)


class _Scan(torch.autograd.Function):
    """Inputs: the step's text, then per-step inputs, carries, constants; outputs: carries as they end, results."""

    @staticmethod
    def forward(ctx: Any, text: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        step = parse_step(text)
        first, last = step.inputs, step.inputs + step.carries
        xs, carries, constants = tensors[:first], tensors[first:last], tensors[last:]
        ctx.step, ctx.count = step, len(tensors)
        if not any(ctx.needs_input_grad):
            return tuple(ops.scan(xs, carries, constants, scan_text(forward_alone(text))))
        found = ctx.found = gradient_of(text, tuple(bool(need) for need in ctx.needs_input_grad[1:]))
        made = ops.scan(xs, carries, constants, scan_text(found.forward))
        stacked, histories = made[step.carries :][: found.forward.results], made[step.carries + found.forward.results :]
        ctx.save_for_backward(*tensors, *stacked, *histories)
        results = [_sourced(source, found, xs, stacked, histories, ()) for source in found.outputs]
        ends = [end.detach() if end.is_floating_point() else end for end in made[: step.carries]]
        ctx.mark_non_differentiable(*(x for x in (*ends, *results) if not x.is_floating_point()))
        return (*ends, *results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        step, found = ctx.step, ctx.found
        first, last = step.inputs, step.inputs + step.carries
        saved = ctx.saved_tensors
        tensors, kept = saved[: ctx.count], saved[ctx.count :]
        stacked, histories = kept[: found.forward.results], kept[found.forward.results :]
        tangents = grads[step.carries :]

        def of(source: InputSource) -> Tensor:
            return _sourced(source, found, tensors[:first], stacked, histories, tangents)

        begins = [grad for grad, there in zip(grads, step.tangents[: step.carries], strict=False) if there]
        constants = [tensors[last + index] for index in found.given]
        made = ops.scan([*map(of, found.sources)], begins, constants, scan_text(found.backward))
        ends, rest = made[: len(begins)], made[len(begins) :]
        results, sums = rest[: found.backward.results], rest[found.backward.results :]
        next_end = iter(ends)
        of_carries = [next(next_end) if there else None for there in step.tangents[: step.carries]]
        of_constants: list[Tensor | None] = [None] * step.constants
        for index, total in zip(found.constants, sums, strict=True):
            of_constants[index] = total
        for each in found.late:
            of_constants[each.constant] = _late(
                each, results[each.result], None if each.source is None else of(each.source)
            )
        of_inputs = [None if index < 0 else results[index] for index in found.inputs]
        needs = ctx.needs_input_grad[1:]
        kept_grads = zip((*of_inputs, *of_carries, *of_constants), needs, strict=True)
        return (None, *(grad if need else None for grad, need in kept_grads))


def _late(late: LateGradient, x: Tensor, operand: Tensor | None) -> Tensor:
    if operand is None:
        return torch.ops.aten.sum.dim_IntList(x, [0, *(1 + dim % (x.dim() - 1) for dim in late.dims)])
    return ops.linear_grad_weight(x, operand, late.transposed)


def _sourced(
    source: InputSource,
    found: Gradient,
    xs: Sequence[Tensor],
    stacked: Sequence[Tensor],
    histories: Sequence[Tensor],
    tangents: Sequence[Tensor],
) -> Tensor:
    if source.kind in ("before", "after"):
        whole, steps = histories[source.number], found.forward.steps
        start = 0 if (source.kind == "before") != found.forward.reverse else 1
        return torch.ops.aten.slice.Tensor(whole, 0, start, start + steps, 1)
    group = {"input": xs, "result": stacked, "tangent": tangents}[source.kind]
    return group[source.number]


def scan(xs: Sequence[Tensor], carries: Sequence[Tensor], constants: Sequence[Tensor], step: str) -> tuple[Tensor, ...]:
    """`paraplan.scan` over one step's text, differentiable: carries as they end, then stacked results.

    Args:
        xs: per-step inputs, each [steps, ...].
        carries: the carried values as they begin.
        constants: the same in every step.
        step: a step's joint graph, as `ir.model.scan_gradient.parse_step` reads it.
    """
    return _Scan.apply(step, *xs, *carries, *constants)


HEAVY = frozenset({scan})
