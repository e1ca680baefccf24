"""The fastest plan over pipelines of every degree, mesh, microbatches, schedule and stages a position, and over none.

Propose, price, estimate, plan, keep. A plan of one stage is searched as ever. Combinations (`combinations`) are priced
(`stage_prices`: one sharding per inner mesh and samples of a microbatch, shared over degrees) and estimated
(`estimate`), and the most promising are planned as pinned pipelines are (`pipeline_search`), until the next one's
estimate is no better than the best plan, or `MOST` were planned in vain, or time is up. Pipelines of many microbatches
are planned for the first of them (`draft`); the best is made whole, and others as long as one may be faster. Estimates
are no bounds: that what was not planned is slower is not proved, and a note says what was left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial

from paraplan.ir.errors import NoPlanError
from paraplan.ir.plan import Plan
from paraplan.ir.process.cores import num_cores
from paraplan.ir.process.workers import Workers
from paraplan.planner.alternatives.tried import kept
from paraplan.planner.certificate import certified_in_space
from paraplan.planner.constraints import device_budget
from paraplan.planner.interrupts import found_until
from paraplan.planner.joint.attempts import Attempts
from paraplan.planner.joint.bounding.proving import SpaceProof
from paraplan.planner.joint.combinations import Combination
from paraplan.planner.joint.drafting import Drafting, PlanningEffort
from paraplan.planner.joint.drafting_beside import PackedEstimate, drafted_beside, received_from
from paraplan.planner.joint.estimate import Estimate
from paraplan.planner.joint.estimating import estimate_best
from paraplan.planner.joint.nothing_found import nothing_found
from paraplan.planner.joint.prices.pricing import Pricing, pricing_beside
from paraplan.planner.joint.prices.pricing_rounds import PricingRounds
from paraplan.planner.joint.promise import Promise, to_be_ordered
from paraplan.planner.one_stage.one_stage_plans import OneStage, OneStagePlans, is_piped
from paraplan.planner.pipeline.draft import Draft, step_s
from paraplan.planner.pipeline.pipeline_search import Slower
from paraplan.planner.pipeline.searched_schedule import SEARCHED

Make = Callable[[Drafting], Draft | Slower]
"""Makes a draft."""
MOST, GRACE = 4, 1.4
"""Pipelines planned one after another without one being faster than the best, after which no other is; times the limit,
after which one in vain is enough, as it is where none was to fit and plans of least memory are left to try."""
SHORT = 0.02
"""What an estimate may be longer by for its plan, of the fewest actions, to be made before that of the most."""
SHARED = 2.0
"""How much longer a draft may take where others are made beside it."""
POOR = 1.5
"""How much longer than estimated a plan may take for there to be no time for anything else."""
PROMISING = 0.01
"""How much shorter than the best plan another has to promise to be for time kept for other searches to go into it."""
LATE = "others not in time"
"""Said where a pipeline would have been planned, were there time for so many microbatches."""
AGAIN_LEFT = 0.3
"""Of the limit, what is left at least for more to be priced after the first pipelines were planned."""
ORDERED_LEFT, ORDERED_SHARE, ORDERED_GAIN = 0.25, 0.15, 0.06
"""Of the limit, what is left at least for a pipeline's orders to be searched for; of what is left, what that may take;
by how much longer than the best plan it may be thought to be."""
LISTED, MOST_WORKERS = 300, 8
"""Combinations from which on processes beside this one are worth their start at once; how many there are at most, with
it."""


@dataclass
class JointSearch(Attempts):
    """A search under way.

    Attributes:
        job, constraints, shardings, progress, deadline: as of `Attempts`.
        reserves: whether allocators have to have room for its pipelines; searches for fewer bytes, for which time was
            kept, follow where they have none.
        workers: that price beside this process; None for none.
        is_interrupted: whether an interrupt ended it.
    """

    reserves: bool = False
    workers: Workers | None = None
    is_interrupted: bool = False
    roomless: list[Draft] = field(default_factory=list)
    _promise: Promise = field(default_factory=Promise)
    _proof: SpaceProof | None = None
    _planned: dict[str, Estimate] = field(default_factory=dict)

    @cached_property
    def budget(self) -> int:
        """Bytes a device may hold."""
        return device_budget(self.job.cluster, self.constraints)

    @cached_property
    def pricing(self) -> Pricing:
        """Prices of positions."""
        return Pricing(self.job, self.constraints, self.budget, self.progress, self.deadline, self.workers)

    def found(self, listed: Sequence[Combination], one_stage: OneStage, certify: bool = True) -> tuple[Draft, ...]:
        """The fastest plan of one stage or of some combinations, made, and the others, the faster first.

        Args:
            listed: combinations, all those in question.
            one_stage: the search of plans without a pipeline.
            certify: whether a lower bound is proved.
        Raises:
            SolverLimitError: nothing was found; says what was tried, and what the search of one stage said.
        """
        estimates: list[Estimate] = []
        self._proof = SpaceProof(self.pricing, listed, self.workers) if certify and self._is_bounded else None
        alone = OneStagePlans(self.job, self.constraints, self.deadline, one_stage, self._try, self.drafts)
        try:
            alone.plan_usual()
            estimates = self._propose(listed)
            self._begin_proof()
            self._make_fastest()
            self._prolong()
            alone_s = min((each.step_s for each in estimates if each.combination.pp == 1), default=math.inf)
            alone.solve(self.roomless, self._hoped_of, alone_s, certify, self._proof is not None)
            alone.plan_by_hand()
            self._order_anew(estimates)
            self.drafts = self.drafts or self.roomless  # for which room is to be made
            self._make_fastest()
        except KeyboardInterrupt as fault:
            self._end(fault)
        if not self.drafts:
            faults = *self.pricing.faults, *self.faults
            raise nothing_found(self.job, self.constraints, self.budget, faults, self.words)
        note = (
            f"{len(estimates)} pipelines were estimated ({len(self.pricing.prices)} kinds of stages priced), of which "
            f"the fastest were planned: {'; '.join(self.words)}"
        )
        tried = kept(self.tried)
        best, *others = (draft.noted((note,), tried) for draft in sorted(self.drafts, key=step_s))
        return (Draft.of(self._certified(best)) if certify else best), *others

    def _propose(self, listed: Sequence[Combination]) -> list[Estimate]:
        """Price, estimate and plan combinations, for fewer bytes where some that were to fit do not; and again what was
        not estimated for all of them, or there was no time to price before, where there is some after all."""
        first = share = self._promise.first(self.budget, self.reserves)
        while True:
            rounds = PricingRounds(self.pricing, listed)
            estimates = estimate_best(rounds, self.best_s, self.faults, share)
            are_over = not self._plan_promising(estimates) and not self.deadline.is_over
            leaner = self._promise.leaner(share, self.budget) if are_over else None
            if leaner is None:
                break
            share = leaner
        has_more, is_leaner = rounds.has_more(self.best_s), share < first
        if self.drafts and (has_more or is_leaner):
            if has_more:
                self._prolong()
            if self.deadline.passed_s < (1 - AGAIN_LEFT) * self.deadline.limit_s:
                self.pricing.share = (self.deadline.passed_s / self.deadline.limit_s + 1) / 2
                rounds = PricingRounds(self.pricing, listed) if is_leaner else rounds
                more = estimate_best(rounds, self.best_s, self.faults, first)
                every = {each.combination: each for each in (*estimates, *more)}
                estimates = sorted(every.values(), key=lambda each: each.rank)
                self._plan_promising([each for each in estimates if each.combination.text not in self._planned])
        return estimates

    def _end(self, fault: KeyboardInterrupt) -> None:
        """Make the best of the plans so far whole; interrupted once more, keep those that are."""
        for draft in found_until(fault, Draft):
            self.drafts.append(draft)
            self._drafted[id(draft)] = "one stage", None, {}
        try:
            self._make_fastest()
        except KeyboardInterrupt:
            self.drafts = [draft for draft in self.drafts if draft.plan is not None]
        if not self.drafts:
            raise fault
        self.is_interrupted = True

    def _prolong(self) -> bool:
        """Take the time that was kept for searches for fewer bytes, which do not follow where allocators have room for
        a plan; whether there is more of it now."""
        if self.deadline.kept == 1 or not self.drafts:
            return False
        self.deadline.prolong()
        return True

    def _prolong_for(self, late: Sequence[Estimate]) -> bool:
        """As `_prolong`, if one of those not in time promises enough."""
        hoped_s = min(map(self._hoped_s, late), default=math.inf)
        return hoped_s <= (1 - PROMISING) * self.best_s and self._prolong()

    @property
    def _is_bounded(self) -> bool:
        """Whether anything is proved of every combination: nothing is where the schedule is searched (its orders are no
        named one's), and where positions of other groups may be faster than those of the first, of which bounds are."""
        return not (self.job.compiled or self.constraints.schedule == SEARCHED or len(self.job.cluster.groups) > 1)

    def _go_on_proving(self, first: Estimate) -> None:
        """Prove what can be while a plan is made, for that of it and the best that is thought to be faster."""
        best = min(self.drafts, key=step_s, default=None)
        if self._proof is not None and best is not None and best.step_s <= self._hoped_s(first):
            self._proof.prepare(best.cut, best.step_s)
        elif self._proof is not None and math.isfinite(first.step_s):
            self._proof.prepare(first.bounds, first.step_s)

    def _begin_proof(self) -> None:
        """Prove what can be of every combination, beside what else is done."""
        if self._proof is not None and self.drafts:
            best = min(self.drafts, key=step_s)
            self.progress(f"a bound on every pipeline; best so far {self.best_s:.4g} s")
            self._proof.begin(best.cut, best.step_s, at_once=self.is_interrupted)

    def _order_anew(self, estimates: Sequence[Estimate]) -> None:
        """Search for schedules of the stages of pipelines of few actions, of the best plan where it is one and of those
        that were thought to come near it, where no schedule is pinned and there is time."""
        if self.constraints.schedule is not None or not self.drafts:
            return
        best = self._planned.get(self._drafted[id(min(self.drafts, key=step_s))][0])
        within_s = (1 + ORDERED_GAIN) * self.best_s
        near = sorted((each for each in estimates if self._hoped_s(each) <= within_s), key=self._hoped_s)
        for estimate in to_be_ordered(best, near, len(self.job.program.segments)):
            if self.deadline.passed_s > (1 - ORDERED_LEFT) * self.deadline.limit_s:
                return
            drafting = Drafting(self.pricing, self.shardings, self.reserves, [])
            drafting = drafting.ordering(self.deadline.share_s(ORDERED_SHARE))
            make = partial(drafting.ordered_anew, estimate)
            self._try(f"{estimate.combination.text}, ordered anew", drafting.pins(estimate), make)

    def _certified(self, best: Draft) -> Plan:
        """The plan with what is proved of every combination, of an interrupted search what is known at once; with its
        own certificate where that is nothing, and where the plan is outside of the space and faster."""
        plan, cut, proof = best.made(), best.cut, self._proof
        if proof is None:
            return plan
        try:
            if self.is_interrupted or proof.cut is None or (len(cut) > 1 and proof.cut != cut):
                self._begin_proof()
            (bound_s, spread, _), mesh = proof.answer(), plan.stages[0].mesh.shape
        except KeyboardInterrupt:
            self.is_interrupted = True
            return plan
        is_listed = plan.schedule.name != SEARCHED and any(
            each.mesh in ((), mesh) and each.microbatches == plan.num_microbatches for each in proof.listed
        )
        if is_listed or bound_s <= self.best_s:
            return certified_in_space(plan, bound_s, len(proof.listed), spread)
        return plan

    def _plan_promising(self, estimates: Sequence[Estimate]) -> bool:
        """Plan estimated combinations, the most promising first, until no other promises to be faster; whether all that
        were to fit did, or there was no time for others.
        """
        waiting, in_vain, effort = list(estimates), 0, PlanningEffort(len(self.job.program.segments))
        known_s = self.best_s
        self._promise.begin()
        most = max((each.combination.num_actions for each in estimates), default=1)

        def rank(estimate: Estimate) -> float:
            return self._hoped_s(estimate) * (1 + SHORT * estimate.combination.num_actions / most)

        while waiting:
            left_s = self.deadline.limit_s - self.deadline.passed_s
            in_time = [each for each in waiting if effort.seconds(each.combination) <= left_s]
            if len(in_time) < len(waiting) and LATE not in self.words:
                self.words.append(LATE)
            hopes = is_piped(self.constraints, self.job.cluster.num_devices)
            hopes = hopes or any(math.isfinite(each.step_s) for each in waiting)
            enough = MOST if hopes and self.deadline.passed_s < GRACE * self.deadline.limit_s else 1
            is_poor = self.best_s > POOR * min(map(self._hoped_s, waiting))
            if not in_time and ((self.drafts and not is_poor) or in_vain >= enough):
                if self._prolong_for(waiting):
                    continue
                return True
            first = min(in_time, key=rank) if in_time else min(waiting, key=lambda each: each.combination.num_actions)
            if in_vain >= MOST and (self.drafts or self._promise.unfit or math.isinf(first.step_s)):
                break
            left = effort.left(first.combination, self.deadline)
            if not self._is_worth(first, max(left, left_s / self.deadline.limit_s)):
                if self._prolong_for([each for each in waiting if each not in in_time]):
                    continue
                break
            waiting.remove(first)
            if not self._is_worth(first, left):
                continue
            began_s = self.deadline.passed_s
            besides = [each for each in in_time if SHARED * effort.seconds(each.combination) <= left_s]
            besides = [each for each in besides if self._is_worth(each, effort.left(each.combination, self.deadline))]
            beside = self._beside(sorted((each for each in besides if each is not first), key=rank)[: MOST - 1])
            if not beside:
                self._go_on_proving(first)
            for estimate, make in ((first, None), *beside):
                if make is not None:
                    waiting.remove(estimate)
                before = self.best_s
                self._plan(estimate, make)
                in_vain = 0 if self.best_s < before else in_vain + 1
            effort.took(first.combination, self.deadline.passed_s - began_s)
            if self._proof is not None:
                self._proof.pause()
            if self._promise.over_bytes and self.best_s == known_s:
                break
        return not self._promise.unfit

    def _is_worth(self, estimate: Estimate, left: float) -> bool:
        """Whether it is worth planning, with such a share of the time left then."""
        return self._hoped_s(estimate) <= (1 + self._promise.slack(estimate, left)) * self.best_s

    def _beside(self, estimates: Sequence[Estimate]) -> list[tuple[Estimate, Make]]:
        """Estimates whose drafts other processes make from now on, as many as have nothing to do, of those that may
        come near the best; and what waits for each."""
        found: list[tuple[Estimate, Make]] = []
        for each in estimates:
            is_piped = math.isfinite(each.step_s) and each.combination.pp > 1
            if self.workers is None or not self.workers.has_idle or not is_piped:
                break
            self.progress(f"beside: {each.combination.text} ({each.step_s:.4g} s estimated)")
            task = PackedEstimate.of(each, self.pricing), self.best_s, self.reserves
            answer = self.workers.begin(drafted_beside, task, self.pricing)
            found.append((each, partial(received_from, answer)))
        return found

    def _hoped_s(self, estimate: Estimate) -> float:
        return self._promise.hoped_s(estimate, self.pricing.kind(estimate.combination))

    def _plan(self, estimate: Estimate, beside: Make | None = None) -> None:
        """Plan a combination as a pinned pipeline, or take what was planned beside."""
        step_s = estimate.step_s if math.isfinite(estimate.step_s) else None
        said = "estimated not to fit" if step_s is None else f"{step_s:.4g} s estimated"
        drafting = Drafting(self.pricing, self.shardings, self.reserves, [])
        within_s = self.best_s if estimate.combination.pp > 1 else math.inf  # one stage takes a second
        make = partial(drafting.drafted, estimate, within_s) if beside is None else partial(beside, drafting)
        pins, self._planned[estimate.combination.text] = drafting.pins(estimate), estimate
        found_s = self._try(estimate.combination.text, pins, make, f" ({said})", step_s)
        for draft in drafting.roomless:
            self.roomless.append(draft)
            self._drafted[id(draft)] = estimate.combination.text, step_s, {}
        fault = None if found_s is not None else self.faults[-1]
        if step_s is not None and (fault is None or isinstance(fault, NoPlanError)):
            ended_s, over_bytes = drafting.ended_s[-1] if drafting.ended_s else step_s, fault.over_bytes if fault else 0
            self._promise.planned(estimate, self.pricing.kind(estimate.combination), found_s, ended_s)
            self._promise.lacks(estimate, over_bytes)


def search_joint(
    found: JointSearch, listed: Sequence[Combination], one_stage: OneStage, certify: bool
) -> tuple[Draft, ...]:
    """The fastest plan found, made, and the others, the faster first.

    Args:
        found: the search. A pinned degree or schedule leaves plans of one stage out.
        listed: what is searched.
        one_stage: plans without a pipeline.
        certify: whether to bound the step of every plan in scope.
    Raises:
        ConstraintError: what is pinned leaves nothing.
        SolverLimitError: nothing that fits was found.
    """
    made_with = found.job, found.constraints, found.budget, found.deadline
    beside = Workers(min(num_cores(), MOST_WORKERS) - 1, pricing_beside, *made_with, waits=len(listed) <= LISTED)
    with closing(beside) as found.workers:
        return found.found(listed, one_stage, certify)
