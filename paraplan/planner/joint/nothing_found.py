"""What a search of pipelines says where it found nothing."""

from __future__ import annotations

from collections.abc import Sequence

from paraplan.ir.errors import InfeasibleError, NoPlanError, ParaplanError, SolverLimitError
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.joint.bounding.relaxations import fits_nowhere
from paraplan.planner.one_stage.one_stage_plans import is_piped


def nothing_found(
    job: Job,
    constraints: Constraints,
    budget: int,
    faults: Sequence[ParaplanError],
    words: Sequence[str],
) -> ParaplanError:
    """What is said: of one stage, where that was searched, or of the first pipeline.

    Args:
        job, constraints, budget: what was searched.
        faults: of what was priced, estimated and planned, in that order.
        words: what was planned.
    """
    said = [each for each in faults if isinstance(each, NoPlanError)]
    if not said:
        return faults[-1]
    fault = said[0] if is_piped(constraints, job.cluster.num_devices) else said[-1]
    more = f"; nor was anything found of {len(words)} tried: {'; '.join(words)}"
    kind = InfeasibleError if fits_nowhere(job, constraints, budget) else SolverLimitError
    return kind(f"{fault}{more}", lambda: f"{fault.explained()}{more}")
