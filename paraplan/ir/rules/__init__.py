"""Sharding rules: planners enumerate them, verify checks them, lowering applies them."""

from paraplan.ir.rules import attention, creation, lookup, matmul, norms, pointwise, reductions, views
from paraplan.ir.rules.dims import OpDef, OpDims, known_targets, op_def

__all__ = [
    "OpDef", "OpDims", "attention", "creation", "known_targets", "lookup", "matmul", "norms", "op_def", "pointwise",
    "reductions", "views",
]  # fmt: skip
