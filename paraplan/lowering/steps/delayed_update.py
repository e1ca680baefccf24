"""Updates that are one step late: the host's, done beside the next step's forward and backward.

Where a plan allows it (`Plan.delayed_update`; Ren et al. 2021, ZeRO-Offload, section 5.2), what the host updates where
its states stay is not updated between backward and the next forward, with the device standing still. Of step i,

    UPDATE, late    the host begins to update with the gradients of step i - 1, which are held there (`late:x`),
    F, B            run with what was stored at the end of step i - 1; gradients of step i leave for the host,
    UPDATED         the host is waited for, and the gradients it used are given up,
    restore         its parameters are written into their stored copies,
    ACCUMULATE      the gradients of step i become those that are held (a move).

So after step i parameters have the gradients of steps up to i - 1, and step i + 1 computes with those: exactly one step
late. All else (clipping, the learning rate, a loss scale) is that of the step the gradient was made in. Parameters that
the device updates, those whose states come from disk, and those whose stored copy is on the host itself, which ops read
meanwhile, are updated in their own step as ever.

That is the program of a step in full swing. Before it there are `delayed_update` steps without delay, then one that
finds no gradient held: the same blocks, fewer steps (`in_phase`). What is held can be applied at any time between two
steps (`flush_steps`), and the step after that is again one that finds none. A runtime takes the lists of `phases`.
"""

from __future__ import annotations

from enum import Enum
from itertools import takewhile

import msgspec

from paraplan.ir.execution.name import Role
from paraplan.ir.execution.rank_program import RankProgram, Step, StepKind


class UpdatePhase(Enum):
    """WARM: no update is late yet. FIRST: no gradient is held at the step's start. STEADY: as the plan is priced."""

    WARM = "warm"
    FIRST = "first"
    STEADY = "steady"


def in_phase(program: RankProgram, phase: UpdatePhase) -> RankProgram:
    """What a rank executes in a step of some phase: of `program`, which is that of a steady one."""
    flush = flush_steps(program)
    if phase is UpdatePhase.STEADY or not flush:
        return program
    begin, end, *restore = flush
    steps: list[Step] = []
    for step in program.steps:
        if step is begin or (phase is UpdatePhase.FIRST and any(step is each for each in restore)):
            continue
        if step is end and phase is UpdatePhase.FIRST:  # there is nothing to wait for
            step = msgspec.structs.replace(end, drops=())
        elif step is end:
            step = msgspec.structs.replace(begin, action=end.action, late=False)
        elif phase is UpdatePhase.WARM and _holds(program, step):
            step = msgspec.structs.replace(step, kind=StepKind.DROP, args=(), drops=step.args[1:])
        steps.append(step)
    outer = {name: value for name, value in program.outer.items() if value.role is not Role.LATE}
    return msgspec.structs.replace(program, steps=tuple(steps), outer=outer)


def flush_steps(program: RankProgram) -> tuple[Step, ...]:
    """The steps that apply what is held: the late UPDATE, UPDATED, and the calls that write what was updated.

    Empty where nothing is late.
    """
    begin = next((step for step in program.steps if step.late), None)
    if begin is None:
        return ()
    at = next(index for index, step in enumerate(program.steps) if step.kind is StepKind.UPDATED)
    restore = takewhile(lambda step: step.kind is StepKind.CALL, program.steps[at + 1 :])
    return begin, program.steps[at], *restore


def _holds(program: RankProgram, step: Step) -> bool:
    """Whether a step holds a gradient for the next one."""
    return step.kind is StepKind.ACCUMULATE and step.args[0] in program.outer
