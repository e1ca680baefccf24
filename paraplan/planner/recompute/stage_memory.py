"""Which segments of a pipeline recompute what: each stage as little as its own memory needs.

The stages of a pipeline are short of memory to different degrees, the first most, as it has most microbatches in
flight. Every position's peak is its own affair: the programs of its rank classes (`class_memory`) say by how much it is
over its budget, and divided by the microbatches in flight there that is what its segments must save less. A small
integer program per position (`recompute.stage.choose`) says how, until all positions fit; nothing is simulated before.
Positions that hold the same stages (bidirectional schedules) decide as one, by the one that is over by most.

Where that took less off the peak than it was to (backwards in two halves keep values between them, made again or not),
the next round goes by what the last one took off. What allocators reserve is no steady function of what is saved, so
that this may be far too much: a position that is left with room then, and is known to need too much with more saved,
takes what is halfway between, until little is to be gained.

Limits: activations are recomputed, not offloaded; a heuristic as to which microbatches are in flight at the peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from paraplan.cost_models.realised_plan import Budget, Realised, over_budget_bytes, realised
from paraplan.ir.execution.schedule import ActionKind, Schedule, parse_action
from paraplan.ir.machine.rank_groups import group_of_class, holdings
from paraplan.ir.plan import Plan
from paraplan.planner.recompute.class_memory import ClassMemory
from paraplan.planner.recompute.kind_options import RematOption
from paraplan.planner.recompute.option_choice import choose
from paraplan.planner.schedules.order_memory import Instants, at_fullest, instants_of, most_held

ROUNDS, LAST = 8, 3
"""Pipelines looked at, and then those of which every position is known to have room."""
NARROW = 0.7
"""Of what is between the most that a position is known to have room for and the least that is too much, the most and,
less 1, the least that is asked for next."""
MARGIN = 0.004
"""Of the budget, what is saved beyond what a pipeline is over, for every one before that was over."""
HELD = ("saved_bytes", "deferred_bytes")
"""Of an option: what a microbatch holds until its backward, and between the halves of that."""
LEAST_FLYING = 1 / 8
"""Of the microbatches in flight, how few of them a byte less saved is thought to be worth at least."""
LOOSE = 0.01
"""Of the budget, what is left free of a position that recomputed more than it had to from the begin."""

Activations = tuple[dict[str, str], ...]
PlanOf = Callable[[Activations], Plan]
Cell = tuple[int, ...]
"""The stages of a position."""
Options = Sequence[tuple[RematOption, ...]]
"""Per kind, what an instance may do, most bytes saved first."""


def recomputing(
    kept: Plan,
    plan_of: PlanOf,
    options_of: Callable[[Cell], Options],
    budget: Budget,
    begun: Sequence[int] = (),
    memory: ClassMemory | None = None,
    first: Realised | None = None,
) -> Realised:
    """The pipeline with as little recomputed as fits, or the one that comes closest.

    Args:
        kept: a pipeline that keeps everything, or recomputes what `begun` says.
        plan_of: the same pipeline with other activations, per segment.
        options_of: what a position's segments may do.
        budget: what devices may hold.
        begun: per segment, the option it takes already; () for the first of each. Where some position is over then,
            those that have room take less.
        memory: what rank classes need; None for what is alive.
        first: `kept`, where it was lowered.
    """
    memory = memory or ClassMemory()
    taking, plan = _Taking(kept, options_of, budget, begun), kept
    if first is not None:
        memory.seen(first, budget)
    least: tuple[float, Plan] = (-math.inf, kept)
    for round_ in range(ROUNDS + LAST):
        over = _over(plan, memory.needed(plan, budget), budget)
        taking.found(over)
        fates = taking.less(over, round_) if round_ < ROUNDS else taking.known()
        if max(over.values()) <= 0 and fates is None:
            made = first if first is not None and plan is kept else realised(plan)
            over = _over(plan, memory.seen(made, budget), budget)
            if max(over.values()) <= 0:
                return made
            taking.found(over)
            fates = taking.less(over, round_) if round_ < ROUNDS else taking.known()
        least = max(least, (-max(over.values()), plan), key=lambda each: each[0])
        if fates is None:
            break
        plan = plan_of(fates)
    return realised(least[1])


def less_of(
    kept: Plan, needed: Sequence[int], options_of: Callable[[Cell], Options], budget: Budget, begun: Sequence[int]
) -> Activations | None:
    """Per segment, what a pipeline does with its activations where rank classes that need too much are to need as much
    less; None where nothing else can be taken.

    Args:
        kept: the pipeline.
        needed: per rank class, bytes.
        options_of, budget: as for `recomputing`.
        begun: per segment, the option it takes.
    """
    over = {cell: max(excess, 0.0) for cell, excess in _over(kept, needed, budget).items()}
    return _Taking(kept, options_of, budget, begun).less(over, 1)


class _Known(NamedTuple):
    """What is known of a position.

    Attributes:
        saved_bytes: of a microbatch.
        over: bytes that it is over its budget then.
        taken: per segment, its option.
    """

    saved_bytes: int
    over: float
    taken: dict[int, int]


class _Taking:
    """Which option every segment takes, round by round.

    Args:
        kept, options_of, begun: see `recomputing`.
        budget: of devices.
    """

    def __init__(self, kept: Plan, options_of: Callable[[Cell], Options], budget: Budget, begun: Sequence[int]) -> None:
        self.program, stages = kept.program, kept.stages
        self.segments = {
            cell: [i for s in cell for i in range(stages[s].first, stages[s].stop)] for cell in _cells(kept)
        }
        self.options_of, self.begun, self.held_bytes = options_of, begun, _budgets(kept, budget)
        self.options_at = {
            i: options_of(cell)[self.program.segments[i].kind] for cell, here in self.segments.items() for i in here
        }
        self.taken = dict(enumerate(begun or [0] * len(self.program.segments)))
        self.flying = {cell: in_flight(kept.schedule, cell) for cell in self.segments}
        self.stages = {cell: [range(stages[s].first, stages[s].stop) for s in cell] for cell in self.segments}
        self.instants = {cell: _instants(kept.schedule, cell) for cell in self.segments}
        self.worth = dict(self.flying)
        self.lessened: dict[Cell, tuple[float, float]] = {}
        self.fitting: dict[Cell, list[_Known]] = {cell: [] for cell in self.segments}
        self.too_much: dict[Cell, _Known] = {}

    def found(self, over: dict[Cell, float]) -> None:
        """What is taken now was found to have positions over by this many bytes."""
        for cell, excess in over.items():
            here = self.segments[cell]
            seen = _Known(self._saved(cell), excess, {i: self.taken[i] for i in here})
            fitting = [each for each in self.fitting[cell] if each.saved_bytes < seen.saved_bytes or excess <= 0]
            self.fitting[cell] = fitting if excess > 0 else [*fitting, seen]
            if excess > 0:
                self.too_much[cell] = min(self.too_much.get(cell, seen), seen, key=lambda each: each.saved_bytes)

    def known(self) -> Activations | None:
        """Per segment its activations where every position saves the most that it is known to have room for; None where
        that is so already, or one is not known to have room."""
        if not all(self.fitting.values()):
            return None
        before = dict(self.taken)
        for cell in self.fitting:
            self.taken |= self._most(cell).taken
        return None if self.taken == before else self._fates()

    def less(self, over: dict[Cell, float], round_: int) -> Activations | None:
        """Per segment its activations, where positions are over by this many bytes, less saved where they are; None
        where nothing else can be taken."""
        for cell, (was_over, less_saved) in self.lessened.items():
            took = (was_over - over[cell]) / less_saved
            self.worth[cell] = min(max(took, LEAST_FLYING * self.flying[cell]), self.flying[cell])
        self.lessened.clear()
        before = dict(self.taken)
        for cell, excess in over.items():
            room = -excess > LOOSE * self.held_bytes[cell] and any(self.taken[i] for i in self.segments[cell])
            if self.fitting[cell] and cell in self.too_much and (excess > 0 or room):
                self._narrow(cell)
            elif excess > 0:
                self._take(cell, excess, excess + round_ * MARGIN * self.held_bytes[cell])
            elif self.begun and not round_ and room:
                self._take(cell, excess, excess + LOOSE * self.held_bytes[cell])
        return None if self.taken == before else self._fates()

    def _fates(self) -> Activations:
        return tuple(self.options_at[i][self.taken[i]].activations for i in sorted(self.taken))

    def _most(self, cell: Cell) -> _Known:
        return max(self.fitting[cell], key=lambda each: each.saved_bytes)

    def _narrow(self, cell: Cell) -> None:
        """Have a position save something between the most it is known to have room for and the least that is too much,
        by what they leave and are over, if that is worth a round; the former if not."""
        here, most, least = self.segments[cell], self._most(cell), self.too_much[cell]
        between, chosen = least.saved_bytes - most.saved_bytes, None
        if between * self.flying[cell] > LOOSE * self.held_bytes[cell]:
            share = (-most.over - LOOSE / 2 * self.held_bytes[cell]) / max(least.over - most.over, 1.0)
            chosen = self._chosen(cell, most.saved_bytes + min(max(share, 1 - NARROW), NARROW) * between)
        self.taken |= most.taken if chosen is None else dict(zip(here, chosen, strict=True))
        if self._saved(cell) <= most.saved_bytes:
            self.taken |= most.taken

    def _take(self, cell: Cell, excess: float, less_bytes: float) -> None:
        """Have a position that is over by `excess` hold so many bytes less."""
        here = self.segments[cell]
        saved = self._saved(cell)
        chosen = self._chosen(cell, saved - less_bytes / self.worth[cell])
        leanest = [len(self.options_at[i]) - 1 for i in here]
        self.taken |= dict(zip(here, leanest if chosen is None else chosen, strict=True))
        if (less := saved - self._saved(cell)) > 0:
            self.lessened[cell] = excess, less

    def _chosen(self, cell: Cell, saved_bytes: float) -> Sequence[int] | None:
        """What a position's segments take to save no more than so much, were each in flight as often as others; None
        where they cannot."""
        here, at = self.segments[cell], self.flying[cell] * len(cell)
        instants = [(flying / at, between / at) for flying, between in most_held(self.instants[cell])]
        now = [self.options_at[i][self.taken[i]] for i in here]
        saved, deferred = (sum(getattr(option, of) for option in now) for of in HELD)
        alike = max(a * saved + b * deferred for a, b in instants)
        program = msgspec.structs.replace(self.program, segments=tuple(self.program.segments[i] for i in here))
        allowed = saved_bytes * alike / max(self._saved(cell), 1)
        return choose(program, self.options_of(cell), allowed, instants=instants)

    def _saved(self, cell: Cell) -> int:
        """What a microbatch that is held saves of all a position's stages, where it is fullest."""
        stages = [[self.options_at[i][self.taken[i]] for i in stage] for stage in self.stages[cell]]
        saved, deferred = ([sum(getattr(o, of) for o in stage) for stage in stages] for of in HELD)
        return int(at_fullest(self.instants[cell], saved, deferred).nbytes / self.flying[cell])


def _instants(schedule: Schedule, cell: Cell) -> Instants:
    """Those of any rank that holds the stages."""
    orders = ([parse_action(text) for text in texts] for texts in schedule.classes)
    return np.concatenate([instants_of(order, cell) for order in orders if any(each.stage in cell for each in order)])


def in_flight(schedule: Schedule, stages: Sequence[int]) -> float:
    """The most microbatches whose forward has run and whose backward has not, of some stages on any one rank, per
    stage."""
    most = 1
    for texts in schedule.classes:
        flying = 0
        for action in map(parse_action, texts):
            if action.stage in stages:
                flying += action.kind is ActionKind.F
                flying -= action.kind in (ActionKind.B, ActionKind.W)
                most = max(most, flying)
    return most / len(stages)


def _cells(plan: Plan) -> list[Cell]:
    return list(dict.fromkeys(holding.stages for holding in holdings(plan)))


def _over(plan: Plan, peaks: Sequence[int], budget: Budget) -> dict[Cell, float]:
    """Per position, the bytes its fullest ranks are over the budget; of positions with the same stages, the most."""
    found = dict[Cell, float]()
    held = holdings(plan)
    for actions, over in zip(plan.schedule.classes, over_budget_bytes(plan, tuple(peaks), budget), strict=True):
        cell = held[group_of_class(plan, held, actions)].stages
        found[cell] = max(found.get(cell, -math.inf), over)
    return {cell: found[cell] for cell in _cells(plan)}


def _budgets(plan: Plan, budget: Budget) -> dict[Cell, float]:
    """Per position, what each of its devices may hold."""
    if isinstance(budget, int):
        return dict.fromkeys(_cells(plan), budget)
    found: dict[Cell, float] = {}
    for holding in holdings(plan):
        least = min(budget[device] for device in holding.mesh.devices)
        found[holding.stages] = min(found.get(holding.stages, least), least)
    return found
