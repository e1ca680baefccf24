"""The fastest pipeline found over groups of nodes that differ: each position on its own devices, mesh and sharding.

Divisions of the groups into positions, orders of the groups, microbatches and schedules (`listing`) are put in order by
a closed form (`shares`) over prices of each kind of group (`span_prices`); of the best the cut is searched and the
orders simulated (`mixed_estimate`); the most promising are lowered and simulated as plans (`mixed_plan`), each device
within its own budget, until the next estimate is no better than the best plan, `MOST` were planned in vain, or time is
up. Of the best plan boundaries shift as long as the simulated step gets shorter.

Limits: a position lies on one group; positions of a group follow each other and have one mesh and sharding; nothing is
offloaded. An estimate is no bound: the certificate is of the work alone (`work_bound`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from paraplan.cost_models.predict import predict, with_reserved, with_used_profile
from paraplan.cost_models.realised_plan import Realised, over_budget_bytes
from paraplan.ir.errors import ConstraintError, InvalidPlanError, SolverLimitError
from paraplan.ir.plan import Plan, Tried
from paraplan.ir.sizes import say_size
from paraplan.planner.alternatives.tried import in_vain, kept, planned
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.mixed.links import Handing
from paraplan.planner.mixed.listing import divisions, group_orders, scheduled
from paraplan.planner.mixed.mixed_estimate import MixedEstimate, MixedPricer, shifted
from paraplan.planner.mixed.mixed_plan import MixedCase
from paraplan.planner.mixed.positions import MixedPipeline, Position, Span, device_budgets, span_meshes
from paraplan.planner.mixed.shares import least_s, quick_s
from paraplan.planner.mixed.span_prices import SpanPrices
from paraplan.planner.mixed.work_bound import certified_by_work
from paraplan.planner.passes.grad_reductions import ROOM
from paraplan.planner.pipeline.stage_prices import StagePrices
from paraplan.planner.schedules.named import NAMED

PRICED_SHARE, ESTIMATED_SHARE = 0.4, 0.6
"""Of the time limit, for prices; after which nothing else is estimated."""
QUICK = 1500
"""Pipelines looked at by the closed form, those of least work first."""
ESTIMATED = 32
"""Pipelines whose cut is searched: the best by the closed form."""
MOST = 4
"""Pipelines planned one after another without one being faster than the best, after which no other is."""
SLACK = 0.05
"""What an estimate may be too high by."""
ROUNDS = 3
"""How often a pipeline that does not fit is cut anew, for as much less as it was over."""
SHIFTS, SHIFTED = 12, 4
"""Boundaries of the best plan shifted one after another at most; of each, how many are simulated of those estimated
best."""


@dataclass
class MixedSearch:
    """A search under way.

    Attributes:
        job, constraints: what is planned, and what is pinned.
        progress: told what is being tried.
        deadline: of all of it.
        best: the fastest plan that fits, and its case.
        tried: what was planned.
        over: what the last that did not fit lacked, in words.
        less: per group, what of a device's budget is kept for what allocators reserve beyond what is alive.
    """

    job: Job
    constraints: Constraints
    progress: Callable[[str], None]
    deadline: Deadline
    best: tuple[Realised, MixedCase, MixedEstimate] | None = None
    tried: list[Tried] = field(default_factory=list)
    over: str = ""
    less: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limit_s = PRICED_SHARE * self.deadline.limit_s
        self.prices = SpanPrices(self.job, self.constraints, self.progress, limit_s)
        self.handing = Handing(self.job.cluster)

    @property
    def best_s(self) -> float:
        """The shortest step of a plan so far."""
        return math.inf if self.best is None else self.best[0].simulation.step_s

    def lessen(self, over_bytes: dict[int, int]) -> None:
        """Begin anew with budgets of groups less by what their devices were over."""
        for group, nbytes in over_bytes.items():
            self.less[group] = self.less.get(group, 0) + max(nbytes, 0)
        self.best = None

    def found(self) -> tuple[Realised, MixedCase]:
        """The fastest plan found.

        Raises:
            ConstraintError: what is pinned leaves no pipeline over the groups.
            SolverLimitError: none that was tried fits.
        """
        ways = list(divisions(self.job, self.constraints))
        if not ways:
            raise ConstraintError(f"no pipeline over the groups of {self.job.cluster.name} allows what is pinned")
        self.prices.price((span, count) for spans, counts in ways for span in spans for count in counts)
        self._plan_promising(self.estimates(ways))
        if self.best is None:
            why = f": {self.over}" if self.over else ""
            raise SolverLimitError(f"no pipeline over the differing groups of {self.job.cluster.name} was found{why}")
        self._shift()
        made, case, _ = self.best
        return case.quickened(made), case

    def estimates(self, ways: Sequence[tuple[tuple[Span, ...], tuple[int, ...]]]) -> list[MixedEstimate]:
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
        found: list[MixedEstimate] = []
        for _, _, pipeline, positions in sorted(quick, key=lambda each: (-each[0], each[1])):
            if found and self.deadline.passed_s > ESTIMATED_SHARE * self.deadline.limit_s:
                break
            pricer = MixedPricer(pipeline, positions, self.handing)
            begun = pricer.begun()
            if begun is not None:
                found.append(pricer.improved(begun))
        return sorted(found, key=lambda each: each.rank)

    def _listed(
        self, ways: Sequence[tuple[tuple[Span, ...], tuple[int, ...]]]
    ) -> Iterator[tuple[float, MixedPipeline, tuple[StagePrices, ...]]]:
        """Every pipeline with every choice of its spans' shardings, and what it takes at least by the closed form."""
        for (spans, counts), order in itertools.product(ways, group_orders(self.job)):
            along = tuple(spans[group] for group in order)
            for count in counts:
                choices = [self.prices.of(span, count) for span in along]
                if not all(choices):
                    continue
                for pipeline in scheduled(self.job, self.constraints, along, count):
                    for shardings in itertools.product(*choices):
                        seconds = [
                            each.totals.seconds
                            for span, each in zip(along, shardings, strict=True)
                            for _ in range(span.count)
                        ]
                        yield least_s(pipeline, seconds), pipeline, shardings

    def _positions(self, pipeline: MixedPipeline, shardings: Sequence[StagePrices]) -> tuple[Position, ...] | None:
        """The positions of a pipeline; None where a sharding does not divide on one's mesh."""
        found: list[Position] = []
        for span, prices in zip(pipeline.spans, shardings, strict=True):
            there = self.prices.there(span, pipeline.microbatches, prices)
            if there is None:
                return None
            budget = self.prices.budget(span.group) - self.less.get(span.group, 0)
            room = budget - prices.workspace_bytes - budget // ROOM
            meshes = span_meshes(self.job.cluster, span, there.sharding.decisions.mesh)
            found += [Position(there, room, span.group, mesh, budget) for mesh in meshes]
        return tuple(found)

    def _plan_promising(self, estimates: Sequence[MixedEstimate]) -> None:
        in_vain_count = 0
        for estimate in estimates:
            late = self.deadline.is_over and (self.best is not None or in_vain_count)
            if late or in_vain_count >= MOST or estimate.step_s > (1 + SLACK) * self.best_s:
                break
            before = self.best_s
            self._plan(estimate)
            in_vain_count = 0 if self.best_s < before else in_vain_count + 1

    def _plan(self, estimate: MixedEstimate) -> None:
        """Plan an estimated pipeline; where a position is over its budget, with as much less room there."""
        pipeline, positions = estimate.pipeline, estimate.positions
        text = pipeline.text(self.job.cluster)
        self.progress(f"{text} ({estimate.step_s:.4g} s estimated)")
        step_s = estimate.step_s if math.isfinite(estimate.step_s) else None
        for _ in range(ROUNDS):
            case = MixedCase(self.job, self.constraints, pipeline, positions)
            try:
                made = case.made(self.constraints.stages or estimate.bounds, estimate.taken)
            except (ConstraintError, InvalidPlanError) as fault:
                self.tried.append(in_vain(text, fault, step_s))
                return
            if made.left_bytes(case.budgets) >= 0 and not made.over_bytes:
                self.tried.append(planned(text, told(made), step_s))
                if made.simulation.step_s < self.best_s:
                    self.best = made, case, estimate
                return
            over = case.over_bytes(made)
            positions = tuple(each.with_less(nbytes) for each, nbytes in zip(positions, over, strict=True))
            again = MixedPricer(pipeline, positions, self.handing).begun()
            if again is None or math.isinf(again.step_s):
                break
            estimate = again
        self.over = f"{text} holds {say_size(-made.left_bytes(case.budgets))} more than a device may"
        self.tried.append(in_vain(text, self.over, step_s))

    def _shift(self) -> None:
        """Shift boundaries of the best plan as long as its simulated step gets shorter, and time is left."""
        assert self.best is not None
        made, case, estimate = self.best
        pricer = MixedPricer(case.pipeline, case.positions, self.handing)
        bounds = tuple((stage.first, stage.stop) for stage in made.plan.stages)
        for _ in range(0 if self.constraints.stages else SHIFTS):
            near = sorted(map(pricer.at, shifted(bounds, pricer.tail)), key=lambda each: each.rank)
            better = None
            for each in near[:SHIFTED]:
                if self.deadline.is_over:
                    return
                tried = case.made(each.bounds, each.taken)
                if tried.left_bytes(case.budgets) >= 0 and tried.simulation.step_s < made.simulation.step_s:
                    better, made, bounds = each, tried, each.bounds
                    break
            if better is None:
                return
            self.best = made, case, replace(estimate, bounds=bounds)


def allows_mixed(job: Job, constraints: Constraints) -> bool:
    """Whether pipelines over differing groups are searched: there are several, and nothing is pinned that they have not
    (one stage, a schedule that is searched or held by several positions, states or activations off the device)."""
    c = constraints
    named = c.schedule is None or (c.schedule in NAMED and NAMED[c.schedule].num_replicas == 1)
    free = c.pp is None or c.pp >= len(job.cluster.groups)
    at_home = not c.tiers and not c.state_tiers and c.delayed_update is None
    return len(job.cluster.groups) > 1 and named and free and at_home and not job.compiled


def search_mixed(job: Job, constraints: Constraints, deadline: Deadline, progress: Callable[[str], None]) -> Plan:
    """The fastest pipeline found over the groups of a cluster, priced and certified.

    Where allocators would reserve more than there is for a plan (CUDA's do), it is searched for again with as much less
    for every device of such a group.

    Raises:
        ConstraintError: what is pinned leaves no pipeline over the groups.
        SolverLimitError: none that was tried fits.
    """
    search, reserves = MixedSearch(job, constraints, progress, deadline), constraints.reserve_bytes != 0
    for _ in range(ROUNDS + 1):
        made, case = search.found()
        plan = with_reserved(told(made), made.programs)
        assert plan.prediction is not None
        whole = device_budgets(
            job.cluster, [replace(at, budget=search.prices.budget(at.group)) for at in case.positions]
        )
        over = over_budget_bytes(plan, plan.prediction.reserved_bytes or made.simulation.peak_bytes, whole)
        if not reserves or max(over) <= 0:
            break
        search.lessen({at.group: over[plan.schedule.rank_class[at.mesh.devices[0]]] for at in case.positions})
    else:
        raise SolverLimitError(f"of pipelines over {job.cluster.name} more would be reserved than devices have")
    if plan.profile is not None:
        plan = with_used_profile(plan, made.programs)
    return msgspec.structs.replace(certified_by_work(plan), tried=kept(search.tried))


def told(made: Realised) -> Plan:
    """The plan with its prediction."""
    return msgspec.structs.replace(made.plan, prediction=predict(made.plan, made.programs, made.simulation))
