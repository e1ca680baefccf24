"""The lists of steps that a runtime takes: the two halves of a step in each of its phases, and what goes between steps.

before      up to the optimizer: gradients are then as it reads them
after       from it on: stored copies are written, gradients given up or held
brought     in place of `after`, where states were not brought ahead, or were written since: they are brought first
again       in place of that, where the step's gradients are not there, or were taken already
restoring   stored copies are written from states, whatever the step has done
flush       what is held for the next step is applied (see `delayed_update`)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import BlockRole, RankProgram, Step, StepKind
from paraplan.lowering.steps.delayed_update import UpdatePhase, flush_steps, in_phase

Steps = tuple[Step, ...]


@dataclass(frozen=True)
class PhaseSteps:
    """The lists of a step in some phase, see the module; `grads` are those of `before` that `after` lets go of."""

    before: Steps
    after: Steps
    brought: Steps
    again: Steps
    grads: tuple[Name, ...]


@dataclass(frozen=True)
class StepLists:
    """All lists of a rank.

    Attributes:
        phases: of a step.
        ahead: the steps of `before` that bring states ahead of their update.
        restoring, flush: see the module.
    """

    phases: Mapping[UpdatePhase, PhaseSteps]
    ahead: Steps
    restoring: Steps
    flush: Steps


def step_lists(program: RankProgram) -> StepLists:
    """The lists of a rank's program."""
    before, after = split_steps(program.steps)
    ahead = tuple(step for step in before if program.role_of(step) is BlockRole.BRING)
    restores = (step for step in after if program.role_of(step) not in (None, BlockRole.RECALL))
    phases = {phase: _in_phase(program, phase, ahead) for phase in UpdatePhase}
    return StepLists(phases, ahead, (*ahead, *restores), flush_steps(program))


def split_steps(steps: Steps) -> tuple[Steps, Steps]:
    """The steps before the update, and those from it on."""
    ends = [index for index, step in enumerate(steps) if step.kind in (StepKind.UPDATE, StepKind.UPDATED)]
    position = next((index for index in ends if not steps[index].late), len(steps))
    return steps[:position], steps[position:]


def _in_phase(program: RankProgram, phase: UpdatePhase, ahead: Steps) -> PhaseSteps:
    before, after = split_steps(in_phase(program, phase).steps)
    made = {name for step in (*ahead, *after) for name in step.outs}
    again: list[Step] = []
    grads: list[Name] = []
    for step in after:
        lets_go = {StepKind.DROP: step.drops, StepKind.ACCUMULATE: step.args[1:]}.get(step.kind, ())
        gone = [name for name in lets_go if name not in made]
        grads += gone
        if not gone:
            again.append(step)
    return PhaseSteps(before, after, (*ahead, *after), (*ahead, *again), tuple(grads))
