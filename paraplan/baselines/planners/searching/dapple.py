"""DAPPLE's planner: stages and their replication so that the latency of a synchronous pipeline is least.

With F, B of a stage or a message between two (which counts as a stage), A of its all-reduce, M microbatches and a pivot
Q, whose steady phase has fewest bubbles,

    L = sum over s <= Q of F_s + (M - 1) (F_Q + B_Q) + max over s of (A_s + B_s + ... + B_Q)            s <= Q
                                                                     (A_s - B_(Q+1) - ... - B_(s-1))    s > Q

Q begins at the last stage and moves to an earlier s where (M - 1) (F_s + B_s) is more than
(M - 1) (F_Q + B_Q) + sum over s < a < Q of (F_a + B_a). Stages are found by dynamic programming: of the first j layers
cut into s stages the beginning is kept whose latency, all others being one stage on all other devices, is least.

Here stages are replicated alike, and a stage's replicas lie next to each other (its policy "fresh first"). The smallest
microbatch is tried besides larger ones. Memory is not in its model: the first that fits is taken, with recomputation,
which L counts, or without.
Source: Fan et al. 2021, sections 4.1 and 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paraplan.baselines.planners.layer_profile import GroupLinks, LayerProfile
from paraplan.baselines.planners.searching.degrees import counts, divisors, pinned, replaced
from paraplan.baselines.planners.task import Task
from paraplan.planner.constraints import Constraints
from paraplan.planner.pipeline.cuts.stage_cuts import Bounds


class StagePhase(NamedTuple):
    """A stage or a message: its forward, backward and all-reduce."""

    forward_s: float
    backward_s: float
    reduce_s: float


def latency_s(phases: Sequence[StagePhase], microbatches: int) -> float:
    """The latency of a step, by the formula above."""
    more = microbatches - 1
    pivot, between = len(phases) - 1, 0.0
    for s in range(len(phases) - 2, -1, -1):
        at = phases[pivot]
        if more * (phases[s].forward_s + phases[s].backward_s) > more * (at.forward_s + at.backward_s) + between:
            pivot, between = s, 0.0
        else:
            between += phases[s].forward_s + phases[s].backward_s
    warm_s = sum(phase.forward_s for phase in phases[: pivot + 1])
    steady_s = more * (phases[pivot].forward_s + phases[pivot].backward_s)
    ending_s, after_s = 0.0, 0.0
    for s in range(pivot, -1, -1):
        after_s += phases[s].backward_s
        ending_s = max(ending_s, phases[s].reduce_s + after_s)
    before_s = 0.0
    for s in range(pivot + 1, len(phases)):
        ending_s = max(ending_s, phases[s].reduce_s - before_s)
        before_s += phases[s].backward_s
    return warm_s + steady_s + ending_s


@dataclass(frozen=True)
class Latencies:
    """What stages of a profile come to.

    Attributes:
        profile: of the layers on one device.
        links: what messages take.
        devices, microbatches, recompute: of the pipeline.
    """

    profile: LayerProfile
    links: GroupLinks
    devices: int
    microbatches: int
    recompute: str

    def stage(self, first: int, stop: int, replicas: int) -> StagePhase:
        """A stage of layers [first, stop).

        Args:
            first, stop: its layers.
            replicas: of it.
        """
        layers = slice(first, stop)
        again_s = sum(self.profile.again_s[self.recompute][layers])
        return StagePhase(
            sum(self.profile.forward_s[layers]),
            sum(self.profile.backward_s[layers]) + again_s,
            self.links.all_reduce_s(sum(self.profile.grad_bytes[layers]), replicas),
        )

    def message(self, stop: int, replicas: int) -> StagePhase:
        """What goes over after the layers before `stop`."""
        seconds = self.links.message_s(self.profile.output_bytes[stop - 1], replicas)
        return StagePhase(seconds, seconds, 0.0)

    def latency_s(self, bounds: Bounds, replicas: int) -> float:
        """Of stages replicated alike."""
        return latency_s(self._phases(bounds, replicas), self.microbatches)

    def _phases(self, bounds: Bounds, replicas: int) -> list[StagePhase]:
        phases: list[StagePhase] = []
        for first, stop in bounds:
            if first:
                phases.append(self.message(first, replicas))
            phases.append(self.stage(first, stop, replicas))
        return phases

    def best(self, replicas: int) -> tuple[float, Bounds] | None:
        """Latency and stages, each replicated over so many devices, by the dynamic program above."""
        stages, layers = self.devices // replicas, self.profile.num_layers
        if stages > layers:
            return None
        cuts: dict[int, tuple[int, ...]] = {0: ()}  # by how many layers are cut off, where
        known: dict[int, list[StagePhase]] = {0: []}
        for cut in range(1, stages):
            longer: dict[int, tuple[float, int, list[StagePhase]]] = {}
            others = self.devices - cut * replicas
            for begun, phases in known.items():
                for stop in range(begun + 1, layers - (stages - cut) + 1):
                    here = [*phases, self.stage(begun, stop, replicas), self.message(stop, replicas)]
                    last = self.stage(stop, layers, others)
                    seconds = latency_s([*here, last], self.microbatches)
                    if stop not in longer or seconds < longer[stop][0]:
                        longer[stop] = seconds, begun, here
            cuts = {stop: (*cuts[begun], stop) for stop, (_, begun, _) in longer.items()}
            known = {stop: phases for stop, (_, _, phases) in longer.items()}
        found = []
        for begun, ends in cuts.items():
            bounds = tuple(zip((0, *ends), (*ends, layers), strict=True))
            found.append((latency_s([*known[begun], self.stage(begun, layers, replicas)], self.microbatches), bounds))
        return min(found, default=None)


def dapple(task: Task) -> Iterator[Constraints]:
    """The least latency first, with recomputation or without."""
    found = []
    for replicas in divisors(task.num_devices):
        for samples, count in counts(task, replicas):
            profile = task.profiles.of(1, samples)
            for recompute in () if profile is None else ("none", "full"):
                assert profile is not None
                latencies = Latencies(profile, task.links, task.num_devices, count, recompute)
                best = latencies.best(replicas)
                if best is not None:
                    found.append((best[0], replicas, count, best[1], recompute))
    for _, replicas, count, bounds, recompute in sorted(found):
        pins = replaced(pinned(task, len(bounds), replicas, 1, count), recompute=recompute)
        yield replaced(pins, stages=task.profiles.in_segments(bounds) if len(bounds) > 1 else None)
