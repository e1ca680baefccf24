"""Sharding rules: planners enumerate them, verify checks them, lowering applies them."""

from paraplan.ir.rules import (
    attention,
    batch_norm,
    convolution,
    creation,
    elementwise,
    experts,
    float8,
    indexing,
    lookup,
    matmul,
    norms,
    pointwise,
    pooling,
    reductions,
    sorting,
    views,
)
from paraplan.ir.rules.dims import OpDef, OpDims, known_targets, op_def

__all__ = [
    "OpDef", "OpDims", "attention", "batch_norm", "convolution", "creation", "elementwise", "experts", "float8",
    "indexing", "known_targets", "lookup", "matmul", "norms", "op_def", "pointwise", "pooling",
    "reductions", "sorting", "views",
]  # fmt: skip
