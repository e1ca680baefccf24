"""One pipeline that is planned: a degree, a schedule and its microbatches, and the plans that a sharding gives it.

A case can be cut to its first microbatches (`of_few_microbatches`), as many as fill the pipeline: plans of it hold what
those of all microbatches do, and are compared in a fraction of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec

from paraplan.cost_models.realised_plan import Realised, realised
from paraplan.ir.errors import ConstraintError
from paraplan.ir.execution.schedule import ActionKind, Schedule, parse_action
from paraplan.ir.machine.rank_groups import group_of_class, holdings
from paraplan.ir.plan import Plan
from paraplan.planner.assemble import Job, assemble
from paraplan.planner.constraints import Constraints, device_budget
from paraplan.planner.passes.grad_reductions import ROOM, WORTH, waiting_less
from paraplan.planner.pipeline.cuts.balanced_cuts import cut_balanced
from paraplan.planner.pipeline.cuts.stage_cuts import Bounds, chain_memory, cut_chain
from paraplan.planner.pipeline.first_devices import first_devices
from paraplan.planner.pipeline.open_choices import check_turns, count_stages, first_microbatches, usual_schedule
from paraplan.planner.pipeline.pipeline import activations_of, pipelined, with_activations
from paraplan.planner.pipeline.prices.in_pieces import in_best_pieces
from paraplan.planner.pipeline.prices.stage_prices import Sharding
from paraplan.planner.recompute.class_memory import ClassMemory
from paraplan.planner.recompute.presets import preset_activations
from paraplan.planner.recompute.stage_memory import Activations, in_flight, less_of, recomputing
from paraplan.planner.schedules.complete import complete
from paraplan.planner.schedules.full_rounds import LEAST, few_orders
from paraplan.planner.schedules.named import NAMED
from paraplan.planner.schedules.schedule_problem import Orders, holders_of, stages_of
from paraplan.rules.time_axis import program_micro

CUTS = 4
"""Cuts by memory simulated before giving up."""
ONCE = 0.02
"""Of what a rank computes in a step, what is not for its microbatches at most."""
OFF = 0.02
"""How far all microbatches may be below what the first ones and their rounds come to; of few positions it has been
twice as much."""


@dataclass(frozen=True)
class PipelineCase:
    """A degree and a schedule.

    Attributes:
        job, constraints: what is planned, and what is pinned.
        part: the job on one position's devices.
        inner: what is pinned of a position's sharding.
        positions, num_stages, budget: sizes.
        orders, schedule: of the pipeline, one rank per position.
        num_run: microbatches that the schedule runs.
        memory: what rank classes need.
        params_ahead: whether large parameters are gathered ahead.
    """

    job: Job
    constraints: Constraints
    part: Job
    inner: Constraints
    positions: int
    num_stages: int
    budget: int
    orders: Orders
    schedule: Schedule
    num_run: int
    memory: ClassMemory = field(default_factory=ClassMemory)
    params_ahead: bool = True

    def fits(self, made: Realised) -> bool:
        """Whether no rank, and no tier, holds more than it may."""
        return made.peak_bytes <= self.budget and not made.over_bytes and max(self.needed(made)) <= self.budget

    def needed(self, made: Realised) -> tuple[int, ...]:
        """Per rank class, the bytes it has to be allowed: those alive, or what its allocator reserves for them."""
        peaks = made.simulation.peak_bytes
        return self.memory.seen(made, self.budget) if self.memory.reserves and max(peaks) <= self.budget else peaks

    def alive_budget(self, made: Realised) -> tuple[int, ...]:
        """Per device, the bytes that may be alive where allocators need as many more as they do for a plan."""
        beyond = [self.budget - n + p for n, p in zip(self.needed(made), made.simulation.peak_bytes, strict=True)]
        return tuple(beyond[of] for of in made.plan.schedule.rank_class)

    def least_s(self, made: Realised) -> float:
        """What all microbatches hardly take less than, where the first take this: the busiest rank computes every one,
        and once a pipeline is full, its backwards follow each other as they do here."""
        busiest_s = max(trace.compute_s for trace in made.simulation.traces)
        more = (self.inner.microbatches or 1) - self.num_run
        least_s = made.simulation.step_s + more * (1 - ONCE) * busiest_s / self.num_run
        nearly_s = made.simulation.step_s + more * self._round_s(made)
        return max(least_s, (1 - OFF) * nearly_s)

    def _round_s(self, made: Realised) -> float:
        """What a microbatch takes in a full pipeline: between the backwards of those that are as many as positions
        apart, or nearly, on the rank where that is longest."""
        if self.num_run < LEAST * self.positions or self.positions == 1:
            return 0.0
        stop = self.num_run - self.positions - 1
        first, found = max(stop - self.positions, 0), 0.0
        for program, trace in zip(made.programs, made.simulation.traces, strict=True):
            ends = {program.steps[point.step].action: point.end_s for point in trace.memory}
            backwards = {
                (action.stage, action.microbatch): end_s
                for action, end_s in ((parse_action(text), end_s) for text, end_s in ends.items())
                if action.kind in (ActionKind.B, ActionKind.I)
            }
            apart = [
                end_s - backwards.get((stage, first), math.inf)
                for (stage, microbatch), end_s in backwards.items()
                if microbatch == stop
            ]
            found = max(found, *(each / (stop - first) for each in apart), 0.0)
        return found

    def begun(self, sharding: Sharding, taken: Sequence[int]) -> Realised:
        """A plan with a sharding whose segments recompute what they are thought to have to, and less or more where
        stages are not cut by what they hold (see `recomputing`).

        Args:
            sharding: of a position's devices.
            taken: per segment the number of an option; () for nothing.
        """
        kept = self.taking(sharding, taken)
        first = None if any(taken) and self.is_cut_by_time else realised(kept)  # what is thought to fit often does
        if first is not None and not self.is_cut_by_time:
            return first
        return self._recomputing(sharding, self._bounds(sharding), kept, taken, first)

    def taking(self, sharding: Sharding, taken: Sequence[int]) -> Plan:
        """The plan with a sharding whose segments recompute what is said, fitting or not.

        Args:
            sharding, taken: as of `begun`.
        """
        segments = self.job.program.segments
        fates = tuple(sharding.options[segments[i].kind][each].activations for i, each in enumerate(taken))
        return self._plan(sharding, self._bounds(sharding), fates, 1)

    @property
    def is_cut_by_time(self) -> bool:
        """Whether stages are not cut by what they hold."""
        return self.constraints.stages is not None or self.num_stages > self.positions or self.schedule.num_replicas > 1

    def _bounds(self, sharding: Sharding) -> Bounds:
        bounds = self.constraints.stages or cut_balanced(
            sharding.prices.seconds, stages_of(self.orders), self.tail, self.inner.microbatches or 1
        )
        if bounds is None:
            raise ConstraintError(
                f"{self.num_stages} stages: the last one holds all segments from {self.tail} on, which run once on the "
                "whole batch, so that too few are left for the others; use fewer stages"
            )
        return bounds

    def plans(self, sharding: Sharding, begun: Realised | None = None, taken: Sequence[int] = ()) -> list[Realised]:
        """Plans with a sharding: the one that recomputes nothing (or what is pinned), and others if it does not
        fit.

        Args:
            sharding: of a position's devices.
            begun: the first of them where it was made.
            taken: what it was thought to recompute (see `begun`).
        """
        pinned = self.constraints.recompute
        activations = preset_activations(self.job.program, pinned) if pinned not in (None, "none") else ()
        bounds = self._bounds(sharding)
        found = [begun or self._priced(sharding, bounds, activations)]
        if self.fits(found[0]) or activations:
            return found
        if not self.is_cut_by_time:
            found += self._cut_by_memory(sharding, bounds, found[0])
        if pinned is not None:
            return found
        if begun is None or not self.is_cut_by_time:
            found.append(self._recomputing(sharding, bounds, found[0].plan, taken, found[0]))
        elif any(taken):  # from less made again: what is made again is held for a moment, too
            found.append(self._recomputing(sharding, bounds, self._plan(sharding, bounds, (), 1), ()))
        return found + self._with_waiting(sharding, bounds, found[0], taken)

    def _with_waiting(self, sharding: Sharding, bounds: Bounds, kept: Realised, taken: Sequence[int]) -> list[Realised]:
        """As little recomputed as fits where gradients are reduced after more microbatches, if that is faster."""
        waiting = list(map(realised, waiting_less(kept)))
        if waiting and taken_s(less := min(waiting, key=taken_s)) < (1 - WORTH) * taken_s(kept):
            return [self._recomputing(sharding, bounds, less.plan, taken)]
        return []

    def _recomputing(
        self, sharding: Sharding, bounds: Bounds, kept: Plan, taken: Sequence[int], first: Realised | None = None
    ) -> Realised:
        """As little recomputed as fits, gradients being reduced as in a plan that keeps everything."""
        return recomputing(
            kept,
            lambda fates: self._plan(sharding, bounds, fates, kept.reduce_every),
            lambda _: sharding.options,
            self.budget,
            taken,
            self.memory,
            first,
        )

    @cached_property
    def tail(self) -> int:
        """The first segment that runs once on the whole batch."""
        return program_micro(self.job.program, self.inner.microbatches or 1).tail

    def _holds_tail(self, stage: int, first: int, stop: int) -> bool:
        """Whether a stage holds all of the tail or nothing."""
        return stop <= self.tail or stage == self.num_stages - 1

    def less_kept(self, sharding: Sharding, made: Realised) -> float:
        """What the whole model may keep for the fullest stage of a plan to fit, all else being equal."""
        plan = made.plan
        memory = chain_memory(sharding.whole, [0] * len(self.job.program.kinds))
        held, shares = holdings(plan), []
        for actions, peak in zip(plan.schedule.classes, self.needed(made), strict=True):
            stages = held[group_of_class(plan, held, actions)].stages
            kept = sum(memory.kept_bytes(plan.stages[s].first, plan.stages[s].stop) for s in stages)
            shares.append(1 - (peak - self.budget) / max(kept, 1))
        return memory.kept_bytes(0, len(self.job.program.segments)) * max(min(shares), 0.05)

    def lessened(self, sharding: Sharding, best: Plan, needed: Sequence[int]) -> Plan | None:
        """A plan whose positions make more again where rank classes need more than they may, all else being equal; None
        where they cannot.

        Args:
            sharding: of the plan.
            best: the plan.
            needed: per rank class.
        """
        segments, taken = self.job.program.segments, list[int]()
        for segment, fate in zip(segments, activations_of(best), strict=True):
            known = [option.activations for option in sharding.options[segment.kind]]
            if fate not in known:
                return None
            taken.append(known.index(fate))
        fates = less_of(best, needed, lambda _: sharding.options, self.budget, taken)
        return None if fates is None else with_activations(best, fates)

    def _cut_by_memory(self, sharding: Sharding, bounds: Bounds, made: Realised) -> list[Realised]:
        """The plan whose stages are cut by time among those that fit, where there is one.

        What ops need for a moment is what the simulation found above what the stages hold.
        """
        memory = chain_memory(sharding.whole, [options[0].saved_bytes for options in sharding.options])
        flying = [int(in_flight(self.schedule, (stage,))) for stage in range(self.num_stages)]
        needed = [-float("inf")] * self.num_stages
        for _ in range(CUTS):
            for stage, peak in enumerate(_stage_peaks(made.plan, self.needed(made))):
                needed[stage] = max(needed[stage], peak - memory.stage_bytes(*bounds[stage], flying[stage]))

            def fits(stage: int, first: int, stop: int) -> bool:
                held = memory.stage_bytes(first, stop, flying[stage]) + needed[stage]
                return held <= self.budget and self._holds_tail(stage, first, stop)

            cut = cut_chain(sharding.prices.seconds, self.num_stages, fits)
            if cut is None:
                return []
            bounds, made = cut, self._priced(sharding, cut)
            if self.fits(made):
                return [made]
        return []

    def _priced(self, sharding: Sharding, bounds: Bounds, activations: Activations = ()) -> Realised:
        return realised(self._plan(sharding, bounds, activations, 1))

    def _plan(self, sharding: Sharding, bounds: Bounds, activations: Activations, every: int) -> Plan:
        options = sharding.decisions.options.but(params_ahead=self.params_ahead)
        pieced = in_best_pieces(sharding, self.constraints.most_pieces)
        decisions = replace(pieced.decisions, activations=activations, options=options)
        whole = assemble(self.part, decisions)
        whole = msgspec.structs.replace(whole, reduce_every=every, reducing_bytes=self.budget // ROOM)
        return pipelined(whole, self.job.cluster, bounds, self.schedule, holders_of(self.orders))


def case_of(job: Job, constraints: Constraints) -> PipelineCase:
    assert isinstance(constraints.pp, int)
    positions, name = constraints.pp, constraints.schedule or usual_schedule(job.program, constraints)
    num_stages = count_stages(constraints, positions, name, len(job.program.segments))
    micros, orders = first_microbatches(job.program, constraints, name, positions, num_stages // positions)
    schedule = complete(name, orders, num_replicas=NAMED[name].num_replicas)
    check_turns(job.program, micros, name, schedule, num_stages)
    inner = msgspec.structs.replace(
        constraints,
        pp=None,
        schedule=None,
        stages=None,
        microbatches=micros,
        memory_bytes=None,
        reserve_bytes=0,
        recompute="none",
    )
    return PipelineCase(
        job=job,
        constraints=constraints,
        part=replace(job, cluster=first_devices(job.cluster, positions)),
        inner=inner,
        positions=positions,
        num_stages=num_stages,
        budget=device_budget(job.cluster, constraints),
        orders=orders,
        schedule=schedule,
        num_run=micros,
    )


def of_few_microbatches(case: PipelineCase) -> PipelineCase | None:
    """The case in which only the first microbatches run, as many as fill the pipeline: its peaks are those of all, and
    what is faster with them is with more. None where that saves little, or more microbatches hold more."""
    if case.constraints.delayed_update is not None or case.schedule.num_replicas > 1:
        return None  # whose groups share all microbatches out
    found = few_orders(case.job.program, case.schedule.name, case.orders, case.num_stages)
    if found is None:
        return None
    few, orders = found
    return replace(case, orders=orders, schedule=complete(case.schedule.name, orders), num_run=few)


def taken_s(made: Realised) -> float:
    """The step."""
    return made.simulation.step_s


def _stage_peaks(plan: Plan, peaks: Sequence[int]) -> list[int]:
    """Per stage of a plan whose positions hold one each, the peak of its ranks, of those of its rank classes."""
    held, found = holdings(plan), [0] * len(plan.stages)
    for actions, peak in zip(plan.schedule.classes, peaks, strict=True):
        (stage,) = held[group_of_class(plan, held, actions)].stages
        found[stage] = max(found[stage], peak)
    return found
