"""Mist: recomputation, ZeRO and offload tuned with parallelism, the imbalance between microbatches counted.

For every choice of degrees, microbatch, ZeRO level and place of states, stages are chosen by a mixed integer program
over runs of layers [i, j), with t of a stable microbatch and d of what its first and last ones take beyond it:

    minimise   (m - 1) T + sum over stages of t + D
    such that  T >= t_s,   D >= d_s - sum over r < s of t_r,   stages are one chain of all layers

t is computation with what it recomputes, or the communication under way beside it where that is longer; as many layers
recompute as the stage's memory asks for, the cheapest per byte first. d is what is not hidden of gathering parameters
and reducing gradients once a step, and the update. States are on the host only where `offload` allows it: gradients
then go there, the host updates, parameters come back.

Here ZeRO and offload are the same in all stages, of offload there is that of all states, and a stage's runs are no
longer or shorter than even ones by more than SLACK layers.
Source: Zhu et al. 2025 (Mist), sections 4 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from paraplan.baselines.planners.layer_profile import LayerProfile
from paraplan.baselines.planners.searching.degrees import counts, grids, pinned, replaced
from paraplan.baselines.planners.task import Answer, Task
from paraplan.planner.pipeline.cuts.stage_cuts import Bounds
from paraplan.planner.solvers.milp import solve
from paraplan.planner.solvers.milp_problem import MilpBuilder

SLACK = 3
"""Layers that a stage may have more or fewer than even ones."""
SOLVED_S = 3.0
"""For one program."""
SEARCHED_SHARE = 0.5
"""Of the time limit."""
HOST = "host"


@dataclass(frozen=True)
class StageOption:
    """A run of layers as a stage.

    Attributes:
        stable_s: t, of a microbatch.
        more_s: d, beyond it, once a step.
        remade: the layers that recompute.
    """

    stable_s: float
    more_s: float
    remade: frozenset[int]


@dataclass(frozen=True)
class Tuned:
    """What is the same in all stages.

    Attributes:
        task, profile: what is planned, and its layers on one tensor-parallel group.
        pp, dp, tp, count: degrees and microbatches.
        zero: level.
        place: of states: "" for the device, or the host.
    """

    task: Task
    profile: LayerProfile
    pp: int
    dp: int
    tp: int
    count: int
    zero: int
    place: str

    @cached_property
    def kept_bytes(self) -> tuple[int, ...]:
        """Per layer, what the device keeps."""
        p, dp = self.profile, self.dp
        if not self.place:
            return p.kept_bytes(self.zero, dp)
        stored, grads = dp if self.zero == 3 else 1, dp if self.zero >= 2 else 1
        both = zip(p.stored_bytes, p.grad_bytes, strict=True)
        return tuple(math.ceil(a / stored) + math.ceil(b / grads) for a, b in both)

    def option(self, first: int, stop: int, later: int) -> StageOption | None:
        """Layers [first, stop) with so many stages after them; None where they do not fit.

        Args:
            first, stop: the stage's layers.
            later: stages after it.
        """
        p, layers = self.profile, range(first, stop)
        in_flight = min(later + 1, self.count)
        room = self.task.budget - sum(self.kept_bytes[first:stop]) - p.workspace_bytes
        held = in_flight * sum(p.saved_bytes[first:stop])
        able = [i for i in layers if p.saved_bytes[i] > p.remade_bytes["full"][i]]
        able.sort(key=lambda i: p.again_s["full"][i] / (p.saved_bytes[i] - p.remade_bytes["full"][i]))
        remade: list[int] = []
        for i in able:
            if held <= room:
                break
            held -= in_flight * (p.saved_bytes[i] - p.remade_bytes["full"][i])
            held += p.saved_bytes[i] if not remade else 0  # whole while it is made again
            remade.append(i)
        if held > room:
            return None
        backward_s = sum(p.backward_s[first:stop]) + sum(p.again_s["full"][i] for i in remade)
        forward_s = sum(p.forward_s[first:stop])
        stable_s = self._beside_s(forward_s, layers, 1 if self.zero == 3 else 0, 0)
        stable_s += self._beside_s(backward_s, layers, 1 if self.zero == 3 else 0, 1 if self.zero >= 2 else 0)
        return StageOption(stable_s, self._more_s(layers, forward_s, backward_s), frozenset(remade))

    def _beside_s(self, computed_s: float, layers: Sequence[int], gathers: int, scatters: int) -> float:
        """Computation, or what moves beside it."""
        p, links = self.profile, self.task.links
        moved_s = gathers * links.reduce_scatter_s(sum(p.stored_bytes[i] for i in layers), self.dp, self.tp)
        moved_s += scatters * links.reduce_scatter_s(sum(p.grad_bytes[i] for i in layers), self.dp, self.tp)
        return max(computed_s, moved_s)

    def _more_s(self, layers: Sequence[int], forward_s: float, backward_s: float) -> float:
        """d: what is not hidden of gathers and reductions, and the update."""
        p, links, cluster = self.profile, self.task.links, self.task.job.cluster
        grads, stored = (sum(each[i] for i in layers) for each in (p.grad_bytes, p.stored_bytes))
        states = sum(p.state_bytes[i] for i in layers) / (self.dp if self.zero else 1)
        more_s = 0.0
        if self.zero == 0:
            more_s += max(links.all_reduce_s(grads, self.dp, self.tp) - backward_s, 0.0)
        elif self.zero == 1:
            more_s += max(links.reduce_scatter_s(grads, self.dp, self.tp) - backward_s, 0.0)
        if self.zero in (1, 2):
            more_s += max(links.reduce_scatter_s(stored, self.dp, self.tp) - forward_s, 0.0)
        if not self.place:
            return more_s + 2 * states / cluster.group_of(0).device.memory_bytes_per_s
        share = self.dp if self.zero else 1
        copied_s = sum(cluster.copy_s(HOST, 0, round(n / share)) for n in (grads, stored))
        return more_s + copied_s + 2 * states / cluster.update_bytes_per_s(HOST, 0)

    def solved(self) -> tuple[float, Bounds, tuple[str, ...]] | None:
        """The step, stages and what layers recompute, by the program; None where nothing fits."""
        layers, even = self.profile.num_layers, self.profile.num_layers / self.pp
        options: dict[tuple[int, int, int], StageOption] = {}
        for s in range(self.pp):
            for first in range(layers) if s else (0,):
                for stop in range(first + 1, layers + 1):
                    usual = abs(stop - first - even) <= SLACK and abs(stop - even * (s + 1)) <= SLACK
                    if (stop == layers) == (s == self.pp - 1) and (usual or self.pp == 1):
                        found = self.option(first, stop, self.pp - 1 - s)
                        if found is not None:
                            options[s, first, stop] = found
        chosen = chain_of(options, self.pp, layers, self.count)
        if chosen is None:
            return None
        bounds = tuple((first, stop) for _, first, stop in chosen)
        remade = frozenset[int]().union(*(options[each].remade for each in chosen))
        step_s = step_of([options[each] for each in chosen], self.count)
        return step_s, bounds, tuple("full" if i in remade else "none" for i in range(layers))


def step_of(stages: Sequence[StageOption], count: int) -> float:
    """The program's objective for some stages."""
    before_s, more_s = 0.0, 0.0
    for stage in stages:
        more_s = max(more_s, stage.more_s - before_s)
        before_s += stage.stable_s
    return (count - 1) * max(stage.stable_s for stage in stages) + before_s + more_s


def chain_of(
    options: dict[tuple[int, int, int], StageOption], stages: int, layers: int, count: int
) -> tuple[tuple[int, int, int], ...] | None:
    """The best chain of (stage, first, stop), by the mixed integer program; None where there is none.

    Args:
        options: of every stage and run that fits.
        stages, layers, count: how many; microbatches.
    """
    keys = list(options)
    if not keys:
        return None
    scale = max(option.stable_s + option.more_s for option in options.values())
    stable = [options[key].stable_s / scale for key in keys]
    builder = MilpBuilder()
    builder.add_columns(len(keys), upper=1.0, integer=True, objective=stable)
    slowest = builder.add_columns(1, objective=float(count - 1))
    beyond = builder.add_columns(1, objective=1.0)
    for s in range(stages):
        mine = [at for at, key in enumerate(keys) if key[0] == s]
        builder.add_row(mine, [1.0] * len(mine), lower=1.0, upper=1.0)
        builder.add_row([*mine, slowest], [*(-stable[at] for at in mine), 1.0], lower=0.0)
        earlier = [at for at, key in enumerate(keys) if key[0] < s]
        more = [-options[keys[at]].more_s / scale for at in mine]
        builder.add_row([*mine, *earlier, beyond], [*more, *(stable[at] for at in earlier), 1.0], lower=0.0)
        for layer in range(1, layers) if s else ():
            ends = [at for at, key in enumerate(keys) if key[0] == s - 1 and key[2] == layer]
            begins = [at for at, key in enumerate(keys) if key[0] == s and key[1] == layer]
            if ends or begins:
                builder.add_row([*ends, *begins], [*[1.0] * len(ends), *[-1.0] * len(begins)], lower=0.0, upper=0.0)
    found = solve(builder.build(), time_limit_s=SOLVED_S)
    if found.values is None:
        return None
    return tuple(sorted(key for at, key in enumerate(keys) if found.values[at] > 0.5))


def mist(task: Task) -> Iterator[Answer]:
    """The shortest step first."""
    found = []
    places = ("", HOST) if HOST in task.constraints.tiers else ("",)
    for pp, dp, tp in grids(task):
        for samples, count in counts(task, dp):
            profile = task.profiles.of(tp, samples)
            if profile is None or count < pp:
                continue
            for zero in range(4) if dp > 1 else (0,):
                for place in places if zero in (0, 3) else places[:1]:
                    if task.deadline.passed_s > SEARCHED_SHARE * task.deadline.limit_s:
                        continue
                    best = Tuned(task, profile, pp, dp, tp, count, zero, place).solved()
                    if best is not None:
                        found.append((best[0], pp, dp, tp, count, zero, place, best[1], best[2]))
    for _, pp, dp, tp, count, zero, place, bounds, remade in sorted(found):
        pins = replaced(pinned(task, pp, dp, tp, count, zero), stages=bounds if pp > 1 else None)
        if place:
            pins = replaced(pins, offload=task.constraints.offload, place_states=place, update_on=place)
        yield Answer(pins, remade)
