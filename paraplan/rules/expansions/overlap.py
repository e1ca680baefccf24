"""Products in pieces beside the collective that feeds or follows them: tensor parallelism's communication overlapped.

A product whose rows are gathered first, or whose partial rows are reduced and scattered afterwards, waits for the whole
collective. Rows do not depend on each other, so both can go in `pieces`, every piece a part of *each* rank's rows:

    gather.a.4    rows x[a, ...] lie sharded over the axis. Four gathers, each of a fourth of every rank's rows, are
                  issued at once; each product begins once its own has arrived and writes its rows of the result.
    scatter.a.4   contracted dims lie sharded. Four products; each one's partial rows are reduced and scattered while
                  the next is computed, and the four parts of this rank's rows are joined.

One piece's collective is exposed instead of all of it. Sums are those of the plain strategies, row by row, so results
are the same. The strategies are not listed with the others (a planner's search would be as many times longer): plans
name them, and `planner.passes.overlap_products` writes them where they pay.

Sources: Wang et al. 2023, Overlap Communication with Dependent Computation via Decomposition (ASPLOS); Megatron-LM's
`--tp-comm-overlap` (pipelined all-gather and reduce-scatter of Transformer Engine).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from paraplan.ir.machine.mesh import S
from paraplan.ir.model.graph import Op
from paraplan.rules.choices import AxisChoice, shard_dim
from paraplan.rules.dims import OpDims

GATHER, SCATTER = "gather", "scatter"
PRODUCTS = {"paraplan.linear": ("n", "k"), "paraplan.linear_grad_input": ("k", "n")}
"""Ops that can, with the dims of their results' columns and of what they contract."""
_KEY = re.compile(rf"({GATHER}|{SCATTER})\.([a-z])\.(\d+)$")


@dataclass(frozen=True)
class Pieces:
    """What a key says: which collective, over the rows of which dim, in how many pieces."""

    collective: str
    dim: str
    count: int

    @property
    def key(self) -> str:
        """The text."""
        return f"{self.collective}.{self.dim}.{self.count}"


def parse_pieces(key: str) -> Pieces | None:
    """A key without its reduction; None where it is another strategy's."""
    match = _KEY.match(key)
    return Pieces(match[1], match[2], int(match[3])) if match else None


def pieces_choice(op: Op, dims: OpDims, key: str, axis_size: int) -> AxisChoice | None:
    """What an op with such a key does along an axis; None where it cannot.

    Args:
        op, dims: the op and its named dims.
        key: a strategy's along the axis, without the reduction.
        axis_size: ranks; 1 asks for what the key says, whatever divides.
    """
    pieces = parse_pieces(key)
    if pieces is None or op.target not in PRODUCTS or pieces.dim not in dims.inputs[0][:-1]:
        return None
    if pieces.count < 2 or dims.sizes[pieces.dim] % (axis_size * pieces.count):
        return None
    columns, contracted = PRODUCTS[op.target]
    dim = columns if pieces.collective == GATHER else contracted
    plain = shard_dim(dims, dim)
    if plain is None or dims.sizes[dim] % axis_size:
        return None
    rows = S(dims.inputs[0].index(pieces.dim))
    if pieces.collective == GATHER:
        return replace(plain, key=key, inputs=(rows, *plain.inputs[1:]), dim="")
    return replace(plain, key=key, outputs=(rows,), dim="")
