"""Schedules as text for people, and as the CSV that torch.distributed.pipelining reads.

Text holds everything and comes back equal:

    schedule 1f1b
    replicas 1
    ranks 0 0 1 1
    class 0: 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD 0UPDATE
    class 1: 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD 1UPDATE

CSV is torch's compute-only form: a row per rank, a computation per cell, empty cells where it stands still (written by
nobody here, skipped when read). Messages, reductions and updates are put in anew when it is read; torch knows no
replicas, so bidirectional schedules have no CSV.
"""

from __future__ import annotations

import csv
import io

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.schedule import Schedule, parse_action
from paraplan.planner.schedules.complete import complete, orders_of
from paraplan.planner.schedules.schedule_problem import COMPUTE, StageCosts


def to_text(schedule: Schedule) -> str:
    """The whole schedule, a line per class."""
    lines = [f"schedule {schedule.name}", f"replicas {schedule.num_replicas}"]
    lines.append(f"ranks {' '.join(map(str, schedule.rank_class))}")
    lines += [f"class {index}: {' '.join(actions)}" for index, actions in enumerate(schedule.classes)]
    return "\n".join(lines) + "\n"


def from_text(text: str) -> Schedule:
    """What `to_text` wrote.

    Raises:
        InvalidPlanError: naming the line.
    """
    heads = ("schedule ", "replicas ", "ranks ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for number, head in enumerate(heads):
        if number >= len(lines) or not lines[number].startswith(head):
            raise InvalidPlanError(f"schedule text, line {number + 1}: it should start with {head.strip()!r}")
    name, replicas, ranks = (line[len(head) :] for line, head in zip(lines, heads, strict=False))
    if not all(number.isdigit() for number in (replicas, *ranks.split())):
        raise InvalidPlanError("schedule text, lines 2 and 3: replicas and ranks are whole numbers")
    classes = []
    for index, line in enumerate(lines[len(heads) :]):
        head, _, actions = line.partition(":")
        if head != f"class {index}":
            raise InvalidPlanError(f"schedule text, line {index + 4}: it should start with 'class {index}:'")
        classes.append(tuple(str(parse_action(each)) for each in actions.split()))
    rank_class = tuple(map(int, ranks.split()))
    if any(index >= len(classes) for index in rank_class):
        raise InvalidPlanError(f"schedule text, line 3: class {max(rank_class)} of {len(classes)}")
    return Schedule(name=name, classes=tuple(classes), rank_class=rank_class, num_replicas=int(replicas))


def to_csv(schedule: Schedule) -> str:
    """The computations of every rank.

    Raises:
        InvalidPlanError: a schedule of several replicas.
    """
    if schedule.num_replicas > 1:
        raise InvalidPlanError(
            f"schedule {schedule.name} has {schedule.num_replicas} replicas of each stage, which the CSV form cannot "
            "say; use the text form"
        )
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([[str(each) for each in order] for order in orders_of(schedule)])
    return out.getvalue()


def from_csv(text: str, name: str = "csv", stages: tuple[StageCosts, ...] | None = None) -> Schedule:
    """A schedule from its computations, one rank per row.

    Args:
        text: CSV.
        name: of the schedule.
        stages: see `transfers.complete`.
    Raises:
        InvalidPlanError: naming row and cell, or orders that wait for each other.
    """
    orders = []
    for row, cells in enumerate(csv.reader(io.StringIO(text))):
        order = []
        for column, cell in enumerate(cells):
            if not cell.strip():
                continue
            try:
                action = parse_action(cell.strip())
            except InvalidPlanError as fault:
                raise InvalidPlanError(f"schedule CSV, row {row + 1}, cell {column + 1}: {fault}") from None
            if action.kind not in COMPUTE:
                raise InvalidPlanError(
                    f"schedule CSV, row {row + 1}, cell {column + 1}: {action}; only F, B, I and W stand here, the "
                    "rest is put in when it is read"
                )
            order.append(action)
        orders.append(tuple(order))
    if not any(orders):
        raise InvalidPlanError("schedule CSV: no computation in it")
    return complete(name, tuple(orders), stages)
