"""What a sharding takes and keeps at least on one position's devices: the relaxations behind a space's bound.

Of one mesh and number of microbatches (`RelaxedPosition`) the network of sharding, with what is waited for (`exposed`),
is relaxed as in `step_bound`: for weights of its streams with sum 1 and a price on bytes kept,

    what a rank does and waits for, or its links  +  price . bytes kept  >=  q(price)

for every sharding. Of activations (`Activations`) the least is taken apart from the sharding, each op as quick and each
value as small as any option makes it: for a price per byte, the least of seconds made again and bytes saved is a vertex
of a kind's hull (`kind_options`). Both lie below any plan, so their sum does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from paraplan.ir.model.graph import Phase
from paraplan.ir.model.program import master_dtype, trained_params
from paraplan.ir.model.tensor import TensorSpec
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.recompute.kind_options import MOST_OPTIONS, RematOption, kind_options
from paraplan.planner.recompute.presets import preset_fates
from paraplan.planner.recompute.split_backward import handed_on
from paraplan.planner.sharding.formulate import Formulation, formulate, kept_row
from paraplan.planner.sharding.network.cost_network import Floats, Network
from paraplan.planner.sharding.network.lagrangian import Point
from paraplan.planner.sharding.network.message_passing import MessagePassing
from paraplan.planner.sharding.param_memory import param_held
from paraplan.planner.sharding.proof.exposed import INSIDE, proof_network
from paraplan.planner.sharding.proof.step_bound import best_point
from paraplan.planner.sharding.space import Space

GRID = 2**0.5
"""Of prices per byte, one to the next."""
WAITED = "waited for"
"""The stream of what a rank computes and waits for."""
LEAST_WEIGHT = 1e-4
"""What a stream weighs where weights start, at least."""
WORTH = 0.003
"""Of what is proved, how much more has to be possible for another price to be tried."""


@dataclass(frozen=True)
class Kept:
    """What every sharding takes at a price on what it keeps.

    Attributes:
        price: seconds per byte.
        least_s: of a step's seconds, weighed over streams, and the price of what is kept, together at least.
        computed: the weight of what a rank computes in it.
        kept_bytes: of the sharding found there.
    """

    price: float
    least_s: float
    computed: float
    kept_bytes: float


class RelaxedPosition:
    """The relaxations of one mesh and number of microbatches.

    Args:
        job: on one position's devices.
        space: of its shardings.
        constraints: what is pinned there.
        count: microbatches.
        each_s: seconds for one relaxation.
        known: per stream, and of what is waited for, weights at which another position's relaxation was best, where
            those of this one start; changed to this one's.
    """

    def __init__(
        self,
        job: Job,
        space: Space,
        constraints: Constraints,
        count: int,
        each_s: float,
        known: dict[str, float] | None = None,
    ) -> None:
        self.job, self.space, self.constraints, self.count, self.each_s = job, space, constraints, count, each_s
        self._known = {} if known is None else known
        self._problem: Formulation = formulate(space)
        self._whole = proof_network(job, space, self._problem, constraints)
        self._kept: dict[tuple[float, bool], Kept] = {}
        self._messages: MessagePassing | None = None

    @cached_property
    def computed_s(self) -> tuple[tuple[float, ...], ...]:
        """See `segments_s`."""
        return segments_s(self.job, self.space, self.count)

    @cached_property
    def waited_s(self) -> tuple[float, tuple[float, ...], float]:
        """What a microbatch takes of what is done in each: in all segments together, waits included; of every one as it
        computes; both under the same weights, of which what is computed has the last."""
        network = _of_microbatches(self.job, self.space, self._problem, self._whole)
        point = self._best(network)
        least = tuple(f + b for f, b in zip(*self.computed_s[:2], strict=True))
        if point is None:
            return sum(least), least, 1.0
        busy = float(point.weights[0] + point.weights[len(self.space.prices.streams) :].sum())
        found = tuple(busy * (1 - INSIDE) * each for each in least)
        return max(point.bound / self.count, sum(found)), found, float(point.weights[0])

    def kept(self, price: float, have_grads: bool = True) -> Kept | None:
        """A whole step's at a price on what is kept; None where nothing was proved.

        Args:
            price: seconds per byte.
            have_grads: whether gradients that add up are kept too.
        """
        key = price, have_grads or price == 0
        if key not in self._kept:
            held = self._held if have_grads else self._held_before
            priced = _with_price(self._whole, held, price)
            point = self._best(priced)
            if point is None:
                return None
            kept_bytes = float(sum(amounts[point.choices[at]] for at, amounts in held.items()))
            self._kept[key] = Kept(price, point.bound, float(point.weights[0]), kept_bytes)
        return self._kept[key]

    def _best(self, network: Network) -> Point | None:
        """Where a network's bound is best; what a rank does and waits for nearly alone is where weights start first."""
        names = [*self.space.prices.streams, WAITED][: network.num_streams]
        if self._known.keys() >= set(names):
            weights = np.array([self._known[name] for name in names]) + LEAST_WEIGHT
        else:
            weights = np.full(len(names), 0.1 / len(names))
            weights[-1] += 0.9
        point = best_point(network, weights / weights.sum(), np.zeros(0), self.each_s, self._messages)
        if point is not None:
            self._messages = point.messages
            self._known.update(zip(names, point.weights.tolist(), strict=True))
        return point

    @cached_property
    def _held(self) -> dict[int, Floats]:
        """Per variable, [option] bytes kept once gradients are there."""
        return kept_row(self.space, 0.0).held

    @cached_property
    def _held_before(self) -> dict[int, Floats]:
        """Per variable, [option] bytes kept before any gradient is: as with one microbatch, whose do not add up."""
        held, prices = dict(self._held), self.space.prices
        for (number, _, cls), options in zip(self.space.grads, self.space.param_options, strict=True):
            kept = [param_held(self.job, prices, cls, option, 1).loss for option in options]
            held[number] = np.minimum(held[number], np.array(kept, float))
        return held

    @cached_property
    def recomputing(self) -> tuple[tuple[RematOption, ...], ...]:
        """Per kind, the hull of what an instance may save and make again of a microbatch, with every op and value as
        small as can be; nothing of the kind that makes the loss, whose backward may run at once, nor of those that run
        once on the whole batch, nor of one whose hull was cut short, below which there may be more."""
        program, recompute = self.job.program, self.constraints.recompute
        once = {program.segments[-1].kind, *(segment.kind for segment in program.segments[self.space.micro.tail :])}
        pinned = None if recompute in (None, "none") else preset_fates(program, str(recompute))
        found: list[tuple[RematOption, ...]] = []
        for index, kind in enumerate(program.kinds):
            if index in once:
                found.append(())
                continue
            instances = sum(segment.kind == index for segment in program.segments) * self.count
            seconds = [_least_s(self.space, index, at) / instances for at in range(len(kind.graph.ops))]
            fates = None if pinned is None else pinned[index]
            hull = kind_options(kind, seconds, self._least_bytes(index), fates)
            found.append(hull if len(hull) < MOST_OPTIONS else ())
        return tuple(found)

    def _least_bytes(self, index: int) -> dict[str, int]:
        """Of every value of a kind's forward, in the least of the layouts it is made or read in."""
        kind, nbytes = self.job.program.kinds[index], self.space.prices.nbytes
        found: dict[str, int] = {}
        for at, op in enumerate(kind.graph.ops):
            for out in op.outs if op.phase is Phase.FORWARD else ():
                if out is not None:
                    made = set(self.space.made[index, out].layouts)
                    found[out] = min(nbytes(kind.graph.values[out], layout) for layout in made)
            for name, read in zip(op.tensors, self.space.lies[index, at], strict=True):
                if name in found:
                    spec = kind.graph.values[name]
                    found[name] = min(found[name], *(nbytes(spec, layout) for layout in set(read)))
        return found


def segments_s(job: Job, space: Space, count: int, most_s: float = math.inf) -> tuple[tuple[float, ...], ...]:
    """Per segment, what a microbatch computes at least: forward, backward, and of both what the gradient that is handed
    on depends on.

    Args:
        job: what is planned.
        space: options of one position, with prices.
        count: microbatches.
        most_s: what an op, or a loop's first launch, counts at most.
    """
    kinds = [segment.kind for segment in job.program.segments]
    found: dict[tuple[int, int], float] = {}
    for index, kind in enumerate(job.program.kinds):
        handed = handed_on(kind)
        for at, op in enumerate(kind.graph.ops):
            most = most_s + space.prices.costs.loop_s(op.target, op.args)
            least_s = min(_least_s(space, index, at) / (kinds.count(index) * count), most)
            is_forward = op.phase is Phase.FORWARD
            for column in (0 if is_forward else 1, *((2,) if is_forward or at in handed else ())):
                found[index, column] = found.get((index, column), 0.0) + least_s
    return tuple(tuple(found.get((kind, column), 0.0) for kind in kinds) for column in range(3))


def _least_s(space: Space, kind: int, at: int) -> float:
    """What an op of a kind computes at least in a step, in all instances."""
    return min(price[0] for price in space.deciders[space.op_decider[kind, at]].prices)


def updated_s(job: Job, space: Space) -> float:
    """What the update of all trained parameters computes at least, on one device.

    Args:
        job: what is planned.
        space: whose prices say so.
    """
    program, found = job.program, 0.0
    for name in trained_params(program):
        spec = program.params[name].spec
        master = TensorSpec(master_dtype(program.precision, spec.dtype), spec.shape)
        found += space.prices.updated(master.nbytes, job.optimizer.state_slots)[0]
    return found


def kept_bytes(job: Job, accumulates: bool) -> float:
    """What all ranks together keep of parameters, states and, where microbatches add up, gradients at least."""
    program, found = job.program, 0
    trained = set(trained_params(program))
    for name, param in program.params.items():
        spec = param.spec
        found += spec.nbytes
        if name in trained:
            master = TensorSpec(master_dtype(program.precision, spec.dtype), spec.shape)
            slots = job.optimizer.state_slots + (master.dtype != spec.dtype) + accumulates
            found += slots * master.nbytes
    return float(found)


def fits_nowhere(job: Job, constraints: Constraints, budget: int) -> bool:
    """Whether parameters and states alone, wherever ranks keep them, are more than all devices may hold.

    Args:
        job: what is planned.
        constraints: where states may be.
        budget: bytes a device may hold.
    """
    return not constraints.state_tiers and kept_bytes(job, False) > budget * job.cluster.num_devices


class Activations:
    """What a step recomputes, and what waits for its backward, of all segments.

    Args:
        position: on whose devices.
        counts: per kind, in how many microbatches its instances wait, in all.
        microbatches: of a step.
        share: of an option's bytes and seconds, what a rank has.
    """

    def __init__(
        self, position: RelaxedPosition, counts: Sequence[float], microbatches: int, share: float = 1.0
    ) -> None:
        kinds = [segment.kind for segment in position.job.program.segments]
        self._each = [
            (share * count, share * microbatches * kinds.count(kind), position.recomputing[kind])
            for kind, count in enumerate(counts)
            if count and position.recomputing[kind]
        ]

    def least(self, computed: float, price: float) -> tuple[float, float]:
        """The least of seconds made again and the price of what waits: (both together, bytes that wait).

        Args:
            computed: what a second computed counts.
            price: seconds per byte.
        """
        least_s = waiting_bytes = 0.0
        for count, again, hull in self._each:
            each = ((computed * again * o.extra_s + price * count * o.saved_bytes, count * o.saved_bytes) for o in hull)
            best_s, held = min(each)
            least_s, waiting_bytes = least_s + best_s, waiting_bytes + held
        return least_s, waiting_bytes

    def price_of(self, computed: float, room: float) -> float:
        """The least price at which no more waits than there is room for; the highest that changes anything where none
        will do."""
        prices = {0.0}
        for count, again, hull in self._each:
            for more, less in itertools.pairwise(hull):
                if more.saved_bytes > less.saved_bytes:
                    dearer_s = computed * again * (less.extra_s - more.extra_s)
                    prices.add(dearer_s / (count * (more.saved_bytes - less.saved_bytes)) * (1 + 1e-9))
        turns = sorted(prices)
        return next((price for price in turns if self.least(computed, price)[1] <= room), turns[-1])


@dataclass(frozen=True)
class Tangent:
    """What is proved at a price per byte, a concave function of it, and how fast that grows there at most.

    Attributes:
        price: seconds per byte.
        value_s: proved of a step, summed over positions.
        over: bytes by which what is held there exceeds what may be.
    """

    price: float
    value_s: float
    over: float


def next_price(tangents: Sequence[Tangent], usual: float) -> float | None:
    """Where to look for more than was proved: between the best price at which too much is held and the best at which
    there is room, where their tangents meet, or beyond; on a grid, so that combinations look at the same prices.

    Args:
        tangents: what is known, with one at 0.
        usual: a price to begin with.
    Returns:
        None where nothing more is to be expected.
    """
    below = max((each for each in tangents if each.over > 0), key=lambda each: each.price, default=None)
    above = min((each for each in tangents if each.over <= 0), key=lambda each: each.price, default=None)
    if below is None:
        return None
    if above is None:
        found = max(usual, GRID * below.price) or None
    else:
        gap = below.value_s - below.over * below.price - (above.value_s - above.over * above.price)
        found = gap / (above.over - below.over)
        best_s = max(each.value_s for each in tangents)
        if below.value_s + below.over * (found - below.price) <= (1 + WORTH) * best_s:
            return None
    if found is None:
        return None
    found = GRID ** round(math.log(found, GRID))
    return None if any(math.isclose(found, each.price) for each in tangents) else found


def _with_price(network: Network, held: dict[int, Floats], price: float) -> Network:
    """The network with a price on what is held in every stream, which any weights with sum 1 make one price."""
    prices = list(network.prices)
    for variable, amounts in held.items():
        prices[variable] = prices[variable] + price * amounts[:, None]
    return Network(tuple(prices), network.factors)


def _of_microbatches(job: Job, space: Space, problem: Formulation, network: Network) -> Network:
    """The network of what every microbatch does, whenever gradients are reduced and parameters gathered."""
    params = set(space.param_decider)
    prices = tuple(np.zeros_like(each) if number in params else each for number, each in enumerate(network.prices))
    factors = list(network.factors)
    for transfer, number in zip(space.transfers, problem.factors, strict=True):
        kind = job.program.kinds[transfer.kind]
        if transfer.name in kind.param_grads or transfer.name in kind.params:
            factors[number] = replace(factors[number], prices=_free(factors[number].prices))
    return Network(prices, tuple(factors))


def _free(prices: Floats) -> Floats:
    """Nothing where it is possible."""
    return np.where(np.isfinite(prices), 0.0, np.inf)
