"""The collectives that rank programs issue, one record each.

Every collective runs over one mesh axis of n ranks, on a contiguous tensor per rank, of whose dim 0 alone blocks are
sent to different ranks or put one after another:

                     splits its input   joins what arrives   sums or maxima   rows of the result
    all_reduce       -                  -                    yes              the input's
    all_gather       -                  yes                  -                times n
    reduce_scatter   yes                -                    sums             over n
    all_to_all       yes                yes                  -                the input's
    permute          -                  -                    -                the input's
    route            yes, unequally     yes, unequally       -                given

All passes ask a record for these properties. A new collective is a record here, a time in
`cost_models.communication.collectives.TIMES_S` and an implementation in
`runtime.transport.collectives.IMPLEMENTATIONS`, under the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paraplan.ir.machine.mesh import Partial, Placement, Replicate, Shard


@dataclass(frozen=True, kw_only=True)
class Collective:
    """What a collective does to a rank's tensor.

    Attributes:
        name: what `Instr.target`, profiles and reports call it.
        sent_share: of n, the elements that a rank sends per element it puts in.
        change: the change of placement along its axis that it makes, by which resharding finds it; None for one that
            only expansions issue.
        reductions: what it can reduce by, the usual one first; none where it does not reduce.
        splits: whether its input is n blocks along dim 0, one for each rank.
        joins: whether its result is n blocks along dim 0, one from each rank.
        in_place: whether it works in its result, which begins as a copy of the input or is the input. Others read
            their input until they are done, so their waits hold it.
        uneven: whether blocks differ in rows. Its instructions have four more arguments: the rows sent to each rank and
            those received from each (tensors), the rows of the result (zeros after what is received), and the rows sent
            that are priced.
    """

    name: str
    sent_share: Callable[[int], float]
    change: tuple[type[Placement], type[Placement]] | None = None
    reductions: tuple[str, ...] = ()
    splits: bool = False
    joins: bool = False
    in_place: bool = False
    uneven: bool = False

    @property
    def is_gather(self) -> bool:
        """Whether a rank sends one block to all, and ends with everyone's."""
        return self.joins and not self.splits

    @property
    def is_elementwise(self) -> bool:
        """Whether an element of the result depends on elements at its own place alone."""
        return not self.splits and not self.joins

    @property
    def reduction(self) -> str:
        """What it reduces by where nothing else is said; "" where it does not reduce."""
        return self.reductions[0] if self.reductions else ""

    def result_shape(self, shape: Sequence[int], n: int, rows: int = 0) -> tuple[int, ...]:
        """The shape of its result.

        Args:
            shape: of the input.
            n: ranks of the axis.
            rows: of the result where blocks are uneven.
        """
        if self.is_elementwise:
            return tuple(shape)
        if not self.uneven:
            rows = shape[0] * (n if self.joins else 1) // (n if self.splits else 1)
        return (rows, *shape[1:])


ALL_REDUCE = Collective(
    name="all_reduce",
    sent_share=lambda n: 2 * (n - 1) / n,
    change=(Partial, Replicate),
    reductions=("sum", "max"),
    in_place=True,
)
"""The reduction of all ranks' tensors, on all of them."""

ALL_GATHER = Collective(name="all_gather", sent_share=lambda n: n - 1.0, change=(Shard, Replicate), joins=True)
"""All ranks' tensors one after another, on all of them."""

REDUCE_SCATTER = Collective(
    name="reduce_scatter", sent_share=lambda n: (n - 1) / n, change=(Partial, Shard), reductions=("sum",), splits=True
)
"""Rank r has the sum of all ranks' r-th blocks."""

ALL_TO_ALL = Collective(
    name="all_to_all", sent_share=lambda n: (n - 1) / n, change=(Shard, Shard), splits=True, joins=True
)
"""Rank r has all ranks' r-th blocks one after another."""

PERMUTE = Collective(name="permute", sent_share=lambda n: 1.0)
"""Each rank's tensor goes to the next rank of the axis, the last one's to the first."""

ROUTE = Collective(name="route", sent_share=lambda n: (n - 1) / n, splits=True, joins=True, uneven=True)
"""An all-to-all of unequal blocks, into a buffer."""

COLLECTIVES = {record.name: record for record in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, PERMUTE, ROUTE)}
"""By name."""
