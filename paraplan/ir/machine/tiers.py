"""The tiers: memories outside of the device where tensors may be.

A tier is a record here and the fields of `NodeGroup` that it names: its link (a field of the tier's name) and its room.
Passes, prices, reports and the runtime ask the record. The host's processor reads and updates in place what is in a
tier that is memory; what is in files comes `through` a memory to be read or updated, and goes back so.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TierKind:
    """What is known of a tier.

    Attributes:
        name: of the tier, and of the field of `NodeGroup` that describes its link.
        noun, where: how it is spoken of: "the host", "on the host".
        label: what reports of a cluster call it.
        room: the field of `NodeGroup` with the bytes of a node that may be filled.
        rate: the field with the bandwidth at which parameters are updated there; "" where none are.
        source: the field that says where the rate comes from.
        through: the memory through which copies go, and where the host updates what comes; "": it is memory itself.
        when_full: what to do where a copy there fails.
    """

    name: str
    noun: str
    where: str
    label: str
    room: str
    when_full: str
    rate: str = ""
    source: str = ""
    through: str = ""

    @property
    def is_memory(self) -> bool:
        """Whether tensors there are read in place, not in files."""
        return not self.through

    @property
    def updated_in(self) -> str:
        """The tier in which the host updates what is there."""
        return self.through or self.name

    @property
    def way(self) -> tuple[str, ...]:
        """The tiers on the way there from a device."""
        return (self.through, self.name) if self.through else (self.name,)


TIERS: dict[str, TierKind] = {
    each.name: each
    for each in (
        TierKind(
            "host",
            "the host",
            "on the host",
            "host memory",
            "host_memory_bytes",
            "free host memory",
            rate="host_memory_bytes_per_s",
            source="host_memory_source",
        ),
        TierKind(
            "disk",
            "disk",
            "on disk",
            "disk",
            "disk_bytes",
            "free space or name another folder",
            through="host",
        ),
    )
}
"""By name, the nearest first."""

NEAREST = next(iter(TIERS))
"""What is meant where no tier is named."""


def is_in_files(tier: str) -> bool:
    """Whether what is there is in files; not so on the device ("")."""
    return bool(tier) and not TIERS[tier].is_memory
