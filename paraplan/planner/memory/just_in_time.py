"""From what is kept at a few instants and made again between them, to reruns just in time.

Within a segment an op is executed again when what it makes is first read there, its own missing inputs before it, and
once at most; what nobody reads in the segment but is resident at the next instant is made again there.
"""

from __future__ import annotations

import numpy as np

from paraplan.planner.memory.problem import GIVEN
from paraplan.planner.memory.reruns import Arrays, Bools, Ints, Residency, profile_of, with_first, without_dead


def realise(arrays: Arrays, instants: tuple[int, ...], residents: Bools, returns: Bools | None = None) -> Residency:
    """The reruns of residents at instants ([instant, tensor]), and of what is brought back from a tier after them.

    What cannot be made again is taken as resident. Reruns nobody needs are left out.

    Args:
        arrays: of the memory problem.
        instants: ascending.
        residents: [instant, tensor] what is there.
        returns: [instant, tensor] what is brought back after it.
    """
    keys: list[int] = []
    for k, instant in enumerate(instants):
        following = instants[k + 1] if k + 1 < len(instants) else arrays.num_ops - 1
        there = residents[k] if returns is None else residents[k] | returns[k]
        segment = _Segment(arrays, instant, there)
        for op in range(instant + 1, following + 1):
            keys += [op * arrays.num_ops + again for again in segment.before(arrays.problem.ops[op].reads)]
        after = residents[k + 1] if k + 1 < len(instants) else arrays.kept
        wanted = np.flatnonzero(after & (arrays.maker <= instant)).tolist()
        keys += [following * arrays.num_ops + again for again in segment.before(wanted) if again < following]
    return without_dead(profile_of(arrays, with_first(arrays, _keys(keys))))


def overflowing(profile: Residency, budget_bytes: int, known: set[int], most: int = 4) -> set[int]:
    """New instants: stages of the highest overflows of a schedule, some distance apart, or the nearest not known.

    Args:
        profile: a schedule, with its bytes over time.
        budget_bytes: that it exceeds.
        known: instants there are.
        most: new ones.
    """
    n = profile.arrays.num_ops
    live = np.where(profile.live > budget_bytes, profile.live, 0)
    apart = max(1, n // 40)
    found: set[int] = set()
    while len(found) < most and live.max(initial=0) > 0:
        position = int(live.argmax())
        stage = int(profile.stages[position])
        # Inside a burst of reruns the bytes are those before the stage's own op.
        burst = stage if profile.ops[position] == stage else stage - 1
        near = [burst + step for far in range(apart + 1) for step in (-far, far) if 0 <= burst + step < n]
        found.update([instant for instant in near if instant not in known][:1])
        live[np.abs(profile.stages - stage) <= apart] = 0
    return found


def separating(profile: Residency, known: set[int], most: int) -> set[int]:
    """Instants between which a schedule executes as little as possible more than once, chosen one by one.

    A relaxation counts a rerun once between two of its instants, so these are where it can come near the schedule.

    Args:
        profile: a schedule.
        known: instants there are.
        most: new ones.
    """
    stages, ops = profile.stages[profile.rerun], profile.ops[profile.rerun]
    seconds = profile.arrays.time_s[ops]
    firsts = profile.live[np.searchsorted(profile.keys, profile.arrays.diagonal())]
    found = set(known)

    def counted(instants: set[int]) -> float:
        segment = np.searchsorted(np.array(sorted(instants), np.int64), stages)
        _, first = np.unique(segment * profile.arrays.num_ops + ops, return_index=True)
        return float(seconds[first[segment[first] > 0]].sum())

    able = set(np.unique(np.append(stages, stages - 1)).tolist())
    while len(found) < most and able - found:
        best = max(sorted(able - found), key=lambda stage: (counted(found | {stage}), firsts[stage]))
        if found and counted(found | {best}) <= counted(found):
            break
        found.add(best)
    return found


def _keys(keys: list[int]) -> Ints:
    return np.array(sorted(set(keys)), np.int64)


class _Segment:
    """What is there as a segment goes on."""

    def __init__(self, arrays: Arrays, instant: int, resident: Bools) -> None:
        self.arrays = arrays
        can = (arrays.maker != GIVEN) & arrays.repeatable[np.maximum(arrays.maker, 0)]
        self.there = (resident | (arrays.maker > instant) | ~can).tolist()

    def before(self, tensors: list[int] | tuple[int, ...]) -> list[int]:
        """Ops to execute again so that tensors are there, in order."""
        found: list[int] = []
        stack = [tensor for tensor in tensors if not self.there[tensor]]
        problem = self.arrays.problem
        while stack:
            tensor = stack.pop()
            if self.there[tensor]:
                continue
            op = problem.tensors[tensor].maker
            found.append(op)
            for made in problem.ops[op].makes:
                self.there[made] = True
            stack += [read for read in problem.ops[op].reads if not self.there[read]]
        return sorted(found)
