"""Shardings of one mesh that trade work for memory kept: the lower hull, by prices on bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.process.memo import SESSION, Lately, Same
from paraplan.planner.assemble import Decisions, Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import SolveLimits
from paraplan.planner.pipeline.prices.stage_prices import Sharding, StagePrices
from paraplan.planner.sharding.formulate import formulate, kept_row, tier_rows, with_rows
from paraplan.planner.sharding.network.cost_network import Network, Row
from paraplan.planner.sharding.network.optimise import optimise
from paraplan.planner.sharding.solve import decisions_of, failure_of, problem_of

LESS, AS_QUICK = 0.03, 0.002
"""Of what a sharding keeps, by how much the next has to keep less: of those nearly alike the leaner is taken if it does
no more work than by the second, else the quicker. What little it keeps less may all be in one segment, the head or an
embedding, whose position is then the one that is short of memory."""

LEAST_S, NEAR_LEAST = 5.0, 1e-2
"""Seconds for the least work, and how near it is enough."""


def front(
    job: Job,
    mesh: Mesh,
    num_microbatches: int,
    constraints: Constraints,
    limits: SolveLimits,
    shares: Sequence[float],
    flying: float = 0.0,
    is_wide: bool = False,
) -> Iterator[Decisions]:
    """Shardings of a mesh that trade work for what parameters, gradients, states and activations keep, least work
    first.

    Each is of least work and price of what it keeps together, so it lies on the lower hull of (bytes kept, work): no
    sharding keeps less at less work. One space is built for all.

    Args:
        job, mesh, num_microbatches, constraints, limits: as for `solve_mesh`.
        shares: prices, each such that keeping as much as the sharding of least work costs this share of its work.
        flying: microbatches of the whole model whose activations are kept beside parameters.
        is_wide: whether all that carries samples is to be divided along the first axis: what a sample takes is then the
            same however wide that is.
    Raises:
        InfeasibleError: proved: the constraints leave no sharding.
        SolverLimitError: the time limit passed first.
    """
    space = problem_of(job, mesh, num_microbatches, constraints, is_wide)
    network = with_rows(formulate(space).network, tier_rows(space))
    held = kept_row(space, flying)
    whole, least, warm, waiting = 0.0, math.inf, None, list[tuple[float, Decisions]]()
    for share in (0.0, *shares):
        priced = with_price(network, held, share * whole)
        found = optimise(priced, limits.time_s, limits.relative_gap, limits.backend, warm=warm)
        warm = found.messages
        if found.choices is None:
            raise failure_of(job, space, found, limits, proved=True)
        kept = float(sum(amounts[found.choices[variable]] for variable, amounts in held.held.items()))
        if math.isinf(least):
            whole = float(network.work(found.choices).sum()) / max(kept, 1.0)
        work = float(network.work(found.choices).sum())
        is_less = kept < (1 - LESS) * least
        if not is_less and not (kept < least and waiting and work <= (1 + AS_QUICK) * waiting[0][0]):
            continue
        if is_less:
            yield from (decisions for _, decisions in waiting)
        chosen = found.choices[: len(space.deciders)]
        decisions = decisions_of(job, space, mesh, num_microbatches, chosen, bool(constraints.params))
        least, waiting = kept, [(work, decisions)]
    yield from (decisions for _, decisions in waiting)


def least_work_s(part: Job, mesh: Mesh, num_microbatches: int, inner: Constraints, is_wide: bool) -> float:
    """What a sharding works for at least, on all streams together; infinite where there is none.

    Args:
        part, mesh, num_microbatches, inner, is_wide: as of `priced_front`.
    """
    network = formulate(problem_of(part, mesh, num_microbatches, inner, is_wide)).network
    return optimise(network, LEAST_S, NEAR_LEAST).objective


def with_price(network: Network, held: Row, per_byte: float) -> Network:
    """The network whose first stream has a price on what is held as well.

    Args:
        network: whose first stream is priced.
        held: bytes by variable and choice.
        per_byte: seconds.
    """
    prices = list(network.prices)
    for variable, amounts in held.held.items():
        prices[variable] = prices[variable].copy()
        prices[variable][:, 0] += per_byte * amounts
    return Network(tuple(prices), network.factors, network.rows)


@dataclass
class _PricedFront:
    """Shardings of a position's devices as far as they were priced, least work first; whether those are all."""

    prices: list[StagePrices] = field(default_factory=list)
    is_whole: bool = False

    def each(self, part: Job, make: Callable[[], Iterator[Decisions]]) -> Iterator[StagePrices]:
        """One after another; those not known yet are priced when they are asked for."""
        yield from tuple(self.prices)
        if not self.is_whole:
            for decisions in itertools.islice(make(), len(self.prices), None):
                self.prices.append(Sharding(part, decisions).prices)
                yield self.prices[-1]
            self.is_whole = True


_FRONTS: Lately[_PricedFront] = SESSION.lately("pricing.fronts", 64)


def _front_key(part: Job, inner: Constraints, mesh: Mesh, microbatches: int, flying: int, is_wide: bool) -> Hashable:
    """What a front hangs on: devices and links, not what their cluster is called."""
    devices = part.cluster.groups, part.cluster.between_nodes
    settings = part.optimizer, part.compiled, part.reduce_dtype, part.sum_products
    data = msgspec.json.encode((devices, settings, inner, mesh, microbatches, flying, is_wide))
    return Same(part.program), Same(part.profile), data


def is_priced(part: Job, inner: Constraints, mesh: Mesh, microbatches: int, flying: int, is_wide: bool) -> bool:
    """Whether another search has begun to price this front in this process.

    Args:
        part, inner, mesh, microbatches, flying, is_wide: as of `priced_front`.
    """
    return _front_key(part, inner, mesh, microbatches, flying, is_wide) in _FRONTS


def priced_front(
    part: Job,
    inner: Constraints,
    mesh: Mesh,
    microbatches: int,
    limits: SolveLimits,
    shares: Sequence[float],
    flying: int,
    is_wide: bool,
) -> Iterator[StagePrices]:
    """The front of shardings, priced: once for all searches that ask for the same on equal devices.

    Args:
        part: the job on a position's devices.
        inner: what is pinned there.
        mesh, microbatches, limits, shares, flying, is_wide: as of `front`.
    """
    known = _FRONTS.get(_front_key(part, inner, mesh, microbatches, flying, is_wide), _PricedFront)
    return known.each(part, lambda: front(part, mesh, microbatches, inner, limits, shares, flying, is_wide))
