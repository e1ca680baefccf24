"""When messages between ranks of different stages begin and end.

Both ends post a message as they get to it. It begins once both have and the messages before it on its channel are
through, as NCCL's do (a send and a receive are one kernel on two devices); a channel is one direction between two
meshes, and has a stream of its own on both, beside those of collectives. A message of several parts begins with the
last of them, which an end may have to cut out first, and takes the time of the end that moves most of them. Limits:
channels do not slow each other down where they share a link.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paraplan.ir.errors import CostModelError
from paraplan.ir.execution.streams import Channel

Key = tuple[str, int]
"""A message's name, and its microbatch."""


@dataclass
class _End:
    """One end of a message: when the last of its parts was posted, what they take, and how many are still to come."""

    at: float
    seconds: float
    missing: int


@dataclass
class _Channel:
    """One direction between two meshes: what both ends have posted, in order, and when the last message ended."""

    posted: tuple[dict[Key, _End], dict[Key, _End]] = field(default_factory=lambda: ({}, {}))
    order: tuple[list[Key], list[Key]] = field(default_factory=lambda: ([], []))
    begun: int = 0
    clock: float = 0.0


class Mailbox:
    """The messages of a step.

    Attributes:
        times: (begin, end) of every message both ends of which are known.
    """

    def __init__(self) -> None:
        self.times: dict[Key, tuple[float, float]] = {}
        self._channels: dict[Channel, _Channel] = {}

    def post(self, channel: Channel, key: Key, sends: bool, now: float, seconds: float, parts: int = 1) -> None:
        """One end gets to a message, or to one of its parts.

        Args:
            channel: that it goes over.
            key: the message.
            sends: which end.
            now: when.
            seconds: what its parts take at this end.
            parts: how many this end has; all are posted before any is waited for.
        Raises:
            CostModelError: the ends have it in different places of their order.
        """
        found = self._channels.setdefault(channel, _Channel())
        if key not in found.posted[sends]:
            found.posted[sends][key] = _End(now, seconds, parts)
            found.order[sends].append(key)
        here = found.posted[sends][key]
        if here.missing:
            here.at, here.missing = max(here.at, now), here.missing - 1
        receives, sent = found.order
        while found.begun < min(len(receives), len(sent)):
            first, other = sent[found.begun], receives[found.begun]
            if first != other:
                raise CostModelError(
                    f"messages cross on channel {channel}: {first[0]} of microbatch {first[1]} is sent where "
                    f"{other[0]} of microbatch {other[1]} is received"
                )
            ends = [end[first] for end in found.posted]
            if any(end.missing for end in ends):
                return
            begin = max(found.clock, *(end.at for end in ends))
            found.clock = begin + max(end.seconds for end in ends)
            self.times[first] = (begin, found.clock)
            found.begun += 1
