"""Hanayo: waves. Stages go down the positions and up again, `num_waves` times, without a second copy of the model.

Stage s lies on position s mod P on its way down and on P - 1 - s mod P on its way up, so neighbours at either end are
on one position and hand over without a message. With forward and backward a slot each, microbatch m of a group of P
runs its 4 P W actions in the 4 P W slots that follow slot 2 m: on every position two actions of one microbatch are an
odd number or a multiple of 2 P apart, so no two microbatches of a group meet. The next group fits behind it.
2 P - 2 slots in 4 M W + 2 P - 2 are idle.

Source: Liu et al. 2023, "Hanayo: harnessing wave-like pipeline parallelism for enhanced large model training
efficiency", whose bubble for M = P and backwards twice as long, (2 P - 2) / (3 P W + P - 1), this does not exceed.
"""

from __future__ import annotations

from paraplan.ir.errors import ConstraintError
from paraplan.ir.execution.schedule import Action, ActionKind
from paraplan.planner.schedules.schedule_problem import Orders, at, check_sizes


def hanayo(num_positions: int, num_microbatches: int, num_waves: int = 1) -> Orders:
    """Waves over 2 P W stages.

    Args:
        num_positions: P, of the pipeline.
        num_microbatches: of a step.
        num_waves: W.
    Raises:
        ConstraintError: fewer than one position, microbatch or wave.
    """
    check_sizes("hanayo", num_positions, num_microbatches)
    if num_waves < 1:
        raise ConstraintError(f"schedule hanayo: {num_waves} waves; give at least 1")
    size, num_stages = num_positions, 2 * num_positions * num_waves
    slots: list[list[tuple[int, Action]]] = [[] for _ in range(size)]
    for micro in range(num_microbatches):
        group, within = divmod(micro, size)
        start = 2 * num_stages * group + 2 * within
        for stage in range(num_stages):
            turn, offset = divmod(stage, size)
            own = slots[size - 1 - offset if turn % 2 else offset]
            own.append((start + stage, at(stage, ActionKind.F, micro)))
            own.append((start + 2 * num_stages - 1 - stage, at(stage, ActionKind.B, micro)))
    return tuple(tuple(action for _, action in sorted(own, key=lambda pair: pair[0])) for own in slots)
