"""Plans of one stage on every candidate mesh: solved one after another, the fastest made faster, others kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from paraplan.ir.errors import SolverLimitError
from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.plan import Plan, Tried
from paraplan.ir.plan_words import plan_words
from paraplan.planner.alternatives.tried import in_vain, kept, planned
from paraplan.planner.assemble import Job
from paraplan.planner.best_plan import Progress
from paraplan.planner.certificate import certified
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import QUICKENED, Deadline, SolveLimits
from paraplan.planner.interrupts import found_until
from paraplan.planner.one_stage.all_alike import all_alike, nodes_alike
from paraplan.planner.one_stage.candidate_passes import passed
from paraplan.planner.one_stage.failures import Failure, not_tried
from paraplan.planner.one_stage.hidden import hiding
from paraplan.planner.one_stage.on_mesh import MOST_LATE, plans_on_mesh, with_other_counts
from paraplan.planner.passes.delayed_updates import delay_note
from paraplan.planner.passes.placement_note import places_note
from paraplan.planner.passes.update_placement import placed
from paraplan.planner.pipeline.draft import Draft
from paraplan.planner.sharding.solve import Candidate, Skipped

HIDDEN = 0.02
"""How much more work than the best plan's three axes may take and still be solved: a plan that moves more may hide it
better, though on the meshes measured never by as much."""
OTHERS = 4
"""Plans kept beside the fastest."""


@dataclass
class SolvedMeshes:
    """Plans of one stage on some meshes, and why there are no others.

    Attributes:
        job, constraints, limits: what is solved.
        meshes: all candidates.
        deadline: of all of it.
        found: plans, of any of them.
        skipped, late: meshes that were not solved: all their plans take more work than one found, or time ran out.
        failures: why others have no plan.
        is_interrupted: whether more would have been solved, or the best made faster, had nobody interrupted it.
    """

    job: Job
    constraints: Constraints
    limits: SolveLimits
    meshes: Sequence[Mesh]
    deadline: Deadline
    found: list[Candidate] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    late: list[Mesh] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    is_interrupted: bool = False

    def solve(self, progress: Progress) -> None:
        """Solve every mesh; where none has a plan in the usual numbers of microbatches, in others."""
        for mesh in self.meshes:
            if self.deadline.passed_s >= (1 if self._has_plan else MOST_LATE) * self.limits.time_s:
                self.late.append(mesh)
                continue
            timed, cutoff_s = self._timed(mesh), self._cutoff_s(mesh)
            here = plans_on_mesh(self.job, mesh, self.constraints, timed, self.failures, progress, cutoff_s)
            if isinstance(here, Skipped):
                self.skipped.append(here)
            else:
                self.found += here
                self.found += self._alike(mesh, here)
                if not self.deadline.is_over:
                    self.found += hiding(self.job, mesh, self.constraints, self._timed(mesh), here)
        self.failures += [not_tried(mesh, 1) for mesh in self.late]
        for mesh in () if self.found else self.meshes:
            if self._has_plan and self.deadline.is_over:
                break
            timed = self._timed(mesh)
            self.found += with_other_counts(
                self.job, mesh, self.constraints, timed, self.failures, progress, self.deadline
            )

    def interrupted(self, fault: KeyboardInterrupt) -> None:
        """End with the plans found so far.

        Raises:
            KeyboardInterrupt: there are none.
        """
        self.found += found_until(fault, Candidate)
        if not self.found:
            raise fault
        self.is_interrupted = True

    def fastest(self, unpriced: Sequence[str]) -> tuple[Plan, tuple[Draft, ...]]:
        """The best of the plans found, after all passes, with its certificate and what it was chosen from; and the
        next best, not made yet.

        Args:
            unpriced: notes of what has no price.
        Raises:
            SolverLimitError: passes would hardly make it faster than a plan known before.
        """
        least_s = min(map(_step_s, self.found))
        if least_s >= self.limits.passable_s:
            raise SolverLimitError(f"{least_s:.4g} s before passes, where {self.limits.known_s:.4g} s are known")
        if self.constraints.delayed_update is not None:
            self.found = [
                self._passed(each, update=True) for each in self.found if _step_s(each) <= QUICKENED * least_s
            ]
        best, *others = sorted(self.found, key=_step_s)
        others = [each for each in others if _step_s(each) < self.limits.passable_s]
        drafts = tuple(
            Draft(_step_s(each), partial(self._made, each), each.plan, max(each.simulation.peak_bytes))
            for each in others[:OTHERS]
        )
        try:
            best = self._passed(best)
        except KeyboardInterrupt as fault:
            self.interrupted(fault)
        bound_s = min(candidate.bound_s for candidate in self.found)
        bound_s = 0.0 if self.is_interrupted or math.isinf(bound_s) else bound_s
        plan = certified(best, bound_s, len(self.meshes) - len(self.skipped) - len(self.late))
        faults = [each.fault for each in self.failures]
        places = places_note(best, self.found, faults, self.constraints)
        notes = (*plan.notes, *self._note(best), *unpriced, *delay_note(plan), *places)
        return msgspec.structs.replace(plan, notes=notes, tried=self._tried(plan)), drafts

    def _alike(self, mesh: Mesh, here: Sequence[Candidate]) -> list[Candidate]:
        """What none of the plans here may be: on a mesh of one axis, or the only one, that of all devices alike; on
        that of nodes and their devices, that of all nodes alike."""
        node = min(group.devices_per_node for group in self.job.cluster.groups)
        ways = [True] if len(mesh.shape) == 1 or len(self.meshes) == 1 else []
        ways += [False] if mesh.size > node > 1 and mesh.shape == (mesh.size // node, node) else []
        if self.deadline.is_over:
            return []
        given = self.job, mesh, self.constraints, self._timed(mesh)
        found = [plan for in_node in ways for plan in all_alike(*given, here, in_node)]
        return found + (nodes_alike(*given, (*here, *found)) if False in ways else [])

    @property
    def _has_plan(self) -> bool:
        return bool(self.found) or self.limits.has_plan

    def _timed(self, mesh: Mesh) -> SolveLimits:
        """The limits of a mesh: half of the time that is left while others wait."""
        share_s = self.deadline.share_s(1.0 if mesh == self.meshes[-1] else 0.5)
        known_s = min(map(_step_s, self.found), default=math.inf)
        return replace(self.limits, time_s=share_s, found_s=min(self.limits.found_s, known_s))

    def _cutoff_s(self, mesh: Mesh) -> float:
        """The work above which a mesh is skipped; one and two axes never are."""
        if len(mesh.shape) < 3 or not self.found:
            return math.inf
        return (1 + HIDDEN) * min(candidate.objective_s for candidate in self.found)

    def _passed(self, candidate: Candidate, update: bool = False) -> Candidate:
        """After all passes, or after that of states and their update alone."""
        by = {"by": placed} if update else {}
        return passed(candidate, self.limits, self.constraints, deadline=self.deadline, **by)

    def _made(self, candidate: Candidate) -> Plan:
        return certified(self._passed(candidate), 0.0, 1)

    def _note(self, best: Candidate) -> tuple[str, ...]:
        """What was searched and what was not, where there was a choice."""
        if len(self.found) + len(self.skipped) + len(self.late) < 2:
            return ()
        solved = ", ".join(dict.fromkeys(_shape(candidate.plan.stages[0].mesh) for candidate in self.found))
        text = f"meshes solved: {solved}"
        if self.skipped:
            each = ", ".join(f"{_shape(mesh.mesh)} ({mesh.work_s:.4g} s)" for mesh in self.skipped)
            text += f"; skipped, as all plans there take more work than this one's {best.objective_s:.4g} s: {each}"
        if self.late:
            text += f"; not solved, as time ran out: {', '.join(map(_shape, self.late))}"
        return (text,)

    def _tried(self, plan: Plan) -> tuple[Tried, ...]:
        """What was solved beside the plan, and what was not."""
        made = [
            Tried(what=plan_words(each.plan), step_s=_step_s(each), peak_bytes=max(each.simulation.peak_bytes))
            for each in sorted(self.found, key=_step_s, reverse=True)
        ]
        none = [
            in_vain(f"mesh {_shape(each.mesh)}, {count} microbatch{'es' if count > 1 else ''}", each.fault)
            for each in self.failures
            for count in (each.num_microbatches,)
        ]
        less = [
            in_vain(
                f"mesh {_shape(each.mesh)}", f"not solved: all plans there take {each.work_s:.4g} s of work or more"
            )
            for each in self.skipped
        ]
        return kept((*none, *less, *made, planned(plan_words(plan), plan)))


def _step_s(candidate: Candidate) -> float:
    return candidate.simulation.step_s


def _shape(mesh: Mesh) -> str:
    return "x".join(map(str, mesh.shape))
