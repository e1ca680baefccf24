"""What constraints leave open of a pipeline, as it is first tried: microbatches, stages and the schedule."""

from __future__ import annotations

from paraplan.ir.errors import ConstraintError
from paraplan.ir.execution.schedule import Schedule
from paraplan.ir.machine.mesh import Shard
from paraplan.ir.model.program import Program
from paraplan.ir.option_words import OptionName, OptionValue
from paraplan.lowering.steps.whole_batch import takes_turns
from paraplan.planner.constraints import Constraints
from paraplan.planner.schedules.named import NAMED, named_orders
from paraplan.planner.schedules.schedule_problem import Orders
from paraplan.rules.time_axis import program_micro, smallest_divisor, splittable


def usual_schedule(program: Program, constraints: Constraints) -> str:
    """1f1b, or gpipe where a loss reads all microbatches."""
    m = constraints.microbatches or smallest_divisor(program.batch_size)
    return "gpipe" if splittable(program, m) and program_micro(program, m).has_tail else "1f1b"


def check_turns(program: Program, m: int, name: str, schedule: Schedule, num_stages: int) -> None:
    """Whether a schedule runs what reads all microbatches: a loss after all forwards, a buffer in one group.

    Args:
        program: that runs.
        m: microbatches.
        name: of the schedule, for the message.
        schedule: complete.
        num_stages: of it.
    """
    micro = program_micro(program, m)
    if micro.has_tail and not takes_turns(schedule, num_stages - 1):
        raise ConstraintError(
            f"schedule {name}: {micro.mixes} reads the whole batch, so that the last stage has to run all {m} forwards "
            "before its first backward; use schedule gpipe, or one microbatch"
        )
    rows = [name for name, value in program.buffer_updates.items() if isinstance(micro.values[value], Shard)]
    alone, why = rows, "has a row per sample"
    if program.apart > 1:
        alone, why = [*program.buffer_updates], "is written once a microbatch, in their order"
    if alone and schedule.num_replicas > 1:
        raise ConstraintError(
            f"schedule {name}: buffer {alone[0]!r} {why}, and several groups of ranks share the microbatches out; use "
            "schedule gpipe or 1f1b"
        )


def first_microbatches(
    program: Program, constraints: Constraints, name: str, positions: int, each: int
) -> tuple[int, Orders]:
    """How many microbatches, and their orders: the pinned count, or the first of 4, 2 and 1 times the positions, and of
    fewer, that the batch divides into (over pinned data-parallel ranks too) and the schedule takes.

    Args:
        program: whose batch is cut.
        constraints: that pin the count, or do not.
        name: of the schedule.
        positions: of the pipeline.
        each: stages a position.
    Raises:
        ConstraintError: the schedule takes none, or `each` stages a position.
    """
    if constraints.microbatches is not None:
        return constraints.microbatches, named_orders(name, positions, constraints.microbatches, each)
    fault = ConstraintError(
        "{} does not divide a batch of {}; use a divisor of it",
        *(OptionValue("dp", constraints.dp), program.batch_size),
    )
    rows, left = divmod(program.batch_size, constraints.dp or 1)
    for count in dict.fromkeys((4 * positions, 2 * positions, *range(positions, 0, -1))) if not left else ():
        if rows % count == 0 and splittable(program, count):
            try:
                return count, named_orders(name, positions, count, each)
            except ConstraintError as refused:
                fault = refused
    raise fault


def count_stages(constraints: Constraints, positions: int, name: str, segments: int) -> int:
    """Stages of a pipeline: as many as are pinned, or as the schedule has for every position.

    Args:
        constraints: with stages that are pinned, or none.
        positions: of the pipeline.
        name: of the schedule.
        segments: of the model.
    """
    each = NAMED[name].stages if name in NAMED else 1
    count = len(constraints.stages) if constraints.stages else positions * each
    if count % positions:
        pp = OptionValue("pp", positions)
        raise ConstraintError("{} stages cannot lie on {} positions; give a multiple of {}", count, pp, positions)
    if count > segments:
        pinned = OptionName("stages") if constraints.stages else OptionValue("schedule", name)
        said = [OptionValue("pp", positions), *([pinned] if constraints.stages or each > 1 else [])]
        raise ConstraintError(
            f"{{}} stages ({', '.join('{}' for _ in said)}) are more than the model's {{}} segments; give {{}} at most",
            *(count, *said, segments, OptionValue("pp", max(segments * positions // count, 1))),
        )
    for index, (first, stop) in enumerate(constraints.stages or ()):
        before = constraints.stages[index - 1][1] if index and constraints.stages else 0
        if first != before or stop <= first or stop > segments:
            meant = f"give {before}:{min(max(stop, before + 1), segments)}" if before < segments else "leave it out"
            raise ConstraintError(
                f"stages: stage {index} is {first}:{stop}; it starts at {before}, holds one segment at least, and the "
                f"model has {segments}; {meant}"
            )
    if constraints.stages and constraints.stages[-1][1] != segments:
        first, stop = constraints.stages[-1]
        raise ConstraintError(
            f"stages end at segment {stop}, the model has {segments}; end the last at that ({first}:{segments})"
        )
    return count
