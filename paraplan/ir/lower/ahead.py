"""Parameters gathered for several segments at once, one group of segments ahead.

The segments to be passed are divided into groups: as many as it takes until what is gathered for them is enough for a
bundle (`bundle.is_full`). The next group's collectives are issued once this group's have arrived, before its segments
are run, so they are under way beside them. Small parameters that move alike share a collective, a large one goes alone.

Two uses. For the segments of one action: small parameters, given up by the last segment of the group that reads them; a
parameter is gathered for each segment that reads it, as the planner prices it, and at most two groups exist at a time.
For the segments of a step, in the order in which they first run: stored copies that rest sharded between steps
(`ParamLayouts.ahead`), which then stay to the step's end, so that more groups may be under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paraplan.ir.lower.bundle import is_full
from paraplan.ir.lower.parcels import Parcel, Parcels, local_bytes, travels_with
from paraplan.ir.lower.parted import PartedCalls
from paraplan.ir.rank_program import BlockRole

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Visit:
    """A segment about to be run, and what is gathered for it."""

    segment: int
    parcels: tuple[Parcel, ...]


class Gathers:
    """Writes the steps that gather.

    Args:
        mesh_shape: extended.
        calls: writes steps.
        most_bytes: the plan's bound on bundles.
        stem: of block names.
        under_way: groups whose gathers have begun when a segment runs, its own not counted.
    """

    def __init__(
        self, mesh_shape: Dims, calls: PartedCalls, most_bytes: int, stem: str = "gather", under_way: int = 1
    ) -> None:
        self._mesh_shape, self._most_bytes, self._under_way = mesh_shape, most_bytes, under_way
        self._parcels = Parcels(stem, BlockRole.GATHER, mesh_shape, calls, overwrites=False)
        self._groups: list[tuple[Visit, ...]] = []
        self._begun: list[list[Callable[[], None]]] = []

    def start(self, visits: Sequence[Visit]) -> None:
        """These segments are run next, in this order."""
        self._groups = grouped(visits, self._mesh_shape, self._most_bytes)
        self._begin()

    def reach(self, segment: int) -> None:
        """A segment is run next: what is gathered for it has arrived, and the next groups' is under way."""
        if self._groups and self._groups[0][0].segment == segment:
            for end in self._begun.pop(0):
                end()
            self._groups.pop(0)
            self._begin()

    def _begin(self) -> None:
        for group in self._groups[len(self._begun) : self._under_way]:
            together: dict[object, list[Parcel]] = {}
            for parcel in (parcel for visit in group for parcel in visit.parcels):
                key = travels_with(parcel.spec, parcel.path, self._mesh_shape)
                together.setdefault(parcel.result if key is None else key, []).append(parcel)
            self._begun.append([self._parcels.begin(parcels) for parcels in together.values()])


def grouped(visits: Sequence[Visit], mesh_shape: Dims, most_bytes: int) -> list[tuple[Visit, ...]]:
    """Visits in order, in groups that gather a full bundle or end with the last."""
    sizes = [
        sum(local_bytes(parcel.spec, parcel.path[-1].after, mesh_shape) for parcel in visit.parcels) for visit in visits
    ]
    widest = max(sizes, default=0)
    groups: list[tuple[Visit, ...]] = []
    group: list[Visit] = []
    nbytes = 0
    for visit, size in zip(visits, sizes, strict=True):
        group.append(visit)
        nbytes += size
        if is_full(nbytes, widest, most_bytes):
            groups.append(tuple(group))
            group, nbytes = [], 0
    return [*groups, tuple(group)] if group else groups
