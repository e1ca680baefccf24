"""Local search by windows: a few stages of a schedule decided anew, exactly, the others left as they are.

Windows of a width slide over the stages, half a window at a time, most seconds of reruns first; each is an integer
program (`window_program`) that starts from the schedule as it is. What it finds is judged by the profile; where an op
executed again does not fit in between, that place becomes a row and the program is solved again. When no window of a
width finds anything, windows are wider.

Source: large-neighbourhood search with exact neighbourhoods (Shaw 1998; for scheduling, Godard et al. 2005).
"""

from __future__ import annotations

import time

import numpy as np

from paraplan.planner.memory.reruns import Profile, profile_of, without_dead
from paraplan.planner.memory.squeeze import polish
from paraplan.planner.memory.window_program import WindowProgram
from paraplan.planner.milp import solve

WIDTHS = (0.04, 0.1, 0.25)
"""Of the stages."""
_OPS = 120
_SOLVES = 5
_WINDOW_S = 4.0


def improve_windows(best: Profile, budget_bytes: int, deadline: float, enough_s: float = 0.0) -> Profile:
    """A schedule no worse, that windows of no width better; or where the deadline passes or `enough_s` are reached."""
    n = best.arrays.num_ops
    for share in WIDTHS:
        width, better = max(6, int(share * n)), True
        while better:
            better = False
            for first, last in _windows(best, width):
                if time.perf_counter() > deadline or best.recomputed_s <= enough_s * (1 + 1e-9):
                    return best
                found = solve_window(best, first, last, budget_bytes, deadline)
                if found is not None:
                    best, better = found, True
    return best


def _windows(profile: Profile, width: int) -> list[tuple[int, int]]:
    """(first, last) of windows with reruns, the most seconds first."""
    n = profile.arrays.num_ops
    seconds = np.zeros(n)
    np.add.at(seconds, profile.stages[profile.rerun], profile.arrays.time_s[profile.ops[profile.rerun]])
    total = np.append(0.0, np.cumsum(seconds))
    starts = np.arange(0, max(1, n - width // 2), max(1, width // 2))
    ends = np.minimum(starts + width, n)
    inside = total[ends] - total[starts]
    order = np.argsort(-inside, kind="stable")
    return [(int(starts[k]), int(ends[k]) - 1) for k in order.tolist() if inside[k] > 0]


def solve_window(profile: Profile, first: int, last: int, budget_bytes: int, deadline: float) -> Profile | None:
    """A schedule with fewer seconds of reruns that differs in a window of stages; None where none was found."""
    places: set[tuple[int, int]] = set()
    until = min(deadline, time.perf_counter() + _WINDOW_S)
    for _ in range(_SOLVES):
        left = until - time.perf_counter()
        if left <= 0:
            return None
        program = WindowProgram(profile, first, last, budget_bytes, _OPS, sorted(places))
        solution = solve(
            program.milp, backend="mathopt-cpsat", time_limit_s=left, relative_gap=1e-3, warm_start=program.hint
        )
        if solution.values is None:
            return None
        found = without_dead(profile_of(profile.arrays, program.keys(solution.values)))
        if found.recomputed_s >= profile.recomputed_s * (1 - 1e-9):
            return None
        if found.peak <= budget_bytes:
            return polish(found, budget_bytes)
        inside = found.rerun & (found.stages >= first) & (found.stages <= last)
        over = np.flatnonzero(inside & (found.live > budget_bytes))
        more = {(int(found.stages[p]), int(found.ops[p])) for p in over.tolist()}
        if more <= places:
            return None
        places |= more
    return None
