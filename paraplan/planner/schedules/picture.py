"""A schedule as a picture in text: a line per position, time to the right, a computation as wide as it is long.

0 F0F1    B0..  B1..
1   F0B0..F1B1..
"""

from __future__ import annotations

from paraplan.ir.errors import ConstraintError
from paraplan.planner.schedules.event_simulation import ScheduleTimes
from paraplan.planner.schedules.schedule_problem import COMPUTE


def draw(evaluation: ScheduleTimes, columns: int = 120) -> str:
    """The computations of an evaluation over time.

    Args:
        evaluation: of some orders.
        columns: width of the step. A computation shows its kind and microbatch where there is room, then dots; one of
            a position's later stages is in small letters.
    Returns:
        A line per position, each ended by a newline; time that a position stands still is blank.
    Raises:
        ConstraintError: columns below 1.
    """
    if columns < 1:
        raise ConstraintError(f"a picture {columns} columns wide; give at least 1")
    lines = [[" "] * columns for _ in evaluation.busy_s]
    first = [1 << 60] * len(lines)
    events = [event for event in evaluation.events if event.action.kind in COMPUTE]
    for event in events:
        first[event.positions[0]] = min(first[event.positions[0]], event.action.stage)
    scale = columns / evaluation.step_s if evaluation.step_s else 0.0
    for event in events:
        position, action = event.positions[0], event.action
        begin, end = round(event.start_s * scale), round(event.end_s * scale)
        label = f"{action.kind.value}{action.microbatch}"
        if action.stage > first[position]:
            label = label.lower()
        lines[position][begin:end] = label.ljust(end - begin, ".")[: end - begin]
    width = len(str(len(lines) - 1))
    return "".join(f"{position:>{width}} {''.join(line).rstrip()}\n" for position, line in enumerate(lines))
