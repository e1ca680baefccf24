"""What the rank classes of a pipeline need, by their own programs, and from as few microbatches as will do.

What a rank holds hangs on its own segments, so that of plans which differ in what these do again, the classes that
differ are lowered, each as if it were alone. Once it has held as many microbatches as ever, in flight and between the
halves of their backward, with the gradients of all its stages, a rank does from there on what it did before: later
microbatches are left out (`until_full`). Of a plan that was realised (`seen`) it is known what its classes need, and by
how much that was more than what was found so is added to what is found of them from there on.

Limits: receives are where a class's own steps have them, not in the order of the sends of others; the pieces that an
allocator's free memory is in hang on all that came before, so that of more microbatches more may be reserved, or less;
of bidirectional schedules, whose groups share all microbatches out, none are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import le
from typing import NamedTuple

import msgspec

from paraplan.cost_models.realised_plan import Budget, Realised, over_budget_bytes
from paraplan.cost_models.simulator.allocator_replay import reserved_bytes
from paraplan.cost_models.simulator.live_bytes import peak_bytes
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.execution.schedule import ActionKind, parse_action
from paraplan.ir.machine.rank_groups import group_of_class, holdings
from paraplan.ir.plan import Plan
from paraplan.ir.step_options import StepOptions
from paraplan.ir.struct import to_json
from paraplan.lowering import lower, lower_alone
from paraplan.planner.schedules.order_memory import CHANGES

Actions = tuple[str, ...]
WHOLE = 0.7
"""Of the actions of all classes, from which share on they are lowered whole."""
MORE = 1
"""Microbatches looked at beyond those with which a rank is full."""


class _Key(NamedTuple):
    """What a rank class' need depends on, of plans of one job: its actions, the room it has, options, its stages."""

    actions: Actions
    room: int
    num_microbatches: int
    options: StepOptions
    stages: tuple[bytes, ...]


def until_full(actions: Actions) -> Actions:
    """The actions of a rank class but those of microbatches that come after it has held as many as ever, and of one
    more.

    As many as ever: in flight, between the halves of a backward in two, and with gradients of as many stages, where no
    more of one of these are there with as many of the others.
    """
    parsed, counts, with_grads = [parse_action(text) for text in actions], [0, 0], set[tuple[int, bool]]()
    levels = list[tuple[int, int, int]]()
    for action in parsed:
        for at, more in enumerate(CHANGES.get(action.kind, (0, 0))):
            counts[at] += more
        if action.kind in (ActionKind.B, ActionKind.I, ActionKind.W):  # some are made beside those of inputs
            with_grads.add((action.stage, action.kind is ActionKind.I))
        levels.append((counts[0], counts[1], len(with_grads)))
    every = set(levels)
    left = {each for each in every if not any(each != o and all(map(le, each, o)) for o in every)}
    last = -1
    for action, level in zip(parsed, levels, strict=True):
        last = max(last, action.microbatch)
        left.discard(level)
        if not left:
            break
    return tuple(text for text, action in zip(actions, parsed, strict=True) if action.microbatch <= last + MORE)


@dataclass
class ClassMemory:
    """What the rank classes of a job's pipelines need; of those that did the same before, what was found then.

    Attributes:
        reserves: whether allocators have to have room, and not only what is alive.
    """

    reserves: bool = False
    _known: dict[object, int] = field(default_factory=dict)
    _seen: dict[object, int] = field(default_factory=dict)
    _more: dict[Actions, int] = field(default_factory=dict)

    def needed(self, plan: Plan, budget: Budget) -> tuple[int, ...]:
        """Per rank class, the most bytes alive, or, where that counts, reserved of a device's budget.

        Args:
            plan: a pipeline of the job; without a memory schedule.
            budget: of its devices.
        Raises:
            InvalidPlanError: the plan does not fit its program.
        """
        keys, classes = self._keys(plan, budget), plan.schedule.classes
        missing = {key: actions for key, actions in zip(keys, classes, strict=True) if not self._knows(key)}
        few = {each: each if plan.schedule.num_replicas > 1 else until_full(each) for each in classes}
        lowered, of_all = (sum(map(len, actions)) for actions in (map(few.__getitem__, missing.values()), classes))
        if lowered > WHOLE * of_all:  # lowered whole it is lowered once, when it is realised as well
            programs = dict(zip(classes, lower(plan), strict=True))
            self._seen |= {key: self._of(programs[actions], key.room) for key, actions in missing.items()}
        else:
            programs = lower_alone(_running(plan, few), [few[actions] for actions in missing.values()])
            self._known |= {key: self._of(programs[few[actions]], key.room) for key, actions in missing.items()}
        return tuple(
            self._seen[key] if key in self._seen else self._known[key] + self._more.get(actions, 0)
            for key, actions in zip(keys, classes, strict=True)
        )

    def seen(self, made: Realised, budget: Budget) -> tuple[int, ...]:
        """As `needed`, of a plan that was lowered and simulated."""
        keys = self._keys(made.plan, budget)
        peaks = made.simulation.peak_bytes
        for key, actions, program, peak in zip(keys, made.plan.schedule.classes, made.programs, peaks, strict=True):
            if key not in self._seen:
                self._seen[key] = self._of(program, key.room) if self.reserves else peak
            if key in self._known:
                self._more[actions] = max(self._more.get(actions, 0), self._seen[key] - self._known[key])
        return tuple(self._seen[key] for key in keys)

    def _of(self, program: RankProgram, room: int) -> int:
        return reserved_bytes(program, room) if self.reserves else peak_bytes(program)

    def _knows(self, key: _Key) -> bool:
        return key in self._seen or key in self._known

    def _keys(self, plan: Plan, budget: Budget) -> list[_Key]:
        classes, held = plan.schedule.classes, holdings(plan)
        rooms = [-each for each in over_budget_bytes(plan, (0,) * len(classes), budget)] if self.reserves else []
        stages = [to_json(stage) for stage in plan.stages]
        options, count = plan.options, plan.num_microbatches
        return [
            _Key(actions, room, count, options, tuple(stages[stage] for stage in held[of].stages))
            for actions, room, of in zip(
                classes,
                rooms or [0] * len(classes),
                [group_of_class(plan, held, each) for each in classes],
                strict=True,
            )
        ]


def _running(plan: Plan, instead: Mapping[Actions, Actions]) -> Plan:
    """A plan whose rank classes do something else."""
    schedule = msgspec.structs.replace(plan.schedule, classes=tuple(instead[each] for each in plan.schedule.classes))
    return msgspec.structs.replace(plan, schedule=schedule)
