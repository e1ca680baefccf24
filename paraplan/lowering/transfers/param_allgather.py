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

from collections.abc import Iterator, Mapping, Sequence

from paraplan.lowering.blocks.bundle import bundle_key, is_full, local_bytes
from paraplan.lowering.transfers.bundled_transfers import BundleBlocks, BundledValue
from paraplan.lowering.transfers.transfer_queue import Consumer

Dims = tuple[int, ...]
Gathers = Mapping[int, Sequence[BundledValue]]
"""What is gathered for segments, in the order in which they are run."""


def gather_groups(gathers: Gathers, blocks: BundleBlocks, most_bytes: int) -> Iterator[Consumer]:
    """The groups of segments that are run next, in this order, with what is gathered for each.

    Args:
        gathers: for the segments.
        blocks: that gather.
        most_bytes: the plan's bound on bundles.
    """
    for group in grouped(gathers, blocks.mesh_shape, most_bytes):
        together: dict[object, list[BundledValue]] = {}
        for value in (value for segment in group for value in gathers[segment]):
            key = bundle_key(value.spec, value.path, blocks.mesh_shape)
            together.setdefault(value.result if key is None else key, []).append(value)
        yield Consumer(group[0], tuple(blocks.transfer(values) for values in together.values()))


def each_alone(gathers: Gathers, blocks: BundleBlocks) -> Iterator[Consumer]:
    """Large parameters, one segment's after another's.

    Args:
        gathers: for the segments.
        blocks: that gather.
    """
    for segment, values in gathers.items():
        yield Consumer(segment, tuple(blocks.transfer([value]) for value in values))


def grouped(gathers: Gathers, mesh_shape: Dims, most_bytes: int) -> list[tuple[int, ...]]:
    """Segments in order, in groups that gather a full bundle or end with the last.

    Args:
        gathers: for the segments.
        mesh_shape: size of every axis.
        most_bytes: of a bundle.
    """
    sizes = {
        segment: sum(local_bytes(value.spec, value.path[-1].after, mesh_shape) for value in values)
        for segment, values in gathers.items()
    }
    widest = max(sizes.values(), default=0)
    groups: list[tuple[int, ...]] = []
    group: list[int] = []
    nbytes = 0
    for segment, size in sizes.items():
        group.append(segment)
        nbytes += size
        if is_full(nbytes, widest, most_bytes):
            groups.append(tuple(group))
            group, nbytes = [], 0
    return [*groups, tuple(group)] if group else groups
