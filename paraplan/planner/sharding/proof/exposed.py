"""Collectives beside which nothing is computed: what a rank computes and waits for at least.

A rank computes one thing at a time, in captured order, and waits for a moved value before the first op that reads it.
Let a window be an op that makes a value, or the begin of a segment that is handed one, and the first op of the same
segment and phase that reads it, or their end where it is handed on. Of windows no two of which overlap,

    busy >= compute outside of windows + sum over windows of every link's time for the value moved in it

for a value's collectives are issued after the window's begin, one hop after another, and waited for by its end; what
they take of the compute stream meanwhile (`Moves.least_waited`) is in the first sum and not counted again. The
right side is a sum over choices, hence a stream of the network like any other (`serial`), appended to those of the
prices. Windows taken: those inside of which next to nothing is computed, of the largest values first. Not among them
are values that share collectives with others (parameters, their gradients) and what was saved by a forward. Where a
product goes in pieces beside its collectives, the first or the last of these is waited for all the same: with n pieces
allowed, an n-th of what links take counts.

Source of the argument: a step is no shorter than any path through what depends on each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from paraplan.ir.model.graph import Phase
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.sharding.formulate import Formulation
from paraplan.planner.sharding.network.cost_network import Factor, Floats, Ints, Network
from paraplan.planner.sharding.space import Space, WantedValue

INSIDE = 0.02
"""Of a kind's computation, what may be computed inside a window: it is left out of the sum."""


@dataclass(frozen=True)
class Window:
    """Where a value is waited for.

    Attributes:
        transfer: the value's, by number; -1 where nothing reads it in its segment.
        reader: decider of the first that reads it.
        inside: deciders of the ops between.
        reduces: decider of the op that makes it, where all that it moves are reductions of this value; -1 elsewhere.
    """

    transfer: int
    reader: int
    inside: tuple[int, ...]
    reduces: int = -1


@dataclass(frozen=True)
class _Ends:
    """A window: the position of the op that makes a value, or before the phase's first, that of its first reader, or
    after the phase's last, and the reader's decider (-1: none)."""

    kind: int
    phase: Phase
    name: str
    first: int
    stop: int
    reader: int

    @property
    def gaps(self) -> frozenset[tuple[int, Phase, int]]:
        """Between one op of the phase and the next."""
        return frozenset((self.kind, self.phase, gap) for gap in range(self.first, self.stop))


def windows(job: Job, space: Space) -> list[Window]:
    """Windows of a space; those of one kind and phase overlap only where they are of one value, which instances of the
    kind are handed from several places."""
    place = {decider: key for key, decider in space.op_decider.items()}
    least = [float(np.min(np.array(decider.prices)[:, 0])) for decider in space.deciders]
    whole = [
        sum(least[space.op_decider[kind, at]] for at, _ in enumerate(each.graph.ops))
        for kind, each in enumerate(job.program.kinds)
    ]
    every = [(ends, number) for number, each in enumerate(space.transfers) if (ends := _ends(job, space, each, place))]
    every += [(ends, -1) for ends in _handed_on(job)]
    found: list[Window] = []
    taken: dict[tuple[int, Phase, int], _Ends] = {}
    for ends, number in sorted(
        every, key=lambda each: -job.program.kinds[each[0].kind].graph.values[each[0].name].nbytes
    ):
        if any(taken.get(gap, ends) != ends for gap in ends.gaps):
            continue
        inside = tuple(space.op_decider[ends.kind, at] for at in range(ends.first + 1, ends.stop))
        if sum(least[decider] for decider in inside) <= INSIDE * whole[ends.kind]:
            taken |= dict.fromkeys(ends.gaps, ends)
            found.append(Window(number, ends.reader, inside, _reduces(job, space, ends)))
    return found


def _handed_on(job: Job) -> Iterator[_Ends]:
    """Of values that a segment's forward hands on and does not read."""
    for index, kind in enumerate(job.program.kinds):
        ops = [(at, op) for at, op in enumerate(kind.graph.ops) if op.phase is Phase.FORWARD]
        read = {name for _, op in ops for name in op.tensors}
        for at, op in ops:
            for name in op.outs:
                if name is not None and name in kind.outputs and name not in read:
                    yield _Ends(index, Phase.FORWARD, name, at, ops[-1][0] + 1, -1)


def _ends(job: Job, space: Space, transfer: WantedValue, place: dict[int, tuple[int, int]]) -> _Ends | None:
    """Of the window of a value; None where it has none in one kind and phase."""
    if transfer.bundled or transfer.lean or transfer.wire:
        return None
    kind, source = job.program.kinds[transfer.kind], transfer.source.decider
    at = [position for position, op in enumerate(kind.graph.ops) if op.phase is transfer.phase]
    readers = {
        place[end.decider][1]: end.decider
        for end in transfer.readers
        if place.get(end.decider, (-1,))[0] == transfer.kind and place[end.decider][1] in at
    }
    handed_on = next((end.decider for end in transfer.readers if end.decider in space.grad_decider), None)
    if not readers and handed_on is not None and at:
        readers = {at[-1] + 1: handed_on}
    if not readers:
        return None
    is_forward = transfer.phase is Phase.FORWARD
    is_handed = source in place if is_forward else source in space.grad_decider
    if transfer.name in (kind.inputs if is_forward else kind.tangents):
        first = at[0] - 1 if is_handed else None
    else:
        maker, position = place.get(source, (-1, -1))
        first = position if maker == transfer.kind and position in at else None
    stop = min(readers)
    return (
        None
        if first is None or stop <= first
        else _Ends(transfer.kind, transfer.phase, transfer.name, first, stop, readers[stop])
    )


def _reduces(job: Job, space: Space, ends: _Ends) -> int:
    """The op that makes a value, where all that it moves, under any option, is this one value once it is made."""
    at = ends.kind, ends.first
    outs = job.program.kinds[ends.kind].graph.ops[ends.first].outs if at in space.op_decider else ()
    alone = [out for out in outs if out is not None] == [ends.name]
    return space.op_decider[at] if alone and all(option.ring_axis < 0 for option in space.strategies[at]) else -1


def proof_network(job: Job, space: Space, problem: Formulation, constraints: Constraints) -> Network:
    """The network that bounds a step: with what is waited for, and gradients brought to where they accumulate once.

    Args:
        job, space: what is planned, and its options.
        problem: the network of the space.
        constraints: what is pinned.
    """
    return _reduced_once(job, space, problem, with_serial(job, space, problem, constraints.most_pieces))


def _reduced_once(job: Job, space: Space, problem: Formulation, network: Network) -> Network:
    """The network with gradients brought to where they accumulate once a step: a plan may add those of several
    microbatches up before (`Plan.reduce_every`)."""
    kinds, factors = Counter(segment.kind for segment in job.program.segments), list(network.factors)
    for transfer, number in zip(space.transfers, problem.factors, strict=True):
        least = kinds[transfer.kind]
        if transfer.name in job.program.kinds[transfer.kind].param_grads and transfer.count > least:
            factors[number] = replace(factors[number], prices=factors[number].prices * (least / transfer.count))
    return Network(network.prices, tuple(factors), network.rows)


def with_serial(job: Job, space: Space, problem: Formulation, most: int = 1) -> Network:
    """The network with a last stream: what a rank computes, and waits for in windows.

    Args:
        job, space, problem: as of `proof_network`.
        most: pieces that a product may be in.
    """
    network = problem.network
    found = windows(job, space)
    waited = _waited(space) / most
    inside = {decider for window in found for decider in window.inside}
    reduces = {window.reduces for window in found}

    def serial(variable: int, price: Floats) -> Floats:
        own = np.zeros(len(price)) if variable in inside else price[:, 0]
        return own + price @ waited if variable in reduces else own

    prices = tuple(_appended(price, serial(variable, price)) for variable, price in enumerate(network.prices))
    factors = [
        Factor(
            factor.source,
            factor.readers,
            factor.have,
            factor.wants,
            _appended(factor.prices, _serial(factor.prices, factor.source in inside)),
            factor.what,
        )
        for factor in network.factors
    ]
    factors += [
        _waits(network, problem, space.transfers[window.transfer], window, waited)
        for window in found
        if window.transfer >= 0
    ]
    return Network(prices, tuple(factors), network.rows)


def _serial(prices: Floats, is_inside: bool) -> Floats:
    """What a move computes; nothing inside of a window, where it is no less impossible."""
    own = prices[..., 0]
    return np.where(np.isfinite(own), 0.0, own) if is_inside else own


def _waited(space: Space) -> Floats:
    """[stream] of a second of it, what is waited for beyond what its collectives take of the compute stream."""
    least = space.prices.costs.moves.least_waited
    return np.array([least.get(stream, 0.0) for stream in space.prices.streams])


def _waits(network: Network, problem: Formulation, transfer: WantedValue, window: Window, waited: Floats) -> Factor:
    """What the first reader waits for."""
    factor = network.factors[problem.factors[window.transfer]]
    wants: Ints = factor.wants[[end.decider for end in transfer.readers].index(window.reader)]
    possible = np.isfinite(factor.prices[..., 0])
    links = np.where(possible, np.where(possible[..., None], factor.prices, 0.0) @ waited, np.inf)
    nothing = np.where(possible, 0.0, np.inf)[..., None]
    prices = np.concatenate((np.repeat(nothing, factor.prices.shape[-1], -1), links[..., None]), -1)
    return Factor(factor.source, (window.reader,), factor.have, (wants,), prices, f"{factor.what} waited for")


def _appended(prices: Floats, last: Floats) -> Floats:
    return np.concatenate((prices, last[..., None]), -1)
