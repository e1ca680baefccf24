"""Plans of one stage chosen with transfers at what is waited for of them.

Shardings are chosen by total work over streams, in which a transfer costs what it takes, whether or not anything is
computed meanwhile. Of a plan that was simulated it is known what share of its transfers is waited for; one that moves
more and computes less may be faster. So the network is solved again with transfers at that share, as long as that
finds a faster plan.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paraplan.cost_models.simulator.rank_trace import Simulation
from paraplan.ir.execution.streams import COMPUTE
from paraplan.ir.machine.mesh import Mesh
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import SolveLimits
from paraplan.planner.evaluate_plan import realise
from paraplan.planner.sharding.formulate import network_of
from paraplan.planner.sharding.network.cost_network import Floats, Network
from paraplan.planner.sharding.network.optimise import optimise
from paraplan.planner.sharding.solve import Candidate, decisions_of, problem_of

ROUNDS, LEAST = 3, 0.05
"""Plans looked for at most, one after another; the least that the share is taken to be."""
HIDDEN = 0.01
"""Of a step, what of its transfers is hidden at least for their price to matter."""
NEAR = 1.05
"""How much slower than the best plan known one may be for others like it to be looked for."""


def hiding(
    job: Job, mesh: Mesh, constraints: Constraints, limits: SolveLimits, here: Sequence[Candidate]
) -> list[Candidate]:
    """Plans faster than those known, if there are any: the faster last.

    Args:
        job, mesh, constraints, limits: what was solved for.
        here: plans found for them; where memory binds or things leave the device, nothing more is looked for.
    """
    began, best = time.perf_counter(), min(here, key=lambda each: each.simulation.step_s, default=None)
    if best is None or not best.choices or best.memory_binds or constraints.tiers or not _hides(best.simulation):
        return []
    if best.simulation.step_s > NEAR * min(limits.known_s, limits.found_s):
        return []
    count, found = best.plan.num_microbatches, list[Candidate]()
    placed = constraints.placed(constraints.placing.rungs(())[0])
    space = problem_of(job, mesh, count, placed)
    network = network_of(space, limits.memory_bytes)
    is_transfer = np.array([stream != COMPUTE for stream in space.prices.streams])
    while len(found) < ROUNDS:
        last = found[-1] if found else best
        priced_s = float(network.work(last.choices)[is_transfer].sum())
        share = max(last.simulation.exposed_comm_s / priced_s, LEAST) if priced_s > 0 else 1.0
        left_s = limits.time_s - (time.perf_counter() - began)
        if share >= 1 or left_s <= 0:
            break
        weighed = _weighed(network, np.where(is_transfer, share, 1.0))
        solved = optimise(weighed, left_s, limits.relative_gap, limits.backend)
        if solved.choices is None or solved.choices == last.choices:
            break
        decided = decisions_of(job, space, mesh, count, solved.choices[: len(space.deciders)], bool(placed.params))
        made = realise(job, decided, limits.memory_bytes)
        fits, simulation = made.peak_bytes <= limits.memory_bytes and not made.over_bytes, made.simulation
        if not fits or simulation.step_s >= last.simulation.step_s:
            break
        work_s = float(network.work(solved.choices).sum())
        found.append(Candidate(made.plan, simulation, work_s, best.bound_s, "feasible", 0.0, choices=solved.choices))
    return found


def _hides(simulation: Simulation) -> bool:
    """Whether enough of the transfers goes on beside what is computed."""
    return sum(simulation.comm_s.values()) - simulation.exposed_comm_s > HIDDEN * simulation.step_s


def _weighed(network: Network, weights: Floats) -> Network:
    """The network with each stream's seconds at such a weight."""
    prices = tuple(price * weights for price in network.prices)
    factors = tuple(replace(factor, prices=factor.prices * weights) for factor in network.factors)
    return Network(prices, factors, network.rows)
