"""What the segments of a model cost on one position's devices, whatever pipeline they become part of.

A sharding is chosen on a mesh (`stage_sharding`), and a step of few of its microbatches and few of its alike layers
(`shorten`) is lowered and simulated on one stage: what a middle microbatch's forward and backward take, waits and
accumulation included, shared out over segments as they compute, and what is left of the step at its end (reductions,
updates). The rest is read off: what each segment saves under each way to recompute, and what its parameters keep.
Prices depend on the inner axes and on the samples of a microbatch, not on how many microbatches or positions there are;
widths of the data-parallel axis share one price but for what it keeps of states and gradients, which is read off the
layouts anew.

Limits: waits are those of a stage without neighbours; what a step does once is the whole model's, shared out by time.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import msgspec

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.machine.mesh import Layout
from paraplan.ir.plan import Plan
from paraplan.lowering.blocks.forward import chosen_strategies
from paraplan.planner.assemble import Decisions, Job, assemble
from paraplan.planner.passes.overlap_products import boundary_layouts
from paraplan.planner.pipeline.cuts.stage_cuts import ChainMemory, chain_memory, cut_evenly
from paraplan.planner.pipeline.prices.shorten import KEPT, runs_of, shortened
from paraplan.planner.pipeline.prices.stage_timing import cut_plan, few_microbatches, split_plan, timed
from paraplan.planner.pipeline.prices.stage_totals import KeptBytes, Totals
from paraplan.planner.recompute.kind_options import RematOption
from paraplan.planner.recompute.stage_recompute import held_options
from paraplan.planner.sharding.pins import divides_samples
from paraplan.rules.time_axis import program_micro, smallest_divisor

SHARES = 16
"""Shares of microbatches between the halves of a backward that are told apart."""


@dataclass(frozen=True)
class Sharding:
    """A sharding of the whole model on one stage's devices, and what follows from it.

    Attributes:
        job: on these devices.
        decisions: the sharding.
        known: its options, where they were found before.
    """

    job: Job
    decisions: Decisions
    known: tuple[tuple[RematOption, ...], ...] = ()

    @cached_property
    def whole(self) -> Plan:
        """The plan of one stage."""
        return assemble(self.job, self.decisions)

    @cached_property
    def prices(self) -> StagePrices:
        """What its segments take."""
        return stage_prices(self)

    @cached_property
    def boundary(self) -> dict[str, Layout]:
        """Layouts, on the extended mesh, that values between segments are made in."""
        return boundary_layouts(self.whole, program_micro(self.job.program, self.whole.num_microbatches).segments)

    @cached_property
    def divides_samples(self) -> bool:
        """Whether all that carries samples is divided along the first axis: what a sample takes is then the same on an
        axis of any width."""
        program, (stage,) = self.job.program, self.whole.stages
        batch_axis = program_micro(program, smallest_divisor(program.batch_size), in_space=True)
        micro = program_micro(program, self.whole.num_microbatches)
        first = {segment.kind: at for at, segment in reversed(list(enumerate(program.segments)))}
        return all(
            divides_samples(strategy, along, axis=1)
            for kind, at in first.items()
            for strategy, along in zip(
                chosen_strategies(
                    program.kinds[kind],
                    stage.choices[stage.segment_choice[at]],
                    micro.segments[at],
                    stage.mesh.shape,
                    self.whole.num_shares,
                ),
                batch_axis.segments[at].choices,
                strict=True,
            )
        )

    @cached_property
    def options(self) -> tuple[tuple[RematOption, ...], ...]:
        """Per kind, what an instance may recompute."""
        return self.known or held_options(self.whole)


class StageSeconds(NamedTuple):
    """Of a stage's computations of a microbatch: forward, backward, and the halves of a backward that is split."""

    forward_s: float
    backward_s: float
    input_grad_s: float
    weight_grad_s: float


@dataclass(frozen=True)
class StagePrices:
    """Prices of a sharding.

    Attributes:
        sharding: on one position's devices.
        forward_s, backward_s: per segment, of one microbatch.
        reduce_s: what the busiest link takes for the reductions of a step's gradients.
        update_s: what a step computes once: updates, copies around collectives of its begin and end.
        gather_s: what the busiest link takes for the gathers that a step begins with.
        call_bytes: per segment, the most that any of its calls holds for a moment.
        other_bytes: the most that any other call does, while no microbatch is held: as a step begins and ends.
        cut_forward_s, cut_backward_s: what a microbatch takes more for each stage that the chain is cut into: gathers
            and reductions under way do not cross from one to the next.
    """

    sharding: Sharding
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    reduce_s: float
    update_s: float
    gather_s: float
    call_bytes: tuple[int, ...]
    other_bytes: int
    cut_forward_s: float
    cut_backward_s: float
    _memories: dict[tuple[int, ...], ChainMemory] = field(default_factory=dict)
    _longest: dict[int, float] = field(default_factory=dict)
    _kept: dict[tuple[int, ...], KeptBytes] = field(default_factory=dict)
    _choices: dict[float, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    @property
    def numbers(self) -> tuple[tuple[float, ...] | float, ...]:
        """All but the sharding, in the order of fields."""
        return (
            *(self.forward_s, self.backward_s, self.reduce_s, self.update_s, self.gather_s),
            *(self.call_bytes, self.other_bytes, self.cut_forward_s, self.cut_backward_s),
        )

    def workspace_bytes(self, *bounds: tuple[int, int]) -> int:
        """The most that any call holds for a moment, on a position that has some runs of segments."""
        return max((n for first, stop in bounds for n in self.call_bytes[first:stop]), default=0)

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """Per segment, of one microbatch."""
        return tuple(a + b for a, b in zip(self.forward_s, self.backward_s, strict=True))

    @cached_property
    def halves_s(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Per segment, of one microbatch, the halves of a backward that is split: communication for the first has no
        gradients of parameters to go on beside. Half of the backward each where it cannot be."""
        short = shortened(self.sharding.whole, runs_of(self.sharding.whole))
        try:
            found = timed(split_plan(short.plan))
        except InvalidPlanError:
            half = tuple(each / 2 for each in self.backward_s)
            return half, half
        inputs, weights = (tuple(each[index] for index in short.stands_for) for each in found.halves_s)
        return inputs, weights

    def stage_seconds(self, bound: tuple[int, int], splits: bool) -> StageSeconds:
        """What a stage takes.

        Args:
            bound: its segments [first, stop).
            splits: whether some of its backwards are split; else their halves are taken to be equal.
        """
        own = slice(*bound)
        backward_s = sum(self.backward_s[own])
        input_s, weight_s = (sum(each[own]) for each in self.halves_s) if splits else (backward_s / 2,) * 2
        cut_s = self.cut_backward_s
        return StageSeconds(
            sum(self.forward_s[own]) + self.cut_forward_s, backward_s + cut_s, input_s + cut_s, weight_s
        )

    @cached_property
    def options(self) -> tuple[tuple[RematOption, ...], ...]:
        """Per segment, what it may recompute, most bytes saved first."""
        return tuple(self.sharding.options[segment.kind] for segment in self.sharding.job.program.segments)

    @cached_property
    def saved_bytes(self) -> int:
        """What a microbatch in flight saves in the whole model, nothing recomputed."""
        return sum(options[0].saved_bytes for options in self.options)

    @cached_property
    def dearest(self) -> float:
        """The highest price of a byte saved at which a kind's choice changes."""
        return max(map(_prices_between, self.sharding.options, itertools.repeat(0.0)), default=(0.0,))[-1]

    def choices(self, between: float = 0.0) -> tuple[tuple[int, ...], ...]:
        """Per kind, the option that takes least at a price per byte, at every price at which one changes, least first.

        Args:
            between: of the microbatches that are held, the share whose backward is between its halves.
        """
        share = round(SHARES * between) / SHARES
        if share not in self._choices:
            options = self.sharding.options
            prices = {0.0}.union(*(_prices_between(each, share) for each in options))
            last = max(prices) * 2 + 1e-18
            self._choices[share] = tuple(
                tuple(_best(each, price, share) for each in options) for price in sorted(prices | {last})
            )
        return self._choices[share]

    @cached_property
    def recomputing(self) -> tuple[tuple[int, float], ...]:
        """(bytes a microbatch saves, seconds made again) in the whole model at every such price, most bytes first."""
        counts = Counter(segment.kind for segment in self.sharding.job.program.segments)
        found = []
        for choice in self.choices():
            chosen = [(n, self.sharding.options[kind][choice[kind]]) for kind, n in counts.items()]
            found.append((sum(n * o.saved_bytes for n, o in chosen), sum(n * o.extra_s for n, o in chosen)))
        return tuple(found)

    @cached_property
    def totals(self) -> Totals:
        """What the whole model comes to."""
        program = self.sharding.job.program
        kind = program.kinds[program.segments[max(len(program.segments) // 2 - 1, 0)].kind]
        return Totals(
            shape=self.shape,
            keeps=self.keeps,
            num_segments=len(program.segments),
            hop_bytes=sum(kind.graph.values[name].nbytes for name in kind.outputs),
            seconds=sum(self.seconds),
            longest=self.longest_share,
            cut_s=self.cut_forward_s + self.cut_backward_s,
            once_s=self.gather_s + self.reduce_s,
            reduce_s=self.reduce_s,
            update_s=self.update_s,
            saved_bytes=self.saved_bytes,
            workspace_bytes=self.workspace_bytes((0, len(program.segments))),
            recomputing=self.recomputing,
        )

    def longest_share(self, num_stages: int) -> float:
        """Of the model's seconds, those of the longest of so many stages, in the cut where that takes least; infinite
        where there are fewer segments."""
        if num_stages not in self._longest:
            cut = cut_evenly(self.seconds, num_stages, len(self.seconds))
            longest_s = math.inf if cut is None else max(sum(self.seconds[first:stop]) for first, stop in cut)
            self._longest[num_stages] = longest_s / (sum(self.seconds) or 1.0)
        return self._longest[num_stages]

    def memory(self, mesh_shape: tuple[int, ...]) -> ChainMemory:
        """What runs of segments keep on a mesh of this shape.

        Args:
            mesh_shape: of as many axes as the sharding's own.
        """
        if mesh_shape in self._memories:
            return self._memories[mesh_shape]
        plan = self.sharding.whole
        mesh = msgspec.structs.replace(plan.stages[0].mesh, shape=mesh_shape)
        stage = msgspec.structs.replace(plan.stages[0], mesh=mesh)
        saved = [options[0].saved_bytes for options in self.sharding.options]
        found = self._memories[mesh_shape] = chain_memory(msgspec.structs.replace(plan, stages=(stage,)), saved)
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the mesh that was priced."""
        return self.sharding.decisions.mesh.shape

    def kept_bytes(self, mesh_shape: tuple[int, ...]) -> int:
        """What the whole model keeps on one rank of a mesh of this shape."""
        return self.keeps(mesh_shape).all_bytes

    def keeps(self, mesh_shape: tuple[int, ...]) -> KeptBytes:
        """As `kept_bytes`, with what gradients are of it."""
        if mesh_shape not in self._kept:
            memory, stop = self.memory(mesh_shape), len(self.sharding.job.program.segments)
            self._kept[mesh_shape] = KeptBytes(memory.kept_bytes(0, stop), memory.gradient_bytes(0, stop))
        return self._kept[mesh_shape]


def _held(option: RematOption, between: float) -> float:
    """Bytes of a microbatch, a share of which is between the halves of its backward."""
    return (1 - between) * option.saved_bytes + between * option.deferred_bytes


def _prices_between(options: Sequence[RematOption], between: float) -> tuple[float, ...]:
    """Prices per byte at which the choice of an option changes, least first: slopes of the lower hull."""
    hull: list[tuple[float, float]] = []
    for held, extra_s in sorted((_held(option, between), option.extra_s) for option in options):
        if hull and extra_s >= hull[-1][1]:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], (held, extra_s)):
            hull.pop()
        hull.append((held, extra_s))
    return tuple(sorted(_slope(*each) * (1 + 1e-9) for each in itertools.pairwise(hull))) or (0.0,)


def _slope(lean: tuple[float, float], quick: tuple[float, float]) -> float:
    """Seconds made again for every byte less, from the leaner to the quicker."""
    return (lean[1] - quick[1]) / (quick[0] - lean[0])


def _best(options: Sequence[RematOption], price: float, between: float) -> int:
    """The number of the option that takes least at a price per byte."""
    found = ((each.extra_s + price * (held := _held(each, between)), held) for each in options)
    return min(enumerate(found), key=lambda each: each[1])[0]


def stage_prices(sharding: Sharding) -> StagePrices:
    """Prices of a sharding, by simulated steps of few microbatches and layers, whole and cut."""
    runs = runs_of(sharding.whole)
    short = shortened(sharding.whole, runs)
    found = timed(few_microbatches(short.plan))
    once_s: tuple[float, ...] = found.once_s
    for run in runs:
        longer = timed(few_microbatches(shortened(sharding.whole, runs, run).plan))
        each = zip(once_s, longer.once_s, found.once_s, strict=True)
        once_s = tuple(s + (run.repeats - KEPT) * max(more - less, 0.0) for s, more, less in each)
    reduce_s, update_s, gather_s = once_s
    segments = len(short.plan.program.segments)
    count, more_f, more_b = (segments + 1) // 2, 0.0, 0.0
    if few_microbatches(short.plan) is not short.plan and count > 1:
        cut = timed(cut_plan(short.plan, count))
        more_f = max(sum(cut.forward_s) - sum(found.forward_s), 0.0) / (count - 1)
        more_b = max(sum(cut.backward_s) - sum(found.backward_s), 0.0) / (count - 1)
    return StagePrices(
        sharding,
        tuple(found.forward_s[index] for index in short.stands_for),
        tuple(found.backward_s[index] for index in short.stands_for),
        reduce_s,
        update_s,
        gather_s,
        tuple(found.call_bytes.get(index, 0) for index in short.stands_for),
        found.call_bytes.get(-1, 0),
        more_f,
        more_b,
    )
