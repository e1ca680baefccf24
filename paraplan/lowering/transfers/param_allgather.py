"""Parameters gathered for several segments at once, one group of segments ahead.

The segments to be passed are divided into groups: as many as it takes until what is gathered for them is enough for a
bundle (`bundle.is_full`). The next group's collectives are issued once this group's have arrived, before its segments
are run, so they are under way beside them. Small parameters that move alike share a collective, a large one goes alone.

Two uses. For the segments of one action: given up by the last segment of the group that reads them; a parameter is
gathered for each segment that reads it, as the planner prices it, and at most two groups exist at a time. Large ones,
where the plan gathers them ahead (`Plan.params_ahead`), wait for no others: each segment's are a group (`each_alone`).
For the segments of a step, in the order in which they first run: stored copies that rest sharded between steps
(`ParamLayouts.ahead`), which then stay to the step's end, so that more groups may be under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paraplan.lowering.blocks.bundle import is_full
from paraplan.lowering.transfers.bundled_transfers import Parcel, ParcelBlocks, local_bytes, travels_with
from paraplan.lowering.transfers.flights import Stop

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Visit:
    """A segment about to be run, and what is gathered for it."""

    segment: int
    parcels: tuple[Parcel, ...]


def gather_groups(visits: Sequence[Visit], blocks: ParcelBlocks, most_bytes: int) -> Iterator[Stop]:
    """The groups of segments that are run next, in this order, with what is gathered for each.

    Args:
        visits: the segments.
        blocks: that gather.
        most_bytes: the plan's bound on bundles.
    """
    for group in grouped(visits, blocks.mesh_shape, most_bytes):
        together: dict[object, list[Parcel]] = {}
        for parcel in (parcel for visit in group for parcel in visit.parcels):
            key = travels_with(parcel.spec, parcel.path, blocks.mesh_shape)
            together.setdefault(parcel.result if key is None else key, []).append(parcel)
        yield Stop(group[0].segment, tuple(blocks.flight(parcels) for parcels in together.values()))


def each_alone(visits: Sequence[Visit], blocks: ParcelBlocks) -> Iterator[Stop]:
    """Large parameters, one segment's after another's.

    Args:
        visits: the segments.
        blocks: that gather.
    """
    for visit in visits:
        yield Stop(visit.segment, tuple(blocks.flight([parcel]) for parcel in visit.parcels))


def grouped(visits: Sequence[Visit], mesh_shape: Dims, most_bytes: int) -> list[tuple[Visit, ...]]:
    """Visits in order, in groups that gather a full bundle or end with the last.

    Args:
        visits: of parameters, in order.
        mesh_shape: size of every axis.
        most_bytes: of a bundle.
    """
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
