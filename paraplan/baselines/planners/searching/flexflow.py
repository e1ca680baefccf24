"""FlexFlow: the sharding of every op by Markov chain Monte Carlo, with a simulated task graph as the cost.

A state gives each op one of its shardings on a mesh of all devices; a proposal gives one op another, at random. With
the simulated step c it is taken with probability

    min(1, exp(BETA · (c - c') / c_0))                          c_0: of data parallelism, where the chain begins

What is no op (parameters, gradients, inputs) then takes the layout that costs least beside the ops that read and make
it, as weights lie in FlexFlow as their op's sharding says. The chain ends when its time is over, or half of it passed
without a better state. The simulator goes through a kind of segment op by op: an op begins when the device is free and
what it reads is there; moves take their turn on the link they use, while devices compute; the step is what is waited
for in all instances, or what its busiest link takes.

Here equal layers are sharded alike, and an op's devices are those of a mesh, of which one and two axes are tried.
Neither memory nor microbatches are in the paper's space: where the state found does not fit, more microbatches are
tried, then recomputation of all layers.
Source: Jia et al. 2019 (Beyond Data and Model Parallelism), sections 5 and 6.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from paraplan.baselines.planners.searching.degrees import counts, replaced
from paraplan.baselines.planners.task import Answer, Task
from paraplan.ir.errors import ConstraintError, NoPlanError
from paraplan.ir.machine.mesh import P, parse_layout
from paraplan.ir.param_layouts import ParamLayouts
from paraplan.planner.assemble import Decisions, Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.sharding.formulate import formulate
from paraplan.planner.sharding.network.cost_network import Factor, Network
from paraplan.planner.sharding.solve import decisions_of, problem_of
from paraplan.planner.sharding.space import Space

BETA = 200.0
"""A step longer by one in so many is taken with probability 1/e."""
SEARCHED_SHARE = 0.4
"""Of the time limit, for all meshes."""
MOST_PROPOSALS = 4000
"""On a mesh."""
COMPUTED = 0
"""The stream of computation in a price."""


@dataclass
class TaskGraph:
    """What a step of a state takes.

    Attributes:
        job, space: what is sharded, and every sharding.
        times: how often a step runs every kind.
    """

    job: Job
    space: Space
    times: tuple[int, ...]
    _last: dict[tuple[int, tuple[int, ...]], tuple[float, tuple[float, ...]]] = field(default_factory=dict)

    @cached_property
    def network(self) -> Network:
        """The space's prices and moves, of a whole step."""
        return formulate(self.space).network

    @cached_property
    def ops(self) -> tuple[tuple[int, ...], ...]:
        """Per kind, the variables of its ops in order."""
        found: list[list[int]] = [[] for _ in self.times]
        for (kind, _), variable in sorted(self.space.op_decider.items()):
            found[kind].append(variable)
        return tuple(map(tuple, found))

    @cached_property
    def touching(self) -> tuple[tuple[Factor, ...], ...]:
        """Per variable, what moves to or from it."""
        found: list[list[Factor]] = [[] for _ in self.network.prices]
        for factor in self.network.factors:
            for variable in factor.variables:
                found[variable].append(factor)
        return tuple(map(tuple, found))

    @cached_property
    def twins(self) -> dict[int, tuple[int, ...]]:
        """Variables that take the option of another, by that one: it reads one value in two layouts."""
        of: dict[int, int] = {}
        for factor in self.network.factors:  # what ties a twin to its original comes before what it reads
            for reader in factor.readers:
                if reader >= len(self.space.deciders):
                    of.setdefault(reader, factor.source)
        return {v: tuple(twin for twin, original in of.items() if original == v) for v in of.values()}

    @cached_property
    def beside(self) -> tuple[int, ...]:
        """Variables that are no ops' and no twins'."""
        ops = set(self.space.op_decider.values())
        return tuple(v for v in range(len(self.space.deciders)) if v not in ops)

    @cached_property
    def allowed(self) -> tuple[tuple[int, ...], ...]:
        """Per variable, its options; of parameters those whose states lie as they do, and whose gradients are summed
        over all that hold the same (all of them where that leaves none)."""
        found = [tuple(range(len(prices))) for prices in self.network.prices]
        for variable, options in zip(self.space.param_decider, self.space.param_options, strict=True):
            layouts = [option.layouts() for option in options]
            plain = tuple(at for at, each in enumerate(layouts) if _is_plain(each))
            found[variable] = plain or found[variable]
        return tuple(found)

    @cached_property
    def _scope(self) -> tuple[tuple[int, ...], ...]:
        """Per kind, all variables that its simulation reads."""
        return tuple(
            tuple(sorted({v for op in ops for factor in self.touching[op] for v in factor.variables} | set(ops)))
            for ops in self.ops
        )

    @cached_property
    def _read(self) -> dict[int, tuple[tuple[int, Factor], ...]]:
        """Per op, what is moved to it, or to a twin of it."""
        return {
            op: tuple(
                (reader, factor)
                for reader in (op, *self.twins.get(op, ()))
                for factor in self.touching[reader]
                if reader in factor.readers and factor.source != op
            )
            for kind in self.ops
            for op in kind
        }

    def step_s(self, state: Sequence[int]) -> float:
        """Of a state; infinite where something cannot be moved."""
        waited, busy = 0.0, np.zeros(self.network.num_streams)
        for kind, times in enumerate(self.times):
            key = kind, tuple(state[v] for v in self._scope[kind])
            if key not in self._last:
                self._last[key] = self._simulated(kind, times, state)
            seconds, links = self._last[key]
            waited += times * seconds
            busy += times * np.array(links)
        for variable in self.beside:
            price = self.network.prices[variable][state[variable]]
            waited += price[COMPUTED]
            busy += price
        return max(waited, float(busy[COMPUTED + 1 :].max(initial=0.0)))

    def _simulated(self, kind: int, times: int, state: Sequence[int]) -> tuple[float, tuple[float, ...]]:
        """One instance of a kind: when its last op ends, and what every stream of it takes."""
        links, busy = [0.0] * self.network.num_streams, np.zeros(self.network.num_streams)
        now, made, there = 0.0, dict[int, float](), dict[tuple[int, int], float]()
        for op in self.ops[kind]:
            ready = now
            for reader, factor in self._read[op]:
                have = int(factor.have[state[factor.source]])
                want = int(factor.wants[factor.readers.index(reader)][state[reader]])
                if (id(factor), want) not in there:
                    price = factor.prices[have, want] / times
                    if not np.isfinite(price).all():
                        return math.inf, tuple(busy)
                    there[id(factor), want] = _moved(price, made.get(factor.source, 0.0), links)
                    busy += price
                ready = max(ready, there[id(factor), want])
            price = self.network.prices[op][state[op]] / times
            now = max(ready + float(price[COMPUTED]), _moved(price, ready, links))
            made[op] = now
            busy += price
        for op in self.ops[kind]:
            for factor in self.touching[op]:
                if factor.source == op and made.keys().isdisjoint(factor.readers):
                    have, wants = factor.asked(state)
                    busy += sum((factor.prices[have, want] for want in wants), start=np.zeros_like(busy)) / times
        return (now if np.isfinite(busy).all() else math.inf), tuple(busy)

    def settled(self, state: list[int], changed: int) -> None:
        """Give what is no op beside a changed variable the option of least price among its neighbours."""
        around = {v for factor in self.touching[changed] for v in factor.variables}
        for variable in sorted(around.intersection(self.beside)):
            self.settle(state, variable)

    def settle(self, state: list[int], variable: int) -> None:
        """Give a variable the option of least price beside what the others take."""
        prices = self.network.prices[variable].sum(axis=1)
        best = self.allowed[variable][0], math.inf
        for option in self.allowed[variable]:
            self.take(state, variable, option)
            total = float(prices[option]) + sum(_moves_s(factor, state) for factor in self.touching[variable])
            if total < best[1]:
                best = option, total
        self.take(state, variable, best[0])

    def take(self, state: list[int], variable: int, option: int) -> None:
        """Give a variable, and what goes with it, an option.

        Args:
            state: option per variable; changed in place.
            variable: which.
            option: its number.
        """
        state[variable] = option
        for twin in self.twins.get(variable, ()):
            state[twin] = option


def _is_plain(layouts: ParamLayouts) -> bool:
    """Whether a parameter, its gradient's sum and its states lie alike."""
    pairs = zip(parse_layout(layouts.stored), parse_layout(layouts.grad), strict=True)
    alike = all(grad in (stored, P) for stored, grad in pairs)
    return alike and layouts.state == layouts.stored and not (layouts.ahead or layouts.state_tier)


def _moved(price: np.ndarray, begin_s: float, links: list[float]) -> float:
    """When a move that may begin then is through; the links it takes are busy until they are."""
    now = begin_s
    for stream in range(COMPUTED + 1, len(links)):
        if price[stream] > 0:
            now = links[stream] = max(links[stream], now) + float(price[stream])
    return now


def _moves_s(factor: Factor, state: Sequence[int]) -> float:
    have, wants = factor.asked(state)
    return float(sum(factor.prices[have, want].sum() for want in wants))


def walked(
    graph: TaskGraph, state: list[int], seed: int, time_s: float, most: int = MOST_PROPOSALS
) -> tuple[float, list[int]]:
    """The best state that a chain comes through.

    Args:
        graph: what states cost.
        state: where it begins.
        seed: of what is drawn.
        time_s, most: seconds, and proposals.
    """
    draw, began = random.Random(seed), time.perf_counter()
    ops = [op for kind in graph.ops for op in kind if len(graph.network.prices[op]) > 1]
    now_s = first_s = best_s = graph.step_s(state)
    best, better_at = list(state), began
    for _ in range(most if ops else 0):
        passed = time.perf_counter()
        if passed - began > time_s or passed - better_at > time_s / 2:
            break
        op, tried = draw.choice(ops), list(state)
        graph.take(tried, op, draw.randrange(len(graph.network.prices[op])))
        graph.settled(tried, op)
        tried_s = graph.step_s(tried)
        if math.isinf(tried_s) or draw.random() >= math.exp(min(BETA * (now_s - tried_s) / first_s, 0.0)):
            continue
        state, now_s = tried, tried_s
        if now_s < best_s:
            best, best_s, better_at = list(state), now_s, time.perf_counter()
    return best_s, best


def data_parallel(graph: TaskGraph, known: Decisions) -> list[int]:
    """The state of data parallelism: ops as there on every axis, all else as costs least beside them."""
    state = [options[0] for options in graph.allowed]
    for (kind, index), variable in graph.space.op_decider.items():
        keys = [strategy.key for strategy in graph.space.strategies[kind, index]]
        wanted = "|".join([known.ops[kind][index]] * len(graph.space.prices.costs.mesh.shape))
        graph.take(state, variable, keys.index(wanted) if wanted in keys else 0)
    for variable in graph.beside:
        graph.settle(state, variable)
    return state


def flexflow(task: Task) -> Iterator[Answer]:
    """The best chain's state first, in few microbatches first; recomputing after all that do not."""
    n, found = task.num_devices, []
    shapes = list(dict.fromkeys([(n,), *[s for s in ((n // task.per_node, task.per_node), (n // 2, 2)) if min(s) > 1]]))
    for seed, shape in enumerate(shapes):
        try:
            found.append((*_chain(task, shape, seed, SEARCHED_SHARE / len(shapes)), shape))
        except (ConstraintError, NoPlanError):
            continue
    found.sort(key=lambda each: each[0])
    layers = len(task.profiles.repeated)
    for recompute, (_, count) in itertools.product(("none", "full"), sorted(counts(task, n), key=lambda each: each[1])):
        for _, decisions, shape in found:
            pins = Constraints(pp=1, mesh=shape, microbatches=count)
            decided = Decisions(**{**vars(decisions), "num_microbatches": count})
            yield Answer(pins, (recompute,) * layers, decided)


def _chain(task: Task, shape: tuple[int, ...], seed: int, share: float) -> tuple[float, Decisions]:
    """The best state on a mesh.

    Raises:
        ConstraintError, NoPlanError: there is no sharding, or data parallelism is none of them.
    """
    task.progress(f"flexflow: a chain of shardings on mesh {shape}")
    _, parallel = task.profiles.decisions(Constraints(pp=1, dp=task.num_devices, zero=0, microbatches=1))
    graph = task_graph(task, shape)
    step_s, state = walked(graph, data_parallel(graph, parallel), seed, share * task.deadline.limit_s)
    if math.isinf(step_s):
        raise ConstraintError(f"mesh {shape}: the chain finds no sharding")
    mesh, choices = graph.space.prices.costs.mesh, state[: len(graph.space.deciders)]
    return step_s, decisions_of(graph.job, graph.space, mesh, 1, choices, bool(task.constraints.params))


def task_graph(task: Task, shape: tuple[int, ...]) -> TaskGraph:
    """All shardings on a mesh of all devices.

    Raises:
        ConstraintError, NoPlanError: there is none.
    """
    part, free = task.profiles.decisions(Constraints(pp=1, mesh=shape, microbatches=1))
    space = problem_of(part, free.mesh, 1, replaced(task.constraints, mesh=shape, pp=None, microbatches=1, dp=None))
    space.transfers = [replace(each, bundled=False) for each in space.transfers]  # its tasks are single moves
    instances = Counter(segment.kind for segment in part.program.segments)
    return TaskGraph(part, space, tuple(instances[kind] for kind in range(len(part.program.kinds))))
