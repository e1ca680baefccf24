"""Plain data parallelism at every ZeRO level: planned beside what a search of one stage solves for.

A solver chooses the sharding of least work on all streams; a plan that does more of it may hide it better. These plans
are solved for in an instant, and are what anybody would try first, so no search is to come out slower.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

import msgspec

from paraplan.ir.errors import ConstraintError
from paraplan.planner.best_plan import Progress
from paraplan.planner.one_stage.on_mesh import plans_on_mesh
from paraplan.planner.one_stage.solved_meshes import SolvedMeshes
from paraplan.planner.pipeline.meshes import candidate_meshes, dividing_data
from paraplan.planner.sharding.solve import Skipped

LEVELS = (1, 2, 0, 3)
SHARE = 0.15
"""Of the time limit, after which no other level is planned."""


def add_data_parallel(solved: SolvedMeshes, progress: Progress) -> None:
    """Add its plans to what was solved, where they are open to it; they prove nothing of other plans.

    Args:
        solved: added to.
        progress: told what is being tried.
    """
    job, deadline, n = solved.job, solved.deadline, solved.job.cluster.num_devices
    c = dividing_data(solved.constraints, n)
    if n == 1 or c is None or job.program.batch_size % n:
        return
    for zero in LEVELS:
        if deadline.passed_s > SHARE * deadline.limit_s:
            return
        pins = msgspec.structs.replace(c, dp=n, zero=zero, recompute=c.recompute or "none")
        timed = replace(solved.limits, time_s=deadline.share_s(SHARE), certify=False)
        with suppress(ConstraintError):  # what the search says of other meshes
            found = plans_on_mesh(job, candidate_meshes(job, pins)[0], pins, timed, [], progress, math.inf)
            if not isinstance(found, Skipped):
                solved.found += (replace(each, bound_s=math.inf) for each in found)
