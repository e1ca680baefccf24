"""Linear layers in float8 (`kernels.float8_kernels`).

A tensor's scale is a maximum over it, so shards of the tensor leave a partial maximum, which is reduced at once: four
bytes. A cast is elementwise once its scale is known, so a weight may be cast in shards and gathered at a byte an
element. Products are those of `matmul`; their results are sums in bfloat16, partial ones too. Kernels contract 16
elements at a time: a shard of the columns or of what is contracted is a multiple of that.

Microbatches are not ranks: a maximum over those to come cannot be had, so each has scales of its own (`apart`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from paraplan.ir.execution.rank_program import LocalValue
from paraplan.ir.model.graph import Arg, Op
from paraplan.rules.dims import OpDims, Specs, dim_names, register, sizes_of, uneven
from paraplan.rules.workspace.workspace import Values

ALIGNED = 16
"""Of columns and contracted elements."""
PARTS, PART_ELEMENTS = 1024, 4096
"""The most parts of a tensor whose maxima are found at once on CUDA, a power of two, and the least elements of one."""
_SCALARS = 64
"""The numbers a scale is made of."""


def _scale_workspace(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    return _SCALARS


@register("paraplan.float8_scale", workspace=_scale_workspace)
def scale(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b -> `, a maximum of magnitudes: zeros are neutral."""
    names = dim_names(len(inputs[0].shape))
    sizes = sizes_of((names, inputs[0].shape))
    return uneven(OpDims((names,), ((),), sizes, dict.fromkeys(names, "max"), apart=True))


@register("paraplan.float8_cast")
def cast(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b,  -> a b`."""
    names = dim_names(len(inputs[0].shape))
    return uneven(OpDims((names, ()), (names,), sizes_of((names, inputs[0].shape))))


@register("paraplan.float8_cast_both")
def cast_both(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b k,  -> a b k, k a b`."""
    names = dim_names(len(inputs[0].shape))
    return uneven(OpDims((names, ()), (names, (names[-1], *names[:-1])), sizes_of((names, inputs[0].shape))))


def num_parts(x: LocalValue | None) -> int:
    """Of how many parts of a tensor maxima are found on CUDA."""
    assert x is not None
    return min(-(-math.prod(x.shape) // PART_ELEMENTS), PARTS)


def _turned(inputs: Values) -> int:
    """Bytes of the weight's transpose."""
    value = inputs[1]
    assert value is not None
    return value.nbytes


def filled(call: Values) -> tuple[LocalValue, ...]:
    """The transposes [k, ...] a weight's gradient is made of that are copied, for their rows are no multiple of 16."""
    found = [value for value in call[:2] if value is not None]
    return tuple(value for value in found if math.prod(value.shape[1:]) % ALIGNED)


def _linear_workspace(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    return _turned(inputs) if args[4] else 0


def _grad_input_workspace(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    return 0 if args[4] else _turned(inputs)


def _grad_weight_workspace(inputs: Values, outputs: Values, args: tuple[Arg, ...]) -> int:
    rows = [(value.shape[0], math.prod(value.shape[1:])) for value in filled(inputs)]
    return sum(columns * (count + -count % ALIGNED) for columns, count in rows)


def _dims(
    left: tuple[str, ...],
    right: tuple[str, ...],
    out: tuple[str, ...],
    inputs: Specs,
    leads: tuple[str, ...],
    contracted: tuple[str, ...],
) -> OpDims:
    sizes = sizes_of((left, inputs[0].shape), (right, inputs[1].shape))
    blocks = {name: size // ALIGNED if name in "kn" else size for name, size in sizes.items()}
    dims = OpDims((left, right, (), ()), (out,), blocks, dict.fromkeys(contracted, "sum"))
    return replace(dims, uneven=frozenset(leads))


@register("paraplan.float8_linear", workspace=_linear_workspace)
def linear(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b k, n k, , -> a b n`."""
    leads = dim_names(len(inputs[0].shape) - 1, skip="kn")
    return _dims((*leads, "k"), _weight(op), (*leads, "n"), inputs, leads, ("k",))


@register("paraplan.float8_linear_grad_input", workspace=_grad_input_workspace)
def linear_grad_input(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b n, n k, , -> a b k`."""
    leads = dim_names(len(inputs[0].shape) - 1, skip="kn")
    return _dims((*leads, "n"), _weight(op), (*leads, "k"), inputs, leads, ("n",))


@register("paraplan.float8_linear_grad_weight", workspace=_grad_weight_workspace)
def linear_grad_weight(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`n a b, k a b, , -> n k`: of transposes, all but their first dims contracted."""
    leads = dim_names(len(inputs[0].shape) - 1, skip="kn")
    return _dims(("n", *leads), ("k", *leads), _weight(op), inputs, leads, leads)


def _weight(op: Op) -> tuple[str, str]:
    return ("k", "n") if op.args[4] else ("n", "k")
