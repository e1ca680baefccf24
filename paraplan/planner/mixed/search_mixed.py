"""The fastest pipeline found over groups of nodes that differ: each position on its own devices, mesh and sharding.

Divisions of the groups into positions, orders of the groups, microbatches and schedules (`listing`) are put in order by
a closed form (`shares`) over prices of each kind of group (`span_prices`), of few numbers of microbatches and then of
those near the best. Of the best pipelines the cut is searched and the orders simulated (`mixed_estimate`); the most
promising are lowered and simulated as plans (`mixed_plan`), each device within its own budget, until the next estimate
is no better than the best plan, `MOST` were planned in vain, or time is up. Of the best plan boundaries shift as
long as the simulated step gets shorter.

Limits: a position lies on one group; positions of a group follow each other and have one mesh and sharding; nothing is
offloaded. An estimate is no bound: the certificate is of the work alone (`work_bound`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from paraplan.cost_models.predict import predict, with_reserved, with_used_profile
from paraplan.cost_models.realised_plan import Realised, over_budget_bytes
from paraplan.ir.errors import ConstraintError, ParaplanError, SolverLimitError
from paraplan.ir.plan import Plan, Tried
from paraplan.ir.sizes import say_size
from paraplan.planner.alternatives.tried import in_vain, kept, planned
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.interrupts import Interrupted
from paraplan.planner.mixed.links import Handing
from paraplan.planner.mixed.listing import Division, coarse_counts, divisions, group_orders, near_counts, scheduled
from paraplan.planner.mixed.mixed_estimate import MixedEstimate, MixedPricer, shifted
from paraplan.planner.mixed.mixed_plan import MixedCase
from paraplan.planner.mixed.positions import MixedPipeline, Position, PositionSpan, device_budgets, span_meshes
from paraplan.planner.mixed.shares import least_s, quick_s, shared_s
from paraplan.planner.mixed.span_prices import SpanPrices, divides
from paraplan.planner.mixed.work_bound import certified_by_work
from paraplan.planner.passes.grad_reductions import ROOM
from paraplan.planner.passes.pass_context import PassContext
from paraplan.planner.passes.quickened import quickened
from paraplan.planner.pipeline.open_choices import count_stages, usual_schedule
from paraplan.planner.pipeline.prices.stage_prices import StagePrices
from paraplan.planner.schedules.named import NAMED

PRICED_SHARE, ESTIMATED_SHARE = 0.4, 0.6
"""Of the time limit, for prices; after which nothing else is estimated."""
QUICK = 1500
"""Pipelines looked at by the closed form, those of least work first."""
SHARED, LEAST_FILL = 400, 0.25
"""Divisions, microbatches and shardings of which every schedule and order is looked at, those of least work first, with
the least of a 1F1B schedule's bubble that others leave."""
FIRST_SHARE = 0.6
"""Of the time for prices, for few numbers of microbatches."""
ESTIMATED = 32
"""Pipelines whose cut is searched: the best by the closed form."""
FEWEST, NEAR = 8, 1.2
"""Pipelines whose cut is searched in any case; how much longer than the first's step another's may be, at the first of
its cuts, for boundaries to be shifted."""
MOST = 4
"""Pipelines planned one after another without one being faster than the best, after which no other is."""
SLACK = 0.05
"""What an estimate may be too high by."""
ROUNDS = 3
"""How often a pipeline that does not fit is cut anew, for as much less as it was over."""
SHIFTS, SHIFTED = 12, 4
"""Boundaries of the best plan shifted one after another at most; of each, how many are simulated of those estimated
best."""


class _Found(NamedTuple):
    """A plan that fits: its first microbatches, by which it was chosen, and all of them."""

    case: MixedCase
    first: Realised
    whole: Realised


@dataclass
class MixedSearch:
    """A search under way.

    Attributes:
        job, constraints: what is planned, and what is pinned.
        progress: told what is being tried.
        deadline: of all of it.
        best: the fastest plan that fits.
        tried: what was planned.
        over: what the last that did not fit lacked, in words.
        faults: of those that could not be planned.
        less: per group, what of a device's budget is kept for what allocators reserve beyond what is alive.
        is_interrupted: whether an interrupt ended it.
    """

    job: Job
    constraints: Constraints
    progress: Callable[[str], None]
    deadline: Deadline
    best: _Found | None = None
    tried: list[Tried] = field(default_factory=list)
    over: str = ""
    faults: list[ParaplanError] = field(default_factory=list)
    less: dict[int, int] = field(default_factory=dict)
    is_interrupted: bool = False
    _planned: set[object] = field(default_factory=set)

    def __post_init__(self) -> None:
        limit_s, self._late_s = (share * self.deadline.limit_s for share in (PRICED_SHARE, ESTIMATED_SHARE))
        self.prices = SpanPrices(self.job, self.constraints, self.progress, limit_s)
        self.handing = Handing(self.job.cluster)

    @property
    def best_s(self) -> float:
        """The shortest step of a plan so far."""
        return math.inf if self.best is None else self.best.whole.simulation.step_s

    def lessen(self, over_bytes: Sequence[tuple[int, int]]) -> None:
        """Begin anew with budgets less by what the fullest position of each group was over; (group, bytes) of each."""
        most: dict[int, int] = {}
        for group, nbytes in over_bytes:
            most[group] = max(most.get(group, 0), nbytes)
        self.less = {group: self.less.get(group, 0) + nbytes for group, nbytes in most.items()}
        self.best = None
        self._planned.clear()

    def found(self) -> tuple[Realised, MixedCase]:
        """The fastest plan found.

        Raises:
            ConstraintError: what is pinned leaves no pipeline over the groups.
            SolverLimitError: none that was tried fits.
        """
        c, program = self.constraints, self.job.program
        if c.pp is not None:
            count_stages(c, c.pp, c.schedule or usual_schedule(program, c), len(program.segments))
        ways, estimates = list(divisions(self.job, c)), list[MixedEstimate]()
        try:
            self._price(ways)
            while True:
                estimates = self.estimates(ways)
                was_late = self._is_late
                self._plan_promising(estimates)
                if self.deadline.is_over or not (self._goes_on(ways) or was_late):
                    break
            if self.best is not None:
                return self._finished(self.best), self.best.case
        except KeyboardInterrupt:
            if self.best is None:
                raise
            self.is_interrupted = True
            return self.best.whole, self.best.case
        raise self._nothing(bool(estimates))

    def _price(self, ways: Sequence[Division]) -> None:
        """Price few numbers of microbatches, and those near their best."""
        self.prices.price(ways, coarse_counts(ways), FIRST_SHARE)
        self._price_near(ways)

    def _price_near(self, ways: Sequence[Division]) -> bool:
        """Price numbers of microbatches near the best's, the nearest first; whether some are known that were not."""
        known = self.prices.num_known
        best = min(self._listed(ways), key=lambda each: each[0], default=None)
        pipeline = self.best.case.pipeline if self.best is not None else best and best[1]
        for count in near_counts(ways, pipeline.microbatches) if pipeline else ():
            self.prices.price(ways, [count])
        return self.prices.num_known > known

    def _goes_on(self, ways: Sequence[Division]) -> bool:
        """Have what is left of the time, in the shares that all of it had; whether anything is priced in it that was
        not."""
        passed_s, left_s = self.deadline.passed_s, self.deadline.limit_s - self.deadline.passed_s
        self._late_s = passed_s + ESTIMATED_SHARE * left_s
        self.prices.allow(PRICED_SHARE * left_s)
        return self._price_near(ways)

    def _nothing(self, is_estimated: bool) -> ConstraintError | SolverLimitError:
        """Why no pipeline was found: what is pinned, where nothing else is known to be in the way."""
        cluster, faults = self.job.cluster.name, (*self.prices.faults, *self.faults)
        refused = all(isinstance(each, ConstraintError) for each in faults) and (faults or not is_estimated)
        if refused and not self.over and not self._is_late:
            why = faults[0] if faults else "no schedule, of these positions, stages and microbatches, is left"
            return ConstraintError(f"no pipeline over the groups of {cluster} allows what is pinned: {why}")
        return SolverLimitError(
            f"no pipeline over the differing groups of {cluster} was found{': ' * bool(self.over)}{self.over}"
        )

    def estimates(self, ways: Sequence[Division]) -> list[MixedEstimate]:
        """Of the best by the closed form, the most promising first."""
        quick: list[tuple[float, int, MixedPipeline, tuple[Position, ...]]] = []
        numbers = itertools.count()
        listed = sorted(self._listed(ways), key=lambda each: each[0])
        for bound_s, pipeline, shardings in listed[:QUICK]:
            if len(quick) >= ESTIMATED and bound_s >= -quick[0][0]:
                break
            positions = self._positions(pipeline, shardings)
            if positions is None:
                continue
            heapq.heappush(quick, (-quick_s(pipeline, positions, self.handing), next(numbers), pipeline, positions))
            if len(quick) > ESTIMATED:
                heapq.heappop(quick)
        found: list[tuple[MixedEstimate, MixedPricer]] = []
        for _, _, pipeline, positions in sorted(quick, key=lambda each: (-each[0], each[1])):
            if len(found) >= FEWEST and self._is_late:
                break
            try:
                pricer = MixedPricer(pipeline, positions, self.handing)
                begun = self._begun(pricer)
            except ParaplanError as fault:  # of one candidate: others are looked at
                self.faults.append(fault)
                continue
            if begun is not None:
                found.append((begun, pricer))
        found.sort(key=lambda each: each[0].rank)
        improved: list[MixedEstimate] = []
        for begun, pricer in found:
            worth = len(improved) < FEWEST or begun.step_s <= NEAR * improved[0].step_s
            shifts = worth and not self._is_late and not self.constraints.stages
            improved.append(pricer.improved(begun) if shifts else begun)
        return sorted(improved, key=lambda each: each.rank)

    def _begun(self, pricer: MixedPricer) -> MixedEstimate | None:
        """The estimate at the pinned cut, or at the best of the first cuts."""
        return pricer.at(self.constraints.stages) if self.constraints.stages else pricer.begun()

    @property
    def _is_late(self) -> bool:
        return self.deadline.passed_s > self._late_s

    def _listed(self, ways: Sequence[Division]) -> Iterator[tuple[float, MixedPipeline, tuple[StagePrices, ...]]]:
        """Pipelines in every order of the groups, under every schedule, of the divisions and shardings of least work;
        each with what it takes at least by the closed form."""
        shared: list[tuple[float, int, tuple[PositionSpan, ...], int, tuple[StagePrices, ...]]] = []
        numbers = itertools.count()
        for spans, counts in ways:
            for count in counts:
                for shardings in itertools.product(*(self.prices.of(span, count) for span in spans)):
                    seconds_s = count * shared_s(spans, [each.totals.seconds for each in shardings])
                    least = seconds_s * (1 + LEAST_FILL * (sum(span.count for span in spans) - 1) / count)
                    shared.append((least, next(numbers), spans, count, shardings))
        for _, _, spans, count, shardings in heapq.nsmallest(SHARED, shared):
            for order in group_orders(self.job):
                along = tuple(spans[group] for group in order)
                theirs = tuple(shardings[group] for group in order)
                share_s = shared_s(along, [each.totals.seconds for each in theirs])
                for pipeline in scheduled(self.job, self.constraints, along, count):
                    yield least_s(pipeline, share_s), pipeline, theirs

    def _positions(self, pipeline: MixedPipeline, shardings: Sequence[StagePrices]) -> tuple[Position, ...] | None:
        """The positions of a pipeline; None where one has no mesh."""
        found: list[Position] = []
        for span, prices in zip(pipeline.spans, shardings, strict=True):
            there = self.prices.there(span, pipeline.microbatches, prices)
            if there is None:
                return None
            budget = self.prices.budget(span.group) - self.less.get(span.group, 0)
            room = budget - budget // ROOM
            meshes = span_meshes(self.job.cluster, span, there.sharding.decisions.mesh)
            found += [Position(there, room, span.group, mesh, budget) for mesh in meshes]
        return tuple(found)

    def _plan_promising(self, estimates: Sequence[MixedEstimate]) -> None:
        in_vain_count = 0
        for estimate in estimates:
            key = estimate.pipeline.text(self.job.cluster), estimate.bounds
            if key in self._planned:
                continue
            late = self.deadline.is_over and (self.best is not None or in_vain_count)
            if late or in_vain_count >= MOST or estimate.step_s > (1 + SLACK) * self.best_s:
                break
            before = self.best_s
            self._planned.add(key)
            self._plan(estimate)
            in_vain_count = 0 if self.best_s < before else in_vain_count + 1

    def _plan(self, estimate: MixedEstimate) -> None:
        """Plan an estimated pipeline; where a position is over its budget, with as much less room there."""
        pipeline, positions = estimate.pipeline, estimate.positions
        text = pipeline.text(self.job.cluster)
        self.progress(f"{text} ({estimate.step_s:.4g} s estimated); best so far {self.best_s:.4g} s")
        step_s = estimate.step_s if math.isfinite(estimate.step_s) else None
        if not all(divides(prices) for prices in {id(each.prices): each.prices for each in positions}.values()):
            self.tried.append(in_vain(text, "dims do not divide on a position's mesh", step_s))
            return
        for _ in range(ROUNDS):
            case = MixedCase(self.job, self.constraints, pipeline, positions)
            try:
                made = case.made(estimate.bounds, estimate.taken)
                whole = case.whole(made) if case.fits(made) else made
            except ParaplanError as fault:  # of one candidate: others are looked at
                self.faults.append(fault)
                self.tried.append(in_vain(text, fault, step_s))
                return
            if case.fits(whole):
                self.tried.append(planned(text, told(whole), step_s))
                if whole.simulation.step_s < self.best_s:
                    self.best = _Found(case, made, whole)
                return
            over = case.over_bytes(whole)
            positions = tuple(each.with_less(nbytes) for each, nbytes in zip(positions, over, strict=True))
            again = self._begun(MixedPricer(pipeline, positions, self.handing))
            if again is None or math.isinf(again.step_s):
                break
            estimate = again
        self.over = f"{text} holds {say_size(-whole.left_bytes(case.budgets))} more than a device may"
        self.tried.append(in_vain(text, self.over, step_s))

    def _finished(self, found: _Found) -> Realised:
        """The best plan with boundaries shifted as long as its first microbatches get shorter and time is left, and
        with what makes it shorter in the same layouts; as it is where all microbatches do not fit so."""
        case, made = found.case, found.first
        pricer = MixedPricer(case.pipeline, case.positions, self.handing)
        for _ in range(0 if self.constraints.stages else SHIFTS):
            better = self._shifted(case, made, pricer)
            if better is None:
                break
            made = better
        every, times = [found.whole], found.whole.simulation.step_s / made.simulation.step_s
        with suppress(ParaplanError):
            every.append(case.whole(quickened(made, PassContext(case.budgets, case.constraints, times, self.deadline))))
        return min((each for each in every if case.fits(each)), key=lambda each: each.simulation.step_s)

    def _shifted(self, case: MixedCase, made: Realised, pricer: MixedPricer) -> Realised | None:
        """The plan with one boundary shifted that is faster, of those estimated best; None where none is found."""
        bounds = tuple((stage.first, stage.stop) for stage in made.plan.stages)
        near = () if self.deadline.is_over else tuple(map(pricer.at, shifted(bounds, pricer.tail)))
        for each in sorted(near, key=lambda each: each.rank)[:SHIFTED]:
            if self.deadline.is_over:
                return None
            with suppress(ParaplanError):
                tried = case.made(each.bounds, each.taken)
                if case.fits(tried) and tried.simulation.step_s < made.simulation.step_s:
                    return tried
        return None


def allows_mixed(job: Job, constraints: Constraints) -> bool:
    """Whether pipelines over differing groups are searched: there are several, and nothing is pinned that they have not
    (one stage, a schedule that is searched or held by several positions, states or activations off the device)."""
    c = constraints
    named = c.schedule is None or (c.schedule in NAMED and NAMED[c.schedule].num_replicas == 1)
    free = c.pp is None or c.pp >= len(job.cluster.groups)
    at_home = not c.tiers and not c.state_tiers and c.delayed_update is None
    return len(job.cluster.groups) > 1 and named and free and at_home and not job.compiled


def search_mixed(
    job: Job, constraints: Constraints, deadline: Deadline, progress: Callable[[str], None], reserves: bool = False
) -> Plan:
    """The fastest pipeline found over the groups of a cluster, priced and certified.

    Args:
        job, constraints, deadline, progress: as of `MixedSearch`.
        reserves: whether allocators have to have room for it: where they would reserve more than there is, it is
            searched for again with as much less for every device of such a group.
    Raises:
        ConstraintError: what is pinned leaves no pipeline over the groups.
        Interrupted: with the best plan until then, or none.
        SolverLimitError: none that was tried fits.
    """
    search = MixedSearch(job, constraints, progress, deadline)
    for _ in range(ROUNDS + 1):
        made, case = search.found()
        plan = told(made)
        if not reserves:
            break
        whole = device_budgets(
            job.cluster, [replace(at, budget=search.prices.budget(at.group)) for at in case.positions]
        )
        plan = with_reserved(plan, made.programs, whole)
        assert plan.prediction is not None
        over = over_budget_bytes(plan, plan.prediction.reserved_bytes or made.simulation.peak_bytes, whole)
        if max(over) <= 0:
            break
        if search.is_interrupted:
            raise Interrupted(())
        search.lessen([(at.group, over[plan.schedule.rank_class[at.mesh.devices[0]]]) for at in case.positions])
    else:
        raise SolverLimitError(f"of pipelines over {job.cluster.name} more would be reserved than devices have")
    if plan.profile is not None:
        plan = with_used_profile(plan, made.programs)
    note = (
        f"{case.pipeline.text(job.cluster)}: sharding was chosen for each position's devices as if they held the model"
    )
    plan = msgspec.structs.replace(plan, notes=(*plan.notes, note), tried=kept(search.tried))
    plan = certified_by_work(plan)
    if search.is_interrupted:
        raise Interrupted((plan,))
    return plan


def told(made: Realised) -> Plan:
    """The plan with its prediction."""
    return msgspec.structs.replace(made.plan, prediction=predict(made.plan, made.programs, made.simulation))
