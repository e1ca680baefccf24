"""A lower bound on the step of every combination of a space: what its certificate says.

Of a combination of pp positions and m microbatches, let a(x) be what a rank computes and waits for in one microbatch of
the whole model under sharding x (`exposed`), and l(x) what its links are busy for. Positions share the work out, and
position p idles while a first microbatch's forward comes to its lowest stage and a last one's backward goes on from it:

    pp . step >= sum over p of (m . a_p(x) + idle_p)   and   pp . step >= m . l(x)

for any cut into stages and any order of a schedule. Before position p lie the stages of lower positions, of a segment
each at least, whose backward counts where a schedule does not split it. Where a position has one stage and backwards
are whole, m . a_p + (a_0 + ... + a_(p-1)) <= step for every p, hence

    step >= a(x) / (1 - (1 - 1/m)^pp)

which no cut beats. Both are minimised over shardings by the relaxation of `step_bound`, under a row: what positions
keep of parameters, gradients and states fits on them together. Work of a microbatch is priced at the most samples that
any combination gives it. Kinds of stages are bounded in the order of what is known of them, the lowest first, until the
lowest needs no more or time is up; whatever the time, the least of them is a bound.

What a step does once (updates, reductions of what was accumulated, gathers ahead) counts beside a(x) in the first form.
Left out, so that the bound holds whatever is done: reductions of gradients in every microbatch, messages between
positions, activations. Assumed: an op takes no less time in total when its samples or its work are divided up further;
the scope says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from paraplan.ir.errors import ConstraintError, NoPlanError
from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.model.graph import Phase
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.joint.combinations import Combination
from paraplan.planner.pipeline.first_devices import first_devices
from paraplan.planner.pipeline.meshes import candidate_meshes
from paraplan.planner.schedules.named import NAMED
from paraplan.planner.sharding.formulate import formulate, memory_rows, with_rows
from paraplan.planner.sharding.network.cost_network import Network
from paraplan.planner.sharding.proof.exposed import proof_network
from paraplan.planner.sharding.proof.step_bound import best_point
from paraplan.planner.sharding.solve import problem_of
from paraplan.planner.sharding.space import Space
from paraplan.rules.time_axis import program_micro

NEAR = 0.03
"""Of a step, how near the bound is near enough."""
EACH_S = 3.0
"""Seconds for one relaxation."""

Position = Callable[[Combination], tuple[Job, Constraints, Mesh]]


@dataclass
class Way:
    """Combinations whose positions are sharded alike: of the same inner axes.

    Attributes:
        listed: the combinations.
        samples: of each, those of a microbatch on a rank of the batch.
        relaxed: what its relaxation says, without memory; None where it has not been solved.
        within: per positions, likewise with what they may keep.
    """

    listed: list[Combination] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    relaxed: Relaxed | None = None
    within: dict[int, Relaxed] = field(default_factory=dict)


@dataclass(frozen=True)
class Relaxed:
    """A relaxation of a whole step's work on one position.

    Attributes:
        positions: among which the work is shared out.
        busy, links: the weights of what a rank does, and of its links; their sum is 1.
        least_s: no sharding comes to less under these weights.
        forward_s, backward_s: per segment, of a sample's microbatch, at least.
    """

    positions: int
    busy: float
    links: float
    least_s: float
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]

    def step_s(self, fill: float) -> float:
        """The bound where what a rank does is so many times longer in a step than it is busy."""
        return self.least_s / (self.busy / fill + self.links) / self.positions


class SpaceBound:
    """Bounds a space of combinations.

    Args:
        job, constraints: what is planned, and what is pinned.
        budget: bytes a device may hold.
        position: of a combination: the job on a position's devices, what is pinned there, and the mesh.
        way: of a combination, what those alike have in common, and the samples of its microbatches.
    """

    def __init__(
        self,
        job: Job,
        constraints: Constraints,
        budget: int,
        position: Position,
        way: Callable[[Combination], tuple[object, float]],
    ) -> None:
        self.job, self.constraints, self.budget, self.position, self.way = job, constraints, budget, position, way

    def bound_s(self, listed: Sequence[Combination], best_s: float, stop: float) -> float:
        """No combination has a shorter step.

        Args:
            listed: the space.
            best_s: the shortest step known.
            stop: `time.perf_counter()` at which to come back with what there is.
        Returns:
            Seconds; 0.0 where nothing was proved.
        """
        if program_micro(self.job.program, max(each.microbatches for each in listed)).has_tail:
            return 0.0  # what runs once on the whole batch has no part in a microbatch
        ways: dict[object, Way] = {}
        for combination in listed:
            key, samples = self.way(combination)
            ways.setdefault(key, Way()).listed.append(combination)
            ways[key].samples.append(samples)
        undivided = self._undivided(max(max(way.samples) for way in ways.values()))
        while True:
            least_s, way, pp = min(
                (
                    (self._least_s(way, pp, undivided), way, pp)
                    for way in ways.values()
                    for pp in {each.pp for each in way.listed}
                ),
                key=lambda each: each[0],
            )
            if least_s >= (1 - NEAR) * best_s or pp in way.within or time.perf_counter() > stop:
                return least_s
            if way.relaxed is None:
                way.relaxed = self._relaxed(way, None, undivided)
            else:
                way.within[pp] = self._relaxed(way, pp, undivided)

    def _least_s(self, way: Way, pp: int, undivided: Relaxed) -> float:
        """What is known of the combinations of a way on so many positions."""
        filled = way.relaxed or undivided
        known = way.within.get(pp, filled)
        return min(
            self._combination_s(combination, samples, known, filled)
            for combination, samples in zip(way.listed, way.samples, strict=True)
            if combination.pp == pp
        )

    def _combination_s(self, combination: Combination, samples: float, known: Relaxed, filled: Relaxed) -> float:
        """The bound of a combination: by idle positions, and by what fills them, in which nothing counts that is done
        once."""
        pp, m, named = combination.pp, combination.microbatches, NAMED[combination.schedule]
        splits, replicas = named.splits, named.num_replicas
        lowest = [min(p, pp - 1 - p) if replicas > 1 else p for p in range(pp)]
        whole = known.forward_s if splits else [f + b for f, b in zip(known.forward_s, known.backward_s, strict=True)]
        idle_s = sum(sum(whole[:stage]) for stage in lowest) * samples / pp
        found = known.step_s(1.0) + idle_s
        if combination.each == 1 and replicas == 1 and not splits:
            found = max(found, filled.step_s(pp / m / (1 - (1 - 1 / m) ** pp)))
        return found

    def _undivided(self, samples: float) -> Relaxed:
        """What the whole batch takes on one device, shared out over all: no division of ops makes it less."""
        job, n = self.job, self.job.cluster.num_devices
        count = max(round(job.program.batch_size / max(samples, 1)), 1)
        part = replace(job, cluster=first_devices(job.cluster, n))
        free = Constraints(microbatches=count, pp=1)
        space = problem_of(part, candidate_meshes(part, free)[0], count, free)
        forward_s, backward_s = _segments_s(part, space, job.program.batch_size / count, count)
        least_s = sum(f + b for f, b in zip(forward_s, backward_s, strict=True)) * job.program.batch_size
        n_s = [tuple(s / n for s in each) for each in (forward_s, backward_s)]
        return Relaxed(n, 1.0, 0.0, least_s, *n_s)

    def _relaxed(self, way: Way, pp: int | None, undivided: Relaxed) -> Relaxed:
        """The relaxation of a way, of what every microbatch does; with so many positions, of a whole step within what
        they may keep."""
        among = [
            (samples, combination.pp, -combination.microbatches, -number)
            for number, (combination, samples) in enumerate(zip(way.listed, way.samples, strict=True))
            if pp in (None, combination.pp)
        ]
        samples, *_, number = max(among)
        combination = way.listed[-number]
        try:
            part, inner, mesh = self.position(combination)
            space = problem_of(part, mesh, combination.microbatches, inner)
        except (ConstraintError, NoPlanError):
            return way.relaxed or undivided
        network = _network(part, space, inner, whole_step=pp is not None)
        if pp is not None:
            network = with_rows(network, memory_rows(space, float(self.budget * pp), activations=False)[:1])
        weights = np.full(network.num_streams, 0.1 / network.num_streams)
        weights[-1] += 0.9
        point = best_point(network, weights, np.zeros(len(network.rows)), EACH_S)
        if point is None:
            return way.relaxed or undivided
        busy = float(point.weights[0] + point.weights[len(space.prices.streams) :].sum())
        forward_s, backward_s = _segments_s(part, space, samples, combination.microbatches)
        return Relaxed(combination.pp, busy, 1.0 - busy, max(point.bound, 0.0), forward_s, backward_s)


def _network(job: Job, space: Space, constraints: Constraints, whole_step: bool) -> Network:
    """The network of what every microbatch does, whenever gradients are reduced; of a `whole_step` with what is done
    for parameters."""
    problem = formulate(space)
    network = proof_network(job, space, problem, constraints)
    params = set() if whole_step else set(space.param_decider)
    prices = tuple(np.zeros_like(each) if number in params else each for number, each in enumerate(network.prices))
    factors = list(network.factors)
    for transfer, number in zip(space.transfers, problem.factors, strict=True):
        kind = job.program.kinds[transfer.kind]
        if transfer.name in kind.param_grads or (not whole_step and transfer.name in kind.params):
            factors[number] = replace(
                factors[number], prices=np.where(np.isfinite(factors[number].prices), 0.0, np.inf)
            )
    return Network(prices, tuple(factors), network.rows)


def _segments_s(job: Job, space: Space, samples: float, count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Per segment, what its forward and backward compute at least, per sample of a microbatch."""
    kinds = [segment.kind for segment in job.program.segments]
    found: dict[tuple[int, Phase], float] = {}
    for (kind, at), decider in space.op_decider.items():
        phase = job.program.kinds[kind].graph.ops[at].phase
        least_s = min(price[0] for price in space.deciders[decider].prices)
        found[kind, phase] = found.get((kind, phase), 0.0) + least_s / (kinds.count(kind) * count * samples)
    forward_s, backward_s = (
        tuple(found.get((kind, phase), 0.0) for kind in kinds) for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    return forward_s, backward_s
