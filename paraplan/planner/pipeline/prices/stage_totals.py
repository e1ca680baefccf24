"""What a priced sharding comes to for the whole model, in the few numbers that a closed form reads.

They can be had of what was not priced as well: of more samples a microbatch, taken to be a little faster by the sample
(`of_more`), and of any sharding that does more work, taken to hold nothing (`weightless`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple


class KeptBytes(NamedTuple):
    """Bytes that the whole model keeps on one rank: all of it, and of that gradients."""

    all_bytes: int
    grad_bytes: int


@dataclass(frozen=True)
class Totals:
    """Of a sharding.

    Attributes:
        shape: of the mesh that was priced.
        keeps: by the shape of a position's mesh.
        num_segments: of the model.
        hop_bytes: what the middle segment hands on, of the whole batch.
        seconds: of a microbatch, forward and backward.
        longest: of a microbatch's seconds, the share of the longest of so many stages, however the chain is cut.
        cut_s: more for each stage that the chain is cut into.
        once_s: what the busiest link takes for gathers and reductions of a step.
        reduce_s: of that, reductions.
        update_s: what a step computes once.
        saved_bytes: by a microbatch in flight.
        workspace_bytes: the most that any call holds for a moment.
        recomputing: (bytes a microbatch saves, seconds made again), most bytes first.
    """

    shape: tuple[int, ...]
    keeps: Callable[[tuple[int, ...]], KeptBytes]
    num_segments: int
    hop_bytes: int
    seconds: float
    longest: Callable[[int], float]
    cut_s: float
    once_s: float
    reduce_s: float
    update_s: float
    saved_bytes: float
    workspace_bytes: int
    recomputing: tuple[tuple[float, float], ...]

    def least_extra_s(self, saved_bytes: float) -> float:
        """Seconds made again for a microbatch to save so little, some of the alike segments doing one thing and some
        the next; infinite where it cannot."""
        for (more, less_s), (saved, extra_s) in itertools.pairwise((self.recomputing[0], *self.recomputing)):
            if saved <= saved_bytes:
                return extra_s - (extra_s - less_s) * min((saved_bytes - saved) / max(more - saved, 1.0), 1.0)
        return math.inf

    def of_more(self, times: float, faster: float) -> Totals:
        """Of microbatches of so many times the samples, each the faster by a share."""
        slower = times * (1 - faster)
        return replace(
            self,
            seconds=self.seconds * slower,
            cut_s=self.cut_s * slower,
            saved_bytes=self.saved_bytes * times,
            recomputing=tuple((saved * times, extra_s * slower) for saved, extra_s in self.recomputing),
        )

    def weightless(self) -> Totals:
        """What any sharding of as much work comes to at least."""
        return replace(self, keeps=_nothing, once_s=0.0, reduce_s=0.0, update_s=0.0, saved_bytes=0.0, workspace_bytes=0)


def _nothing(mesh_shape: tuple[int, ...]) -> KeptBytes:
    return KeptBytes(0, 0)
