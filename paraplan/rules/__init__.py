"""Sharding rules: planners enumerate them, verification checks them, lowering applies them.

An op has a line over named dims, by family in `tensors/` and `layers/`; its bytes, kernels and expansions lie beside.
No torch; open to every room above `ir`.
"""

from paraplan.rules.dims import OpDef, OpDims, known_targets, op_def
from paraplan.rules.layers import (
    attention,
    batch_norm,
    convolution,
    elementwise,
    experts,
    float8,
    lookup,
    norms,
    pooling,
    scan,
)
from paraplan.rules.tensors import creation, indexing, matmul, pointwise, reductions, sorting, views

__all__ = [
    "OpDef",
    "OpDims",
    "attention",
    "batch_norm",
    "convolution",
    "creation",
    "elementwise",
    "experts",
    "float8",
    "indexing",
    "known_targets",
    "lookup",
    "matmul",
    "norms",
    "op_def",
    "pointwise",
    "pooling",
    "reductions",
    "scan",
    "sorting",
    "views",
]
