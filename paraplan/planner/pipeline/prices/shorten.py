"""A plan of one stage with fewer of its alike layers, to be priced in place of the whole.

Layers that repeat (a run of segments whose choices and parameters' layouts come again and again) take the same each, so
a step of a few of them says what every one takes, and one more says what the step's end takes for each. What is dropped
are periods between the first two and the last two; what read the last of them reads the same of the second.

Limits: a run whose dropped segments are read from further away, by the loss or by buffers, is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from paraplan.ir.plan import Plan

KEPT = 4
"""Periods left of a run."""
LONGEST = 12
"""Segments of a period."""


@dataclass(frozen=True)
class RepeatedSegments:
    """Segments that repeat.

    Attributes:
        first: the first of them.
        period: segments after which the same come again.
        repeats: how often.
    """

    first: int
    period: int
    repeats: int


@dataclass(frozen=True)
class Shortened:
    """A plan of fewer segments.

    Attributes:
        plan: it can be lowered and simulated; it is no plan of the model.
        stands_for: per segment of the whole plan, that of this one which is alike.
    """

    plan: Plan
    stands_for: tuple[int, ...]


def runs_of(plan: Plan) -> tuple[RepeatedSegments, ...]:
    """The runs of a plan of one stage that can be shortened."""
    stage, program = plan.stages[0], plan.program
    labels = [
        (choice, segment.kind, tuple(map(stage.params.get, segment.params)))
        for choice, segment in zip(stage.segment_choice, program.segments, strict=True)
    ]
    found: list[RepeatedSegments] = []
    at = 0
    while at < len(labels):
        runs = [RepeatedSegments(at, period, _repeats(labels, at, period)) for period in range(1, LONGEST + 1)]
        best = max(runs, key=lambda run: (run.period * run.repeats, -run.period))
        if best.repeats > KEPT + 1 and _is_read_nearby(plan, best):
            found.append(best)
            at += best.period * best.repeats
        else:
            at += 1
    return tuple(found)


def shortened(plan: Plan, runs: Sequence[RepeatedSegments], more: RepeatedSegments | None = None) -> Shortened:
    """The plan with four periods of every run, of one of them with five.

    Args:
        plan: of one stage.
        runs: of segments that repeat, in order.
        more: the one that keeps a period more; None: none does.
    """
    program, stage = plan.program, plan.stages[0]
    stands_for = list(range(len(program.segments)))
    renamed: dict[str, str] = {}
    dropped: set[int] = set()
    for run in runs:
        kept = KEPT + (run == more)
        gap = run.period * (run.repeats - kept)
        stop = run.first + run.period * (run.repeats - 2)
        for index in range(stop - gap, stop):
            dropped.add(index)
            stands_for[index] = run.first + run.period + (index - run.first) % run.period
        for index in range(stop - run.period, stop):
            was, now = program.segments[index], program.segments[index - gap]
            renamed |= dict(zip((*was.outputs, *was.asides), (*now.outputs, *now.asides), strict=True))
    left = [index for index in range(len(program.segments)) if index not in dropped]
    place = {index: at for at, index in enumerate(left)}
    segments = tuple(
        msgspec.structs.replace(each, inputs=tuple(renamed.get(name, name) for name in each.inputs))
        for each in (program.segments[index] for index in left)
    )
    used = {name for segment in segments for name in segment.params}
    short = msgspec.structs.replace(
        program,
        segments=segments,
        params={name: spec for name, spec in program.params.items() if name in used},
        outputs={},
    )
    part = msgspec.structs.replace(
        stage,
        stop=len(segments),
        segment_choice=tuple(stage.segment_choice[index] for index in left),
        params={name: layouts for name, layouts in stage.params.items() if name in used},
    )
    made = msgspec.structs.replace(plan, program=short, stages=(part,))
    return Shortened(made, tuple(place[index] for index in stands_for))


def _repeats(labels: Sequence[object], at: int, period: int) -> int:
    count = 1
    while labels[at + count * period : at + (count + 1) * period] == labels[at : at + period]:
        count += 1
    return count


def _is_read_nearby(plan: Plan, run: RepeatedSegments) -> bool:
    """Whether what segments between the first two and the last two periods make is read one period later at most."""
    program = plan.program
    first, stop = run.first + 2 * run.period, run.first + (run.repeats - 2) * run.period
    made = {name: at for at in range(first, stop) for name in _made(plan, at)}
    read = {term.numerator for term in program.loss} | set(program.buffer_updates.values())
    if not read.isdisjoint(made):
        return False
    return all(
        at < made[name] + 2 * run.period and (at < stop or made[name] >= stop - run.period)
        for at, segment in enumerate(program.segments)
        for name in segment.inputs
        if name in made
    )


def _made(plan: Plan, at: int) -> tuple[str, ...]:
    segment = plan.program.segments[at]
    return (*segment.outputs, *segment.asides)
