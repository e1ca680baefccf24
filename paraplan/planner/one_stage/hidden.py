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
from paraplan.planner.recompute.split import work_s
from paraplan.planner.sharding.formulate import network_of
from paraplan.planner.sharding.network.cost_network import Floats, Network
from paraplan.planner.sharding.network.optimise import optimise
from paraplan.planner.sharding.solve import Candidate, decisions_of, problem_of

ROUNDS, LEAST = 3, 0.05
"""How often the share is learned; the least that it is taken to be."""
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
    if best is None or best.memory_binds or constraints.tiers or not _hides(best.simulation):
        return []
    if best.simulation.step_s > NEAR * min(limits.known_s, limits.found_s):
        return []
    count, known_s, share, found = best.plan.num_microbatches, best.simulation.step_s, 1.0, list[Candidate]()
    space = problem_of(job, mesh, count, constraints)
    network = network_of(space, limits.memory_bytes)
    is_transfer = np.array([stream != COMPUTE for stream in space.prices.streams])
    for tries in range(1 + ROUNDS):
        left_s = limits.left_s(time.perf_counter() - began)
        weighed = _weighed(network, np.where(is_transfer, share, 1.0))
        solved = optimise(weighed, left_s, limits.relative_gap, limits.backend)
        if solved.choices is None:
            break
        choices = solved.choices[: len(space.deciders)]
        made = realise(
            job, decisions_of(job, space, mesh, count, choices, bool(constraints.params)), limits.memory_bytes
        )
        fits, simulation = made.peak_bytes <= limits.memory_bytes and not made.over_bytes, made.simulation
        if fits and simulation.step_s < known_s:
            found.append(Candidate(made.plan, simulation, work_s(simulation), best.bound_s, "feasible", 0.0))
        elif tries:
            break
        known_s = min(known_s, simulation.step_s if fits else known_s)
        priced_s = float(network.work(solved.choices)[is_transfer].sum())
        share = max(simulation.exposed_comm_s / priced_s, LEAST) if priced_s > 0 else 1.0
        if share >= 1 or time.perf_counter() - began > limits.time_s:
            break
    return found


def _hides(simulation: Simulation) -> bool:
    """Whether enough of the transfers goes on beside what is computed."""
    return sum(simulation.comm_s.values()) - simulation.exposed_comm_s > HIDDEN * simulation.step_s


def _weighed(network: Network, weights: Floats) -> Network:
    """The network with each stream's seconds at such a weight."""
    prices = tuple(price * weights for price in network.prices)
    factors = tuple(replace(factor, prices=factor.prices * weights) for factor in network.factors)
    return Network(prices, factors, network.rows)
