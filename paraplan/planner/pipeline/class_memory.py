"""What the rank classes of a pipeline hold, from programs of their first microbatches alone.

What a rank holds hangs on its own segments, so that of plans which differ in what these do again, the classes that
differ are lowered, each as if it were alone. A rank that has had the gradients of all its stages, and then has as many
microbatches in flight as ever, does from there on what it did before: later microbatches are left out (`until_full`).

Limits: receives are where a class's own steps have them, not in the order of the sends of others; the pieces that an
allocator's free memory is in hang on all that came before, so that what is reserved for more microbatches may be more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from paraplan.cost_models.realised_plan import Budget, over_budget_bytes
from paraplan.cost_models.simulator.allocator_replay import reserved_bytes
from paraplan.cost_models.simulator.live_bytes import peak_bytes
from paraplan.ir.execution.schedule import ActionKind, parse_action
from paraplan.ir.machine.rank_groups import group_of_class, holdings
from paraplan.ir.plan import Plan
from paraplan.lowering import lower_alone

Activations = tuple[dict[str, str], ...]
Actions = tuple[str, ...]
Cell = tuple[int, ...]
"""The stages of a position."""
MORE = 1
"""Microbatches looked at beyond those with which a rank is full."""


def until_full(actions: Actions) -> Actions:
    """The actions of a rank class but those of microbatches that come after it is as full as it gets."""
    parsed = [parse_action(text) for text in actions]
    gradless = {action.stage for action in parsed if action.kind is ActionKind.F}
    flying, level = [], 0
    for action in parsed:
        level += (action.kind is ActionKind.F) - (action.kind in (ActionKind.B, ActionKind.W))
        flying.append(level)
    most, last = max(flying, default=0), -1
    for action, level in zip(parsed, flying, strict=True):
        last = max(last, action.microbatch)
        if action.kind in (ActionKind.B, ActionKind.W):
            gradless.discard(action.stage)
        if not gradless and level == most:
            break
    return tuple(text for text, action in zip(actions, parsed, strict=True) if action.microbatch <= last + MORE)


@dataclass
class ClassMemory:
    """What the rank classes of a pipeline need with one choice of activations or another, all else being equal.

    Attributes:
        budget: of devices.
        reserves: whether their allocators have to have room, and not only what is alive.
    """

    budget: Budget
    reserves: bool = False
    _known: dict[object, int] = field(default_factory=dict)

    def needed(self, plan: Plan, fates: Activations) -> tuple[int, ...]:
        """Per rank class, the most bytes alive, or reserved where that counts.

        Args:
            plan: without a memory schedule.
            fates: its activations, per segment; () for none.
        """
        classes, held = plan.schedule.classes, holdings(plan)
        cells = [held[group_of_class(plan, held, actions)].stages for actions in classes]
        rooms = [-each for each in over_budget_bytes(plan, (0,) * len(classes), self.budget)]
        few = [until_full(actions) for actions in classes]
        keys = [
            (actions, room, _own(plan, fates, cell)) for actions, room, cell in zip(few, rooms, cells, strict=True)
        ]
        missing = {key: at for at, key in enumerate(keys) if key not in self._known}
        programs = lower_alone(_running(plan, few), [few[at] for at in missing.values()])
        for key, at in missing.items():
            program = programs[few[at]]
            alive = peak_bytes(program)
            self._known[key] = max(alive, reserved_bytes(program, rooms[at])) if self.reserves else alive
        return tuple(self._known[key] for key in keys)


def _running(plan: Plan, classes: Sequence[Actions]) -> Plan:
    """A plan whose rank classes do this instead."""
    return msgspec.structs.replace(plan, schedule=msgspec.structs.replace(plan.schedule, classes=tuple(classes)))


def _own(plan: Plan, fates: Activations, cell: Cell) -> tuple[tuple[tuple[str, str], ...], ...]:
    """What the segments of a position do."""
    own = [fates[plan.stages[stage].first : plan.stages[stage].stop] for stage in cell]
    return tuple(tuple(each.items()) for here in own for each in here)
