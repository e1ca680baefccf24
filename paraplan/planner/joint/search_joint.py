"""The fastest plan over pipelines of every degree, mesh, microbatches, schedule and stages a position, and over none.

Propose, price, estimate, plan, keep. A plan of one stage is searched as ever. Combinations (`combinations`) are priced
(`stage_prices`: one sharding per inner mesh and samples of a microbatch, shared over degrees) and estimated
(`estimate`), and the most promising are planned as pinned pipelines are (`pipeline_search`), until the next one's
estimate is no better than the best plan, or `MOST` were planned in vain, or time is up. Estimates are no bounds: that
what was not planned is slower is not proved, and a note says what was left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec

from paraplan.ir.errors import ConstraintError, NoPlanError, ParaplanError
from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.plan import Plan
from paraplan.lowering import lower
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints, device_budget
from paraplan.planner.contradictions import check_constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.joint.combinations import Combination, combinations
from paraplan.planner.joint.estimate import Estimate, Pricer
from paraplan.planner.joint.sharding_front import front
from paraplan.planner.joint.stage_prices import StagePrices, few_microbatches, stage_prices
from paraplan.planner.pipeline.meshes import candidate_meshes
from paraplan.planner.pipeline.pipeline_search import first_devices, search_pipeline
from paraplan.planner.pipeline.stage_sharding import Sharding, Shardings
from paraplan.planner.schedules.named import NAMED
from paraplan.planner.sharding.solve import SolveLimits

OneStage = Callable[[Constraints], Plan]
Kind = tuple[tuple[int, ...], int, bool, float]
"""Of prices: the inner axes of a mesh (the degree where the user pinned them), how many axes it has, whether its first
is of one device, and the samples of a microbatch."""
MOST = 4
"""Pipelines planned one after another without one being faster than the best, after which no other is."""
SLACK = 0.03
"""What an estimate may be too high by: combinations estimated so much above the best plan are left."""
WORTH = 0.01
"""By how much a sample has to be faster in a larger microbatch for larger ones still to be priced."""
KEPT_SHARE = 0.6
"""Of a device's room, what parameters, gradients and states may take: the rest is for activations."""
SHARES = (0.02, 0.1, 0.5, 2.0)
"""Prices of what shardings keep, each as a share of the work at which all would be kept."""
GAP = 5e-3
"""Of the work of a sharding that is priced, what it may be above the least."""
ESTIMATED = 60
"""Combinations whose orders are simulated: the best by a closed form."""
PRICED_SHARE, ESTIMATED_SHARE = 0.4, 0.55
"""Of the time limit, after which nothing else is priced, and estimated."""


@dataclass
class JointSearch:
    """A search under way.

    Attributes:
        job, constraints: what is planned, and what is pinned of any plan.
        shardings: of stages' devices.
        progress: told what is being tried.
        deadline: of all of it.
    """

    job: Job
    constraints: Constraints
    shardings: Shardings
    progress: Callable[[str], None]
    deadline: Deadline
    plans: list[Plan] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    faults: list[NoPlanError | ConstraintError] = field(default_factory=list)
    _prices: dict[Kind, tuple[StagePrices, ...]] = field(default_factory=dict)

    @cached_property
    def budget(self) -> int:
        """Bytes a device may hold."""
        return device_budget(self.job.cluster, self.constraints)

    @property
    def best_s(self) -> float:
        """The shortest step of a plan so far."""
        return min(map(_step_s, self.plans), default=math.inf)

    def found(self, listed: Sequence[Combination], one_stage: OneStage) -> Plan:
        """The fastest plan of one stage or of some combinations."""
        estimates = self._estimates(listed)
        in_vain = 0
        for estimate in estimates:
            if self.plans and (self.deadline.is_over or in_vain >= MOST or estimate.step_s > (1 + SLACK) * self.best_s):
                break
            before = self.best_s
            self._plan(estimate)
            in_vain = 0 if self.best_s < before else in_vain + 1
        if self.constraints.schedule is None:
            self._try("one stage", lambda: one_stage(self.constraints))
        if not self.plans:
            raise next((each for each in self.faults if not isinstance(each, ConstraintError)), self.faults[-1])
        best = min(self.plans, key=_step_s)
        late = "; then time ran out" if self.deadline.is_over else ""
        note = (
            f"{len(estimates)} pipelines were estimated, of which the fastest were planned: {'; '.join(self.words)}"
            f"{late}"
        )
        return msgspec.structs.replace(best, notes=(*best.notes, note))

    def _try(self, text: str, planned: Callable[[], Plan]) -> None:
        self.progress(text)
        try:
            plan = planned()
        except (ConstraintError, NoPlanError) as fault:
            self.faults.append(fault)
            self.words.append(f"{text}: nothing")
            return
        self.plans.append(plan)
        self.words.append(f"{text}: {_step_s(plan):.4g} s")

    def _plan(self, estimate: Estimate) -> None:
        """Plan a combination as a pinned pipeline."""
        pinned = estimate.combination.pinned(self.constraints)
        if estimate.combination.each > NAMED[estimate.combination.schedule].stages:
            pinned = msgspec.structs.replace(pinned, stages=estimate.bounds)
        said = f"{estimate.step_s:.4g} s estimated" if math.isfinite(estimate.step_s) else "estimated not to fit"

        def planned() -> Plan:
            check_constraints(pinned, self.job.cluster.num_devices)
            return search_pipeline(self.job, pinned, self.shardings, self._sharding(estimate))

        self._try(f"{estimate.combination.text} ({said})", planned)

    def _estimates(self, listed: Sequence[Combination]) -> list[Estimate]:
        """Of every combination, the most promising first."""
        pricer = Pricer(self.job.cluster, self.budget)
        quick: list[tuple[float, int, Combination, StagePrices]] = []
        self._price_all(listed)
        for number, combination in enumerate(listed):
            prices = self._fastest(combination)
            if prices is not None:
                shape = self._mesh_shape(combination, prices)
                quick.append((pricer.quick_s(combination, prices, shape), number, combination, prices))
        found: list[Estimate] = []
        for _, _, combination, prices in sorted(quick, key=lambda each: each[:2])[:ESTIMATED]:
            if found and self.deadline.passed_s > ESTIMATED_SHARE * self.deadline.limit_s:
                break
            try:
                estimate = pricer.estimate(combination, prices, self._mesh_shape(combination, prices))
            except ConstraintError as fault:
                self.faults.append(fault)
                continue
            if estimate is not None:
                found.append(estimate)
        return sorted(found, key=lambda each: each.rank)

    @property
    def _late(self) -> bool:
        return self.deadline.passed_s > PRICED_SHARE * self.deadline.limit_s

    def _mesh_shape(self, combination: Combination, prices: StagePrices) -> tuple[int, ...]:
        """The mesh of a position: the priced one's inner axes, and the outer one as wide as devices are."""
        shape = prices.sharding.decisions.mesh.shape
        size = self.job.cluster.num_devices // combination.pp
        return combination.mesh or (size // math.prod(shape[1:]), *shape[1:])

    def _fastest(self, combination: Combination) -> StagePrices | None:
        """The prices of the fastest sharding whose positions may keep what they do, or of the leanest."""
        known = self._prices.get(self._kind(combination), ())
        room = KEPT_SHARE * self.budget * combination.pp
        fitting = (each for each in known if each.kept_bytes(self._mesh_shape(combination, each)) <= room)
        return next(fitting, known[-1] if known else None)

    def _kind(self, combination: Combination) -> Kind:
        """What prices depend on, but for what stages may keep: combinations alike in it share them."""
        outer = combination.mesh[0] if combination.mesh else 1
        samples = self.job.program.batch_size / (combination.microbatches * outer)
        inner = combination.mesh[1:] if combination.mesh else (combination.pp,)  # pinned: ranks of the batch follow pp
        return inner, len(combination.mesh), combination.mesh[:1] == (1,), samples

    def _price_all(self, listed: Sequence[Combination]) -> None:
        """Price what combinations need: of every kind the fewest samples first, and more as long as they pay."""
        needed: dict[Kind, list[Combination]] = {}
        for combination in listed:
            needed.setdefault(self._kind(combination), []).append(combination)
        best_s: dict[Kind, float] = {}
        for kind in sorted(needed, key=lambda kind: (str(kind[:3]), -kind[3]), reverse=True):
            alike = (*kind[:3], 0.0)
            if best_s.get(alike) == -math.inf or (self._prices and self._late):
                continue
            middle = needed[kind][len(needed[kind]) // 2]
            self.progress(f"prices of stages: {middle.text}")
            self._prices[kind] = self._price(middle)
            each_s = min((sum(prices.seconds) for prices in self._prices[kind]), default=math.inf) / kind[3]
            best_s[alike] = -math.inf if each_s > (1 - WORTH) * best_s.get(alike, math.inf) else each_s

    def _price(self, combination: Combination) -> tuple[StagePrices, ...]:
        """Shardings on a position's devices with their prices, fastest first; none that keeps more and takes longer."""
        found: list[StagePrices] = []
        try:
            part, inner, mesh = self._position(combination)
            limits = SolveLimits(
                time_s=self.deadline.share_s(PRICED_SHARE), memory_bytes=self.budget, relative_gap=GAP, certify=False
            )
            for decisions in front(part, mesh, combination.microbatches, inner, limits, SHARES):
                found.append(stage_prices(Sharding(part, decisions)))
        except (ConstraintError, NoPlanError) as fault:
            self.faults.append(fault)
        found.sort(key=lambda each: sum(each.seconds))
        leaner: list[StagePrices] = []
        for each in found:
            if not leaner or each.kept_bytes(each.shape) < leaner[-1].kept_bytes(leaner[-1].shape):
                leaner.append(each)
        return tuple(leaner)

    def _position(self, combination: Combination) -> tuple[Job, Constraints, Mesh]:
        """The job on one position's devices, what is pinned there, and the mesh.

        Raises:
            ConstraintError: there is none.
        """
        pinned = combination.pinned(self.constraints)
        check_constraints(pinned, self.job.cluster.num_devices)
        inner = msgspec.structs.replace(
            pinned, pp=None, schedule=None, stages=None, memory_bytes=None, reserve_bytes=0, recompute="none"
        )
        part = replace(self.job, cluster=first_devices(self.job.cluster, combination.pp))
        return part, inner, candidate_meshes(part, inner)[0]

    def _sharding(self, estimate: Estimate) -> Sharding | None:
        """The priced sharding on the combination's own mesh; None where its dims do not divide there."""
        decisions, combination = estimate.prices.sharding.decisions, estimate.combination
        part, _, mesh = self._position(combination)
        try:
            sharding = Sharding(part, replace(decisions, mesh=mesh, num_microbatches=combination.microbatches))
            lower(few_microbatches(sharding.whole))
        except (ParaplanError, LookupError, ValueError):
            return None
        return sharding


def search_joint(
    job: Job,
    constraints: Constraints,
    shardings: Shardings,
    one_stage: OneStage,
    progress: Callable[[str], None],
    deadline: Deadline,
) -> Plan:
    """The fastest plan found.

    Args:
        job: what is planned.
        constraints: with `pp` "auto"; a pinned schedule leaves plans of one stage out.
        shardings: of stages' devices.
        one_stage: plans without a pipeline.
        progress: told what is being tried.
        deadline: after which nothing else is begun, once something was found.
    Raises:
        ConstraintError: what is pinned leaves nothing.
        InfeasibleError, SolverLimitError: nothing fits; says what the first came to.
    """
    pinned = msgspec.structs.replace(constraints, pp=None)
    search = JointSearch(job, pinned, shardings, progress, deadline)
    try:
        listed = combinations(job, constraints)
    except ConstraintError as fault:
        if constraints.schedule is not None:
            raise
        search.faults.append(fault)
        listed = []
    return search.found(listed, one_stage)


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s
