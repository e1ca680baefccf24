"""What a named planner is given, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from paraplan.baselines.planners.layer_profile import GroupLinks, Profiles
from paraplan.planner.assemble import Decisions, Job
from paraplan.planner.constraints import Constraints, device_budget
from paraplan.planner.deadline import Deadline
from paraplan.planner.joint.prices.pricing_order import usual_samples

SAMPLES = (1, 2, 4, 8, 16, 32)
"""Of a microbatch on a rank, where one sample has many rows."""
FEW = 16
"""Samples of which a rank has rows enough, up to which that is so."""


@dataclass(frozen=True)
class Task:
    """A job to be planned.

    Attributes:
        job: what is planned.
        constraints: what the user pins.
        deadline: of the planner.
        progress: told what is being tried.
        said: what the planner has to say of its answers, for the plan's notes.
    """

    job: Job
    constraints: Constraints = field(default_factory=Constraints)
    deadline: Deadline = field(default_factory=lambda: Deadline(60.0))
    progress: Callable[[str], None] = lambda text: None
    said: list[str] = field(default_factory=list)

    @cached_property
    def budget(self) -> int:
        """Bytes a device may hold."""
        return device_budget(self.job.cluster, self.constraints)

    @cached_property
    def profiles(self) -> Profiles:
        """What the job's layers take."""
        job = replace(self.job, compiled=self.constraints.compiled, reduce_dtype=self.constraints.reduce_dtype)
        return Profiles(job, self.constraints, self.budget, self.deadline, self.progress)

    @cached_property
    def samples(self) -> tuple[int, ...]:
        """Of a microbatch on a rank, what is tried: of samples of few rows, in a large batch, as many times more."""
        program = self.job.program
        most = min(usual_samples(program) / FEW, program.batch_size / SAMPLES[-1])
        unit = 2 ** int(math.log2(max(most, 1.0)))
        return tuple(unit * each for each in SAMPLES)

    @cached_property
    def links(self) -> GroupLinks:
        """What messages take."""
        return GroupLinks(self.job.cluster)

    @property
    def num_devices(self) -> int:
        """Of the cluster."""
        return self.job.cluster.num_devices

    @property
    def per_node(self) -> int:
        """Devices of the smallest node."""
        return min(group.devices_per_node for group in self.job.cluster.groups)


@dataclass(frozen=True)
class Answer:
    """A planner's answer that constraints alone cannot say.

    Attributes:
        pins: degrees, microbatches, schedule and, in layers, stages.
        remade: per layer, the preset (`planner.options.values.PRESETS`) by which it recomputes.
        decisions: the shardings of one position's devices; None: those of least work under the pins.
    """

    pins: Constraints
    remade: tuple[str, ...]
    decisions: Decisions | None = None


Tries = Callable[[Task], Iterator[Constraints | Answer]]


@dataclass(frozen=True)
class NamedPlanner:
    """How a plan is chosen elsewhere.

    Attributes:
        tries: its answers, in the order in which they are tried.
        says: what it does, in one line, and what of its space is not in ours.
        fastest: of tries that are alike in `degrees`, all are planned and the fastest taken; else the first that fits.
        degrees: the first tries alike in these that fit are the answer; () for all tries.
    """

    tries: Tries
    says: str
    fastest: bool = False
    degrees: tuple[str, ...] = ()
