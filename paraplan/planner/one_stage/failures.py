"""What a search found nothing for, and what it says of it at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paraplan.ir.errors import NoPlanError, SolverLimitError
from paraplan.ir.machine.mesh import Mesh


@dataclass(frozen=True)
class Failure:
    """A mesh and a number of microbatches without a plan.

    Attributes:
        fault: why.
        mesh, num_microbatches: which.
        whatever_count: it is proved of any number of microbatches.
        late: it was not tried, for the time was over.
    """

    fault: NoPlanError
    mesh: Mesh
    num_microbatches: int
    whatever_count: bool = False
    late: bool = False


def not_tried(mesh: Mesh, num_microbatches: int) -> Failure:
    """What is said where time ran out."""
    said = f"time ran out before mesh {mesh.shape} was tried in {num_microbatches} microbatches; raise the time limit"
    return Failure(SolverLimitError(said), mesh, num_microbatches, late=True)


def failure(failures: Sequence[Failure]) -> tuple[type[NoPlanError], str, Callable[[], str]]:
    """What kind of failure all are together, and the words of the one that speaks for them, as they are and explained:
    one that proves nothing, if any tried does not, of the most microbatches, which hold least."""
    tried = [each for each in failures if not each.late] or list(failures)
    open_ones = [each for each in tried if isinstance(each.fault, SolverLimitError)]
    last = tried[-1].mesh
    # Of what is proved of a mesh, what is said last is said of what may be recomputed as well.
    speaking = open_ones or [each for each in reversed(tried) if each.mesh == last]
    shown = max(speaking, key=lambda each: each.num_microbatches)
    counts = sorted({each.num_microbatches for each in tried})
    late = next((f". Not all was tried: {each.fault}" for each in failures if each.late and each is not shown), "")
    kind = SolverLimitError if any(isinstance(each.fault, SolverLimitError) for each in failures) else type(shown.fault)

    def words(fault: NoPlanError) -> str:
        if len(counts) < 2:
            return f"{fault}{late}"
        named = ", ".join(map(str, counts))
        return f"{fault}. So it is in {shown.num_microbatches} microbatches; tried in vain: {named}{late}"

    return kind, words(shown.fault), lambda: words(shown.fault.explained())
