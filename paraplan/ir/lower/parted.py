"""Calls in two parts: a collective issued by one block and waited for by a later one, with other work between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from paraplan.ir.names import Name, under_way
from paraplan.ir.rank_program import Block

Parted = tuple[Block | None, Block]
"""What issues (None where nothing does), and what waits."""


class Call(Protocol):
    """Writes a step that calls a block."""

    def __call__(self, block: Block, args: tuple[Name, ...], outs: tuple[Name | None, ...]) -> None:
        """Write it."""


@dataclass
class PartedCalls:
    """Writes parted calls.

    Attributes:
        call: writes one step.
    """

    call: Call
    _begun: int = 0

    def begin(
        self, parted: Parted, given: Mapping[str, Name], outs: tuple[Name | None, ...]
    ) -> Callable[[], None]:  # fmt: skip
        """Write the first part.

        Args:
            parted: both blocks.
            given: outer name behind each input of the whole.
            outs: outer names of its results.
        Returns:
            What writes the second part.
        """
        first, second = parted
        bound = dict(given)
        if first is not None:
            issued = tuple(under_way(self._begun + index) for index in range(len(first.outputs)))
            self._begun += len(issued)
            self.call(first, args=tuple(bound[local] for local in first.inputs), outs=issued)
            bound |= {local: name for local, name in zip(first.outputs, issued, strict=True) if local is not None}
        args = tuple(bound[local] for local in second.inputs)
        return lambda: self.call(second, args=args, outs=outs)
