"""Galvatron: a strategy for each layer by dynamic programming under memory, below a decision tree over degrees.

The tree fixes the pipeline degree, then how a stage's devices are shared among data, sharded data and tensor
parallelism. Below it `partition.layer_strategies` chooses for each layer whether its activations are kept or made
again, so that a stage takes least within its memory; memory is counted in units. Computation and collectives that
overlap slow each other down by SLOWDOWN:

    together(a, b) = SLOWDOWN · min(a, b) + |a - b|
    step           = sum over stages of C_sync + (m - 1) · max over stages of C        (Galvatron-BMW, section 4)

where C_sync has the reduction of gradients besides. Stages begin balanced by memory, and by time; boundary layers move
to neighbours as long as that makes the step faster (BMW's bi-objective adjustment).

Here all layers of a plan have the same degrees, and data parallelism is sharded (ZeRO-3) for all or none.
Sources: Miao et al. 2022, section 3; Wang et al. 2023 (Galvatron-BMW), sections 3 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from paraplan.baselines.planners.layer_profile import GroupLinks, LayerProfile
from paraplan.baselines.planners.searching.degrees import counts, grids, pinned, replaced
from paraplan.baselines.planners.task import Answer, Task
from paraplan.planner.partition.layer_strategies import choose_strategies
from paraplan.planner.pipeline.cuts.stage_cuts import Bounds, cut_chain

SLOWDOWN = 1.3
"""Of computation and communication at once (Miao et al. 2022, section 3.4)."""
UNITS = 512
"""In which a device's memory is counted."""
MOVES = 32
"""Boundary layers moved."""
KEPT = ("none", "full")
"""What a layer may recompute."""


def together_s(computed_s: float, moved_s: float) -> float:
    """Seconds of computation and communication that overlap."""
    return SLOWDOWN * min(computed_s, moved_s) + abs(computed_s - moved_s)


@dataclass
class Branch:
    """A leaf of the decision tree.

    Attributes:
        profile, links: of one tensor-parallel group.
        pp, dp, tp: degrees.
        sharded: whether data parallelism is.
        count: microbatches.
        budget: bytes a device may hold.
    """

    profile: LayerProfile
    links: GroupLinks
    pp: int
    dp: int
    tp: int
    sharded: bool
    count: int
    budget: int
    _known: dict[tuple[int, int, int], tuple[float, float, tuple[str, ...]] | None] = field(default_factory=dict)

    def layer_s(self, layer: int, preset: str, syncs: bool) -> float:
        """Of one microbatch, with its gradients' reduction or without.

        Args:
            layer: its number.
            preset: of recomputation.
            syncs: whether its gradients are reduced.
        """
        p, grads = self.profile, self.profile.grad_bytes[layer]
        backward_s = p.backward_s[layer] + p.again_s[preset][layer]
        if self.sharded:
            gather_s = self.links.reduce_scatter_s(p.stored_bytes[layer], self.dp, self.tp)
            scatter_s = self.links.reduce_scatter_s(grads, self.dp, self.tp)
            return together_s(p.forward_s[layer], gather_s) + together_s(backward_s, gather_s + scatter_s)
        reduce_s = self.links.all_reduce_s(grads, self.dp, self.tp) if syncs else 0.0
        return p.forward_s[layer] + together_s(backward_s, reduce_s)

    def stage(self, first: int, stop: int, later: int) -> tuple[float, float, tuple[str, ...]] | None:
        """Seconds of a microbatch, with reductions and without, and what each layer recomputes; None: it fits not.

        Args:
            first, stop: its layers.
            later: stages after it.
        """
        key = first, stop, later
        if key not in self._known:
            self._known[key] = self._stage(*key)
        return self._known[key]

    def _stage(self, first: int, stop: int, later: int) -> tuple[float, float, tuple[str, ...]] | None:
        p, layers, unit = self.profile, range(first, stop), self.budget / UNITS
        kept, in_flight = p.kept_bytes(3 if self.sharded else 0, self.dp), min(later + 1, self.count)
        room = self.budget - p.workspace_bytes - max(p.saved_bytes[i] for i in layers)
        held = [[kept[i] + in_flight * p.remade_bytes[name][i] for name in KEPT] for i in layers]
        plain = [[self.layer_s(i, name, False) for name in KEPT] for i in layers]
        syncing = [[self.layer_s(i, name, True) for name in KEPT] for i in layers]
        memory = np.ceil(np.array(held) / unit)
        intra = np.array(syncing) + (self.count - 1) * np.array(plain)
        (found,) = choose_strategies(memory, intra, np.zeros((len(layers), 2, 2)), [math.floor(room / unit)])
        if found is None:
            return None
        chosen = list(enumerate(found.strategies))
        seconds = sum(syncing[i][s] for i, s in chosen), sum(plain[i][s] for i, s in chosen)
        return *seconds, tuple(KEPT[s] for _, s in chosen)

    def step_s(self, bounds: Bounds) -> float:
        """Of a step; infinite where a stage does not fit."""
        stages = [self.stage(*bound, len(bounds) - 1 - at) for at, bound in enumerate(bounds)]
        if any(stage is None for stage in stages):
            return math.inf
        found = [stage for stage in stages if stage is not None]
        return sum(stage[0] for stage in found) + (self.count - 1) * max(stage[1] for stage in found)

    def best(self) -> tuple[float, Bounds, tuple[str, ...]] | None:
        """The step, its stages and what layers recompute; None where nothing fits."""
        p = self.profile
        kept = p.kept_bytes(3 if self.sharded else 0, self.dp)
        starts = [cut_chain([float(k + s) for k, s in zip(kept, p.saved_bytes, strict=True)], self.pp)]
        starts.append(cut_chain(p.seconds, self.pp))
        found = [self._adjusted(bounds) for bounds in starts if bounds is not None]
        step_s, bounds = min(found, default=(math.inf, ()))
        if math.isinf(step_s):
            return None
        remade = [self.stage(*bound, len(bounds) - 1 - at) for at, bound in enumerate(bounds)]
        return step_s, bounds, tuple(name for stage in remade if stage is not None for name in stage[2])

    def _adjusted(self, bounds: Bounds) -> tuple[float, Bounds]:
        """Stages with boundary layers moved as long as that is faster."""
        step_s = self.step_s(bounds)
        for _ in range(MOVES):
            tried = [(self.step_s(moved), moved) for moved in _moves(bounds)]
            faster = min(tried, default=(math.inf, bounds))
            if not faster[0] < step_s:
                break
            step_s, bounds = faster
        return step_s, bounds


def _moves(bounds: Bounds) -> Iterator[Bounds]:
    """Stages with one layer moved over one of their boundaries."""
    ends = [stop for _, stop in bounds]
    for at in range(len(ends) - 1):
        for by in (-1, 1):
            moved = [*ends[:at], ends[at] + by, *ends[at + 1 :]]
            if all(a < b for a, b in zip([0, *moved], moved, strict=False)):
                yield tuple(zip([0, *moved[:-1]], moved, strict=True))


def galvatron(task: Task) -> Iterator[Answer]:
    """The shortest step first."""
    found = []
    for pp, dp, tp in grids(task):
        if pp & (pp - 1) or tp & (tp - 1):
            continue
        for samples, count in counts(task, dp):
            profile = task.profiles.of(tp, samples)
            if profile is None or task.deadline.passed_s > task.deadline.limit_s / 2:
                continue
            for sharded in (False, True) if dp > 1 else (False,):
                branch = Branch(profile, task.links, pp, dp, tp, sharded, count, task.budget)
                best = branch.best()
                if best is not None:
                    found.append((best[0], pp, dp, tp, count, 3 if sharded else 0, *best[1:]))
    for _, pp, dp, tp, count, zero, bounds, remade in sorted(found):
        pins = replaced(pinned(task, pp, dp, tp, count, zero), stages=bounds if pp > 1 else None)
        yield Answer(pins, remade)
