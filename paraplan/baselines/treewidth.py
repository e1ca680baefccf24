"""Rematerialisation along a tree decomposition of the step's graph.

To compute some targets inside a part C of the graph, whose surroundings are computed or not needed:
  take a bag S of a tree decomposition, restricted to C, that leaves components of at most half of C;
  for each op of S that the targets depend on, in order: compute its inputs, component by component, by this
  very procedure, execute it, keep it, drop the inputs;
  compute the targets in each component by this procedure, with S there.
At each of the log n levels at most width + 1 results are kept and as many calls made: memory O(width · log n), at most
n · (width + 1)^(log n) executions. Parts of at most `leaf` ops are computed directly, keeping everything; the largest
leaf (n, n/2, … 1) whose schedule is within the budget is taken (a leaf of n is the step as it is).

Source: Kumar, Purohit, Svitkina, Vee & Wang 2019 (NeurIPS); decompositions are networkx's minimum fill-in (Bodlaender
& Koster 2010), so the width is an upper bound of the treewidth. Limits: it has no time model, what is short or small is
treated alike; sequences above `MOST_RUNS` executions per op are given up.
"""

from __future__ import annotations

from collections.abc import Iterable

import networkx as nx
from networkx.algorithms.approximation import treewidth_min_fill_in

from paraplan.baselines.common import Clock, Limits, answer_ops, check_budget, fits, keep_all, nothing_fits
from paraplan.planner.memory.answer import MemoryAnswer
from paraplan.planner.memory.problem import MemoryProblem

MOST_RUNS = 200
"""Executions per op, on average, at which a schedule is given up."""

Part = frozenset[int]


class _TooLong(Exception):
    """The sequence has grown past `MOST_RUNS`."""


class _Run:
    """One recursion: the sequence so far and what is there."""

    def __init__(self, problem: MemoryProblem, bags: list[Part], leaf: int) -> None:
        self.problem, self.bags, self.leaf = problem, bags, leaf
        self.inputs = [
            tuple(sorted({m for t in op.reads if (m := problem.tensors[t].maker) >= 0})) for op in problem.ops
        ]
        self.graph = nx.Graph()
        self.graph.add_nodes_from(range(len(problem.ops)))
        self.graph.add_edges_from((a, b) for b, before in enumerate(self.inputs) for a in before)
        self.sequence: list[int] = []
        self.there: set[int] = set()
        self.pinned: set[int] = set()
        self.split: dict[Part, tuple[Part, tuple[Part, ...]]] = {}

    def compute(self, part: Part, targets: Iterable[int]) -> None:
        """Makes targets of a part there, and nothing else of it."""
        wanted = [op for op in sorted(targets) if op not in self.there]
        if not wanted:
            return
        before = frozenset(self.there)
        needed = self._ancestors(part, wanted)
        if len(part) <= self.leaf or len(needed) == 1:
            for op in sorted(needed):
                self._run(op)
        else:
            separator, components = self._separated(part)
            for op in sorted(separator & needed):
                if op in self.there:
                    continue
                held = frozenset(self.there)
                for component in components:
                    self.compute(component, [u for u in self.inputs[op] if u in component])
                self._run(op)
                self._keep_only(held | {op})
            for component in components:
                self.compute(component, [op for op in wanted if op in component])
        self._keep_only(before.union(wanted))

    def _run(self, op: int) -> None:
        self.sequence.append(op)
        if len(self.sequence) > MOST_RUNS * len(self.problem.ops):
            raise _TooLong
        self.there.add(op)
        if not self.problem.ops[op].repeatable:
            self.pinned.add(op)

    def _keep_only(self, ops: frozenset[int]) -> None:
        self.there &= ops | self.pinned

    def _ancestors(self, part: Part, targets: list[int]) -> set[int]:
        """Ops of a part to execute for targets, given what is there."""
        found: set[int] = set()
        stack = list(targets)
        while stack:
            op = stack.pop()
            if op not in found and op not in self.there and op in part:
                found.add(op)
                stack += self.inputs[op]
        return found

    def _separated(self, part: Part) -> tuple[Part, tuple[Part, ...]]:
        """The bag that leaves the smallest largest component, and the components."""
        known = self.split.get(part)
        if known is None:
            best: tuple[int, int, Part, tuple[Part, ...]] | None = None
            for number, bag in enumerate(self.bags):
                inside = bag & part
                if inside:
                    rest = self.graph.subgraph(part - inside)
                    components = tuple(sorted(map(frozenset, nx.connected_components(rest)), key=min))
                    largest = max(map(len, components), default=0)
                    if best is None or (largest, number) < best[:2]:
                        best = (largest, number, inside, components)
            assert best is not None
            known = self.split[part] = best[2:]
        return known


def treewidth(problem: MemoryProblem, budget_bytes: int, limits: Limits) -> MemoryAnswer:
    """The schedule of the largest leaf that fits.

    Raises:
        SolverLimitError: none fits, or not before the sequences grew too long or time passed.
    """
    check_budget(problem, budget_bytes)
    clock = Clock(limits)
    tried = [keep_all(problem)]
    if fits(tried[0], budget_bytes):
        return tried[0]
    count = len(problem.ops)
    leaf = count // 2
    root = _Run(problem, [], 0)
    width, tree = treewidth_min_fill_in(root.graph)
    bags = sorted(map(frozenset, tree.nodes), key=sorted)
    while leaf >= 1 and not clock.over:
        run = _Run(problem, bags, leaf)
        try:
            for op in range(count):  # every op must run; what the step keeps stays, others go
                run.compute(frozenset(range(count)), [op] if _must(problem, op) else [])
                run._keep_only(frozenset(o for o in run.there if _kept(problem, o)))
        except _TooLong:
            break
        notes = (f"width {width}, parts of up to {leaf} ops at once",)
        tried.append(answer_ops(problem, tuple(run.sequence), notes))
        if fits(tried[-1], budget_bytes):
            return tried[-1]
        leaf //= 2
    least = min(each.evaluation.peak_bytes for each in tried)
    raise nothing_fits("treewidth", budget_bytes, least, f"width {width}, parts down to {max(leaf, 1)} ops")


def _kept(problem: MemoryProblem, op: int) -> bool:
    return any(problem.tensors[t].kept for t in problem.ops[op].makes)


def _must(problem: MemoryProblem, op: int) -> bool:
    """Whether an op is a target: it makes what is kept, or nobody reads what it makes."""
    return _kept(problem, op) or not any(problem.readers[t] for t in problem.ops[op].makes)
