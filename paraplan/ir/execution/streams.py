"""Streams of a rank: queues of work that run beside one another, and the channels messages keep their order on."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class StreamKind(Enum):
    """What a stream does."""

    COMPUTE = "compute"
    COMMUNICATION = "comm"
    COPY = "copy"
    UPDATE = "update"
    MESSAGE = "p2p"
    HOST = "host"


class Channel(NamedTuple):
    """One direction between two meshes, by the first device of each."""

    source: int
    dest: int

    def __str__(self) -> str:
        return f"{self.source}>{self.dest}"


class Stream(str):
    """A stream; as text what timelines call it: "compute", "comm:in_node", "copy:host:out", "update:host", "p2p:0>4".

    Attributes:
        kind: what it does.
        level: of the link that its collectives go over.
        tier: that its copies go to or come from, or that updates.
        channel: of its messages.
    """

    kind: StreamKind
    level: str
    tier: str
    channel: Channel | None

    def __new__(
        cls, kind: StreamKind, *, level: str = "", tier: str = "", way: str = "", channel: Channel | None = None
    ) -> Stream:
        parts = (kind.value, level, tier, way, "" if channel is None else str(channel))
        made = super().__new__(cls, ":".join(filter(None, parts)))
        made.kind, made.level, made.tier, made.channel = kind, level, tier, channel
        return made


COMPUTE = Stream(StreamKind.COMPUTE)
HOST = Stream(StreamKind.HOST)
"""The thread that issues kernels."""
OUT, IN = "out", "in"
"""The ways of copies: to a tier, and from it."""


def comm_stream(level: str) -> Stream:
    """The stream of collectives over links of a level."""
    return Stream(StreamKind.COMMUNICATION, level=level)


def copy_stream(tier: str, way: str) -> Stream:
    """The stream of copies to (`OUT`) or from (`IN`) a tier."""
    return Stream(StreamKind.COPY, tier=tier, way=way)


def update_stream(tier: str) -> Stream:
    """The stream of updates done on a tier."""
    return Stream(StreamKind.UPDATE, tier=tier)


def message_stream(channel: Channel) -> Stream:
    """The stream of messages from one mesh to another."""
    return Stream(StreamKind.MESSAGE, channel=channel)
