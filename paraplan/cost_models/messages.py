"""When messages between ranks of different stages begin and end.

Both ends post a message as they get to it. It begins once both have and the messages before it on its channel are
through, as NCCL's do (a send and a receive are one kernel on two devices); a channel is one direction between two
meshes, and has a stream of its own on both, beside those of collectives. A message of several parts takes the time of
the end that moves most of them. Limits: channels do not slow each other down where they share a link.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paraplan.ir.errors import CostModelError

Key = tuple[str, int]
"""A message's name, and its microbatch."""


@dataclass
class _Channel:
    """One direction between two meshes: what both ends have posted, in order, and when the last message ended."""

    posted: tuple[dict[Key, tuple[float, float]], dict[Key, tuple[float, float]]] = field(
        default_factory=lambda: ({}, {})
    )
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
        self._channels: dict[str, _Channel] = {}

    def post(self, channel: str, key: Key, sends: bool, now: float, seconds: float) -> None:
        """One end gets to a message (further parts of it change nothing).

        Args:
            channel: its name.
            key: the message.
            sends: which end.
            now: when.
            seconds: what its parts take at this end.
        Raises:
            CostModelError: the ends have it in different places of their order.
        """
        found = self._channels.setdefault(channel, _Channel())
        if key not in found.posted[sends]:
            found.posted[sends][key] = (now, seconds)
            found.order[sends].append(key)
        receives, sent = found.order
        while found.begun < min(len(receives), len(sent)):
            first, other = sent[found.begun], receives[found.begun]
            if first != other:
                raise CostModelError(
                    f"messages cross on channel {channel}: {first[0]} of microbatch {first[1]} is sent where "
                    f"{other[0]} of microbatch {other[1]} is received"
                )
            ends = [end[first] for end in found.posted]
            begin = max(found.clock, *(at for at, _ in ends))
            found.clock = begin + max(takes for _, takes in ends)
            self.times[first] = (begin, found.clock)
            found.begun += 1
