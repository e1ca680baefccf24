"""Plans without a pipeline, that a joint search begins with and holds pipelines against, and those it ends with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

import msgspec

from paraplan.ir.errors import ConstraintError
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import check_constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.one_stage.all_sharded import all_sharded
from paraplan.planner.pipeline.draft import Draft, step_s
from paraplan.planner.pipeline.meshes import candidate_meshes, meshes_free
from paraplan.planner.sharding.expert_pins import has_experts

USUAL_SHARE = 0.25
"""Of the time limit, for plain data parallelism to be planned before all else."""
MESHES = 6
"""Of one stage, up to which each is solved."""
EXPOSED = 0.5
"""Of a step of plain data parallelism, what waits for links at least where nodes may be better off alike."""
LEAN_SHARE = 0.5
"""Of the time limit, for what needs little memory, where plain data parallelism does not fit."""
LEAST_SHARE, LEAST_S = 0.03, 0.5
"""Of the time limit, and in seconds at least, for a plan of least memory."""
FEW_COUNT = 32
"""Microbatches that plans of least memory have at most at first: what more save is little beside parameters."""
LATE_SHARE = 0.85
"""Of the time limit, after which nothing more is laid out by hand, nor solved on the best mesh."""
SOLVED = 1.005
"""How much slower than the best a plan of one stage may be, or be thought to be, for its mesh to be solved: layouts of
least work are nearly those that were priced."""
NEARLY = 1.02
"""How much slower a plan of one stage may be for others of one stage to be laid out by hand."""
FAR = 1.3
"""How much longer than a pipeline one stage may be estimated at to be solved at all."""
CHUNKED = 1.05
"""Likewise for ZeRO-3 to be planned where memory binds: what runs in chunks is in no estimate."""

Attempt = Callable[[str, Constraints, Callable[[], Draft]], float | None]
"""Plans what is called so, with such constraints: the step, or None where nothing was found."""


class OneStage(Protocol):
    """Plans without a pipeline."""

    def __call__(self, constraints: Constraints, proved: bool, again: bool = True, within_s: float = math.inf) -> Draft:
        """The best found.

        Args:
            constraints: that it meets.
            proved: whether to bound what it is found among.
            again: whether to search for fewer bytes where allocators have no room.
            within_s: seconds that it may take at most.
        """
        ...


@dataclass
class OneStagePlans:
    """Those of a joint search.

    Attributes:
        job, constraints, deadline: of the search.
        make: a plan.
        attempt: takes a plan to the search's drafts.
        drafts: of the search.
        is_tight: whether ZeRO-1 does not fit in one microbatch, where one stage has few meshes.
    """

    job: Job
    constraints: Constraints
    deadline: Deadline
    make: OneStage
    attempt: Attempt
    drafts: list[Draft]
    is_tight: bool = False
    _tried: dict[object, bool] = field(default_factory=dict)
    _has_least: bool = False

    def plan_usual(self) -> None:
        """Data parallelism at every ZeRO level: planned at once, and what else is found has to be faster. Where ZeRO-1
        does not fit in one microbatch, the others may recompute, if one stage has few meshes: there it takes a second.
        Where none fits, what is divided otherwise: experts, or matrices.
        """
        n = self.job.cluster.num_devices
        pinned = self._is_piped or self.constraints.recompute is not None
        if pinned or not meshes_free(self.constraints):
            return
        if self.job.program.batch_size % n == 0:
            self._plan_data_parallel(n)
            self._plan_nodes(n)
        self.is_tight |= not self.drafts and len(candidate_meshes(self.job, self.constraints)) <= MESHES
        self._plan_least()
        for degrees in self._divided(n) if self.is_tight and not self.drafts else ():
            late = self._is_over(LEAN_SHARE)
            if late or self._fits(partial(self.make, again=False), None, **degrees):
                break

    def _plan_nodes(self, n: int) -> None:
        """One stage on nodes and their devices, where what is known mostly waits for links: what divides nothing over
        those between nodes is then many times as fast, and others are held against it."""
        node = min(group.devices_per_node for group in self.job.cluster.groups)
        best = min(self.drafts, key=step_s, default=None)
        if best is None or best.sample.prediction is None or n == node or n % node or self._is_over(USUAL_SHARE):
            return
        if self._has_least:  # memory binds: more has to be fitted on that mesh than there is time for yet
            return
        if best.sample.prediction.exposed_comm_s > EXPOSED * best.sample.prediction.step_s:
            mesh = (n // node, node) if node > 1 else (n,)
            pins = msgspec.structs.replace(self.constraints, mesh=mesh)
            what = f"one stage on mesh {'x'.join(map(str, mesh))}"
            self.attempt(what, pins, partial(self.make, pins, False, again=False))

    def _plan_least(self) -> None:
        """Where memory binds and nothing is known, what holds least of all, in as few microbatches as fit: it is
        quickly planned, and what takes longer has to be faster, and not to be found whatever it takes."""
        if not self.is_tight or self.drafts or self._has_least:
            return
        self._has_least, degrees = True, list[list[Constraints]]()
        for pins in all_sharded(self.job, self.constraints):
            if pins.recompute != "none" or not degrees:
                degrees.append([])
            degrees[-1].append(pins)
        for most in degrees:
            few = [msgspec.structs.replace(each, microbatches=_few(each.microbatches or 1)) for each in most]
            found: list[tuple[float, Constraints]] = []
            for ways in (few, [each for each in most if each not in few]):  # of many it takes long, to save little
                found = found or [(seconds, each) for each in ways if (seconds := self._pinned(each)) is not None]
            best = min(found, key=lambda each: each[0], default=None)
            while best is not None and (count := (best[1].microbatches or 1) // 2) and not self._is_over(USUAL_SHARE):
                fewer = msgspec.structs.replace(best[1], microbatches=count)
                seconds = self._pinned(fewer)
                best = None if seconds is None or seconds >= best[0] else (seconds, fewer)
            if self.drafts or self.deadline.is_over:
                return

    def _pinned(self, pins: Constraints) -> float | None:
        """The step of a plan of which all is pinned, None where it does not fit."""
        names = ("dp", "tp", "sp", "zero", "recompute", "microbatches")
        what = " ".join(f"{name}={value}" for name in names if (value := getattr(pins, name)) not in (None, False))
        within_s = max(LEAST_SHARE * self.deadline.limit_s, LEAST_S)
        return self.attempt(what, pins, partial(self.make, pins, False, again=False, within_s=within_s))

    def _plan_data_parallel(self, n: int) -> None:
        known = len(self.drafts)

        def fits(zero: int, recompute: str | None = "none", again: bool = True) -> bool:
            late = len(self.drafts) > known and self._is_over(USUAL_SHARE)
            make = partial(self.make, again=again and not self.drafts)
            return not late and self._fits(make, recompute, dp=n, zero=zero)

        # Where something is known, so is that memory binds without what may leave devices here.
        if not known and fits(1) and self.drafts[-1].sample.num_microbatches == (self.constraints.microbatches or 1):
            fits(0)
            fits(2)
            return
        self.is_tight = len(candidate_meshes(self.job, self.constraints)) <= MESHES
        if self.is_tight and not known and fits(2, again=False):
            return  # what recomputes is fitted, which takes longer: `plan_by_hand`
        self._plan_least()
        recompute = None if self.is_tight else "none"
        if fits(3, recompute):  # which holds least
            fits(2, recompute)

    def solve(
        self,
        roomless: Sequence[Draft],
        hoped_s: Callable[[Draft], float],
        alone_s: float,
        certify: bool,
        is_bounded: bool = False,
    ) -> None:
        """Solve for the sharding of one stage with the whole step as the objective: on every mesh where they are few or
        nothing else was found, and where one stage is the best or nearly so, or was to be, allocators having room for
        it or not, on its mesh; nothing where all of it is far from a pipeline. Under tight memory tensor parallelism
        inside nodes is planned before (after it where half of the time is over), and ZeRO-3: of layouts that take as
        much work all would have to be fitted to find those that fit with least made again.

        Args:
            roomless: drafts that allocators have no room for.
            hoped_s: the step that a draft was estimated at, or came to if that is less.
            alone_s: the shortest step that one stage was estimated at, whether it was made or not.
            certify: whether to bound what is found.
            is_bounded: whether plans on meshes of one and two axes are bounded together with pipelines.
        """
        n, best_s = self.job.cluster.num_devices, min(map(step_s, self.drafts), default=math.inf)
        if math.isfinite(alone_s) and FAR * best_s < min((alone_s, *map(hoped_s, self._alone(roomless)))):
            return
        begins_late = self._is_over(LEAN_SHARE) and bool(self.drafts)
        self._plan_divided(not begins_late)
        if self._is_piped or self._has_ended:
            return
        best, meshes = min(self.drafts, key=step_s, default=None), candidate_meshes(self.job, self.constraints)
        if best is None or len(meshes) <= MESHES:
            others = any(len(mesh.shape) > 2 for mesh in meshes)
            make = partial(self.make, self.constraints, certify and (others or not is_bounded))
            self.attempt("one stage", self.constraints, make)
            self._plan_divided(begins_late)
            return
        nearest = min(self._alone(roomless), key=hoped_s, default=None)
        nearest_s = math.inf if nearest is None else hoped_s(nearest)
        binds = self._tried.get(_key("none", {"dp": n, "zero": 3})) is False
        if binds and min(nearest_s, alone_s) <= CHUNKED * best.step_s:
            self._fits(self.make, None, dp=n, zero=3)
        best_s = min(map(step_s, self.drafts))
        if nearest is None or nearest_s > SOLVED * best_s or self._is_late:
            return
        mesh, count = nearest.sample.stages[0].mesh.shape, nearest.sample.num_microbatches
        pinned = msgspec.structs.replace(self.constraints, microbatches=count)
        if meshes_free(self.constraints):
            pinned = msgspec.structs.replace(pinned, mesh=mesh)
        what = f"one stage, solved on mesh {'x'.join(map(str, mesh))}"
        self.attempt(what, pinned, partial(self.make, pinned, certify and not is_bounded))

    def _plan_divided(self, is_next: bool) -> None:
        """Under tight memory, and if it is their turn, tensor parallelism inside nodes and experts over all devices."""
        for degrees in self._divided(self.job.cluster.num_devices) if self.is_tight and is_next else ():
            if _key(None, degrees) not in self._tried and not self._has_ended:
                self._fits(self.make, None, **degrees)

    def _alone(self, roomless: Sequence[Draft]) -> list[Draft]:
        """Drafts of one stage."""
        return [draft for draft in (*self.drafts, *roomless) if len(draft.sample.stages) == 1]

    def plan_by_hand(self) -> None:
        """What people lay out by hand on few devices, where one stage is the best or nearly so and time is left: tensor
        parallelism of every width, with and without sequence parallelism, and where memory binds data parallelism, with
        and without recomputation, in as many microbatches as that takes. Of layouts that take as much work, one may
        hide more of it.
        """
        n = self.job.cluster.num_devices
        if self._is_piped or not meshes_free(self.constraints) or self.constraints.recompute is not None:
            return
        best = min(self.drafts, key=step_s, default=None)
        alone = min((draft for draft in self.drafts if len(draft.sample.stages) == 1), key=step_s, default=None)
        is_near = alone is not None and best is not None and alone.step_s <= NEARLY * best.step_s
        if not is_near or len(candidate_meshes(self.job, self.constraints)) > MESHES:
            return
        ways: list[tuple[str | None, dict[str, int]]] = []
        if self.is_tight:
            ways += [(recompute, {"dp": n, "zero": zero}) for recompute in (None, "none") for zero in (3, 2)]
        for tp in range(n, 1, -1):
            if n % tp == 0 and self.job.program.batch_size % (n // tp) == 0:
                degrees = {"tp": tp} if tp == n else {"tp": tp, "dp": n // tp}
                ways += [(None, degrees), (None, {**degrees, "sp": True})]
        for recompute, degrees in ways:
            if self._is_late:
                return
            if _key(recompute, degrees) not in self._tried:
                self._fits(partial(self.make, again=False), recompute, **degrees)

    def _divided(self, n: int) -> list[dict[str, int]]:
        """What divides parameters without gathering all of them: experts over all devices, matrices inside nodes."""
        node, found = min(group.devices_per_node for group in self.job.cluster.groups), list[dict[str, int]]()
        if self.job.program.batch_size % n == 0 and has_experts(self.job.program, n):
            found.append({"dp": n, "ep": n, "zero": 3})
        if n % node == 0:
            found.append({"tp": node} if n == node else {"tp": node, "dp": n // node})
        return found

    @cached_property
    def _is_piped(self) -> bool:
        return is_piped(self.constraints, self.job.cluster.num_devices)

    def _is_over(self, share: float) -> bool:
        return self.deadline.passed_s > share * self.deadline.limit_s

    @property
    def _is_late(self) -> bool:
        return self._is_over(LATE_SHARE)

    @property
    def _has_ended(self) -> bool:
        """Whether what takes long would end after the time, and is not all that there may be."""
        return self.deadline.is_over or (bool(self.drafts) and self._is_late)

    def _fits(self, make: OneStage, recompute: str | None, **degrees: int) -> bool:
        """Whether there is a plan of these degrees."""
        pins = msgspec.structs.replace(self.constraints, recompute=recompute, **degrees)
        what = " ".join(f"{name}={degree}" for name, degree in degrees.items())
        fits = self.attempt(what, pins, partial(make, pins, False)) is not None
        self._tried[_key(recompute, degrees)] = fits
        return fits


def _few(count: int) -> int:
    """Of a number of microbatches, the largest divisor that is planned in no time."""
    return max(each for each in range(1, min(count, FEW_COUNT) + 1) if count % each == 0)


def _key(recompute: str | None, degrees: Mapping[str, int]) -> tuple[object, ...]:
    """What is tried."""
    return recompute, *degrees.items()


def is_piped(constraints: Constraints, num_devices: int) -> bool:
    """Whether plans of one stage are none of those asked for: a pipeline is, or degrees of a part of the devices.

    Args:
        constraints: what is pinned.
        num_devices: of the cluster.
    """
    if constraints.schedule is not None or constraints.pp is not None:
        return True
    try:
        check_constraints(msgspec.structs.replace(constraints, pp=1), num_devices)
    except ConstraintError:
        return True
    return False
