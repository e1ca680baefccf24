"""Aceso: a configuration improved step by step where its bottleneck is.

For every number of stages it begins with layers cut evenly, data parallelism and the smallest microbatch. The
bottleneck is the stage that is most over its memory, or else the slowest; primitives that relieve it of what it uses
most are tried, and what they lead to, up to HOPS one after another, until a configuration is better than where it
began. Where none is, the search goes on from the best configuration seen that was not begun from yet.

| short of | primitives, the first tried first |
|---|---|
| memory | recompute more, give layers away, smaller microbatches, tensor for data parallelism |
| computation | give layers away, recompute less, larger microbatches, data for tensor parallelism |
| communication | data for tensor parallelism or tensor for data, larger microbatches, give layers away |

A step takes sum t + (m - 1) max t and the slowest all-reduce, t of stages per microbatch; memory is 1F1B's. Here
degrees change in all stages at once, and what is tuned within an operator group at the end is our sharding.
Source: Liu et al. 2024, sections 3 and 4.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from paraplan.baselines.planners.layer_profile import LayerProfile
from paraplan.baselines.planners.searching.degrees import counts, grids, pinned, replaced
from paraplan.baselines.planners.task import Answer, Task
from paraplan.planner.pipeline.cuts.stage_cuts import Bounds, cut_chain

HOPS = 4
"""Primitives one after another that a better configuration may take."""
BEGUN = 60
"""Configurations begun from, for one number of stages."""
ANSWERS = 5
"""Of one number of stages, the best that it says fit."""
SEARCHED_SHARE = 0.5
"""Of the time limit."""
KEPT, REMADE = "none", "full"

Score = tuple[float, float]
"""Bytes over what a device may hold, and seconds of a step: less is better, in this order."""


@dataclass(frozen=True)
class Config:
    """A configuration.

    Attributes:
        pp, dp, tp, samples: degrees, and samples of a microbatch on a rank.
        bounds: of the stages.
        remade: per layer, whether it recomputes.
    """

    pp: int
    dp: int
    tp: int
    samples: int
    bounds: Bounds
    remade: tuple[bool, ...]


@dataclass
class Search:
    """A search for one number of stages.

    Attributes:
        task: what is planned.
        seen: configurations and their scores; begun from: those it went on from.
    """

    task: Task
    seen: dict[Config, Score] = field(default_factory=dict)
    begun: set[Config] = field(default_factory=set)

    @cached_property
    def legal(self) -> frozenset[tuple[int, int, int]]:
        """Degrees that there may be."""
        return frozenset(grids(self.task))

    def count(self, config: Config) -> int | None:
        """Microbatches; None where the batch does not divide so."""
        return dict(counts(self.task, config.dp)).get(config.samples)

    def profile(self, config: Config) -> LayerProfile | None:
        """Of its tensor degree and samples."""
        return None if self.count(config) is None else self.task.profiles.of(config.tp, config.samples)

    def stages(self, config: Config) -> list[tuple[float, float, float]]:
        """Per stage: seconds of a microbatch, of its all-reduce, and bytes."""
        profile, count = self.profile(config), self.count(config)
        assert profile is not None and count is not None
        found, kept = [], profile.kept_bytes()
        again_s, less = profile.again_s[REMADE], profile.remade_bytes[REMADE]
        for at, (first, stop) in enumerate(config.bounds):
            layers, flying = range(first, stop), min(config.pp - at, count)
            seconds = sum(profile.seconds[i] + config.remade[i] * again_s[i] for i in layers)
            saved = sum(less[i] if config.remade[i] else profile.saved_bytes[i] for i in layers)
            whole = max((profile.saved_bytes[i] for i in layers if config.remade[i]), default=0)
            reduce_s = self.task.links.all_reduce_s(sum(profile.grad_bytes[first:stop]), config.dp, config.tp)
            held = sum(kept[first:stop]) + flying * saved + whole + profile.workspace_bytes
            found.append((seconds, reduce_s, float(held)))
        return found

    def score(self, config: Config) -> Score:
        """Of a configuration; infinite where there is no such one."""
        if config not in self.seen:
            count, profile = self.count(config), self.profile(config)
            if (config.pp, config.dp, config.tp) not in self.legal or count is None or profile is None:
                self.seen[config] = math.inf, math.inf
            else:
                stages = self.stages(config)
                over = max(0.0, max(held for *_, held in stages) - self.task.budget)
                seconds = [each for each, *_ in stages]
                step_s = sum(seconds) + (count - 1) * max(seconds) + max(reduce_s for _, reduce_s, _ in stages)
                self.seen[config] = over, step_s
        return self.seen[config]

    def improved(self, config: Config) -> Config | None:
        """A better configuration up to `HOPS` primitives away; None where none was found."""
        self.begun.add(config)
        return self._hop(config, self.score(config), HOPS)

    def _hop(self, config: Config, than: Score, hops: int) -> Config | None:
        led = []
        for tried in self.relieved(config):
            if tried in self.seen:
                continue
            score = self.score(tried)
            if score < than:
                return tried
            if not math.isinf(score[0]):
                led.append((score, tried))
        for _, tried in sorted(led, key=lambda each: each[0])[:2] if hops > 1 else ():
            found = self._hop(tried, than, hops - 1)
            if found is not None:
                return found
        return None

    def relieved(self, config: Config) -> Iterator[Config]:
        """What primitives make of a configuration to relieve its bottleneck."""
        stages = self.stages(config)
        held = max(range(config.pp), key=lambda at: stages[at][2])
        slow = max(range(config.pp), key=lambda at: stages[at][0])
        if stages[held][2] > self.task.budget:
            yield from self._recomputing(config, held, True)
            yield from _giving(config, held)
            yield from _microbatches(config, self.task.samples, -1)
            yield from _tensor(config, True)
        elif stages[slow][1] > stages[slow][0] * (self.count(config) or 1):
            yield from (*_tensor(config, False), *_tensor(config, True), *_microbatches(config, self.task.samples, 1))
            yield from _giving(config, slow)
        else:
            yield from _giving(config, slow)
            yield from self._recomputing(config, slow, False)
            yield from _microbatches(config, self.task.samples, 1)
            yield from (*_tensor(config, False), *_tensor(config, True))

    def _recomputing(self, config: Config, stage: int, more: bool) -> Iterator[Config]:
        """One layer of a stage recomputed or not any more, that which saves most or costs most; then as many as fit."""
        profile = self.profile(config)
        assert profile is not None
        able = [i for i in range(*config.bounds[stage]) if config.remade[i] is not more and profile.again_s[REMADE][i]]
        for number in dict.fromkeys((1, len(able) // 2, len(able))):
            if 0 < number <= len(able):
                changed = sorted(able, key=lambda i: -profile.saved_bytes[i])[:number]
                yield replace(config, remade=tuple((i in changed) ^ old for i, old in enumerate(config.remade)))


def _giving(config: Config, stage: int) -> Iterator[Config]:
    """Layers of a stage given to a neighbour, or passed on by it to the next ones."""
    ends = [stop for _, stop in config.bounds]
    for target in (at for at in range(config.pp) if at != stage):
        moved = list(ends)
        step = -1 if target > stage else 1
        for boundary in range(stage, target) if target > stage else range(target, stage):
            moved[boundary] += step
        if all(a < b for a, b in itertools.pairwise((0, *moved))):
            yield replace(config, bounds=tuple(itertools.pairwise((0, *moved))))


def _microbatches(config: Config, of: Sequence[int], by: int) -> Iterator[Config]:
    at = of.index(config.samples) + by
    if 0 <= at < len(of):
        yield replace(config, samples=of[at])


def _tensor(config: Config, more: bool) -> Iterator[Config]:
    """Tensor parallelism for data parallelism, or the other way; a rank's samples stay as many as they can."""
    if more and config.dp % 2 == 0:
        yield replace(config, dp=config.dp // 2, tp=config.tp * 2)
    elif not more and config.tp % 2 == 0:
        yield replace(config, dp=config.dp * 2, tp=config.tp // 2)


def aceso(task: Task) -> Iterator[Answer]:
    """The best configurations that it says fit, of every number of stages, the shortest step first."""
    found: list[tuple[Score, Config]] = []
    starts = sorted({pp for pp, _, _ in grids(task)})
    for number, pp in enumerate(starts):
        late = task.deadline.limit_s * SEARCHED_SHARE * (number + 1) / len(starts)
        found += of_stages(task, pp, late)
    for _, config in sorted(found, key=lambda each: each[0]):
        count = dict(counts(task, config.dp))[config.samples]
        pins = pinned(task, config.pp, config.dp, config.tp, count)
        remade = tuple(REMADE if each else KEPT for each in config.remade)
        yield Answer(replaced(pins, stages=config.bounds if config.pp > 1 else None), remade)


def of_stages(task: Task, pp: int, late_s: float) -> list[tuple[Score, Config]]:
    """What a search with so many stages found to fit, until a time of the task's.

    Args:
        task: what is planned.
        pp: stages.
        late_s: of the task's clock.
    """
    search, dp = Search(task), task.num_devices // pp
    profile = task.profiles.of(1, 1)
    bounds = None if profile is None else cut_chain(profile.seconds, pp)
    if profile is None or bounds is None:
        return []
    config = Config(pp, dp, 1, 1, bounds, (False,) * profile.num_layers)
    if math.isinf(search.score(config)[0]):  # the batch is smaller than the devices
        tensor = [replace(config, dp=dp // tp, tp=tp) for tp in (2, 4, 8) if dp % tp == 0]
        able = [each for each in tensor if not math.isinf(search.score(each)[0])]
        if not able:
            return []
        config = able[0]
    for _ in range(BEGUN):
        if task.deadline.passed_s > late_s:
            break
        better = search.improved(config)
        left = [each for each, score in search.seen.items() if each not in search.begun and not math.isinf(score[0])]
        if better is None and not left:
            break
        config = better if better is not None else min(left, key=search.score)
    fits = [(score, config) for config, score in search.seen.items() if score[0] == 0]
    return sorted(fits, key=lambda each: each[0])[:ANSWERS]
