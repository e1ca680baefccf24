"""What a search found nothing for, and what it says of it at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paraplan.ir.errors import NoPlanError, SolverLimitError
from paraplan.ir.mesh import Mesh


@dataclass(frozen=True)
class Failure:
    """A mesh and a number of microbatches without a plan.

    Attributes:
        fault: why.
        mesh, num_microbatches: which.
        whatever_count: it is proved of any number of microbatches.
    """

    fault: NoPlanError
    mesh: Mesh
    num_microbatches: int
    whatever_count: bool = False


def failure(failures: Sequence[Failure]) -> tuple[NoPlanError, Callable[[], str]]:
    """The fault that speaks for all, and its words: one that proves nothing, if any does not, of the most
    microbatches, which hold least."""
    open_ones = [each for each in failures if isinstance(each.fault, SolverLimitError)]
    last = failures[-1].mesh
    shown = max(open_ones or [each for each in failures if each.mesh == last], key=lambda each: each.num_microbatches)
    counts = sorted({each.num_microbatches for each in failures})

    def words() -> str:
        if len(counts) < 2:
            return str(shown.fault)
        tried = ", ".join(map(str, counts))
        return f"{shown.fault}. So it is in {shown.num_microbatches} microbatches; tried in vain: {tried}"

    return shown.fault, words
