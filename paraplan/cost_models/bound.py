"""Lower bounds on the simulated step, from work alone.

Work on one stream is serial, so a step takes at least as long as its busiest stream; streams may overlap, so
their sum bounds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paraplan.ir.execution.streams import Stream


def stream_bound(work_by_stream: Mapping[Stream, float]) -> float:
    """Seconds no step with this work per stream can undercut: the busiest stream's."""
    return max(work_by_stream.values(), default=0.0)


def rank_bound(work_of_ranks: Iterable[Mapping[Stream, float]]) -> float:
    """The bound over several ranks that run at once: the largest of theirs."""
    return max((stream_bound(work) for work in work_of_ranks), default=0.0)
