"""Small parameters gathered for several segments at once, one group of segments ahead.

The segments an action passes are divided into groups: as many as it takes until what is gathered for them is enough
for a bundle (`bundle.is_full`). The next group's collective is issued once this group's has arrived, before its
segments are run, so it is under way beside them; what is gathered is given up by the last segment that reads it. A
parameter is gathered for each segment that reads it, as the planner prices it. At most two groups exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paraplan.ir.lower.bundle import Key, bundle_key, is_full
from paraplan.ir.lower.parcels import Parcel, Parcels, local_bytes
from paraplan.ir.lower.parted import PartedCalls

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
    """

    def __init__(self, mesh_shape: Dims, calls: PartedCalls, most_bytes: int) -> None:
        self._mesh_shape, self._most_bytes = mesh_shape, most_bytes
        self._parcels = Parcels("gather", mesh_shape, calls, overwrites=False)
        self._groups: list[tuple[Visit, ...]] = []
        self._begun: list[Callable[[], None]] = []

    def start(self, visits: Sequence[Visit]) -> None:
        """An action begins that runs these segments."""
        self._groups = grouped(visits, self._mesh_shape, self._most_bytes)
        self._begin()

    def reach(self, segment: int) -> None:
        """A segment is run next: what is gathered for it has arrived, and the next group's is under way."""
        if self._groups and self._groups[0][0].segment == segment:
            for end in self._begun:
                end()
            self._groups.pop(0)
            self._begin()

    def _begin(self) -> None:
        together: dict[Key, list[Parcel]] = {}
        for visit in self._groups[0] if self._groups else ():
            for parcel in visit.parcels:
                key = bundle_key(parcel.spec.dtype, parcel.path)
                assert key is not None, "only bundled gathers are made ahead"
                together.setdefault(key, []).append(parcel)
        self._begun = [self._parcels.begin(parcels) for parcels in together.values()]


def grouped(visits: Sequence[Visit], mesh_shape: Dims, most_bytes: int) -> list[tuple[Visit, ...]]:
    """Visits in order, in groups that gather a full bundle or end with the action."""
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
