"""What the segments of a model cost on one position's devices, whatever pipeline they become part of.

A sharding is chosen on a mesh (`stage_sharding`), and a step of few of its microbatches is lowered and simulated on one
stage: what a middle microbatch's forward and backward take, segment by segment, waits and accumulation included, and
what is left of the step at its end (reductions, updates). The rest is read off: what each segment saves under each way
to recompute, and what its parameters keep. Prices depend on the inner axes and on the samples of a microbatch, not on
how many microbatches or positions there are; widths of the data-parallel axis share one price but for what it keeps of
states and gradients, which is read off the layouts anew.

Limits: waits inside a segment are those of a stage without neighbours; the end of the step is the whole model's, shared
out by time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.simulate import RankTrace
from paraplan.ir.execution.schedule import ActionKind
from paraplan.ir.plan import Plan
from paraplan.lowering import lower
from paraplan.planner.pipeline.pipeline import pipelined
from paraplan.planner.pipeline.stage_cuts import ChainMemory, chain_memory, cut_evenly
from paraplan.planner.pipeline.stage_sharding import Sharding
from paraplan.planner.recompute.kind_options import RematOption
from paraplan.planner.schedules.complete import complete
from paraplan.planner.schedules.schedule_problem import at
from paraplan.rules.time_axis import program_micro

CUT = 9
"""Stages that the chain is cut into to see what a cut takes."""
FEW = 3
"""Microbatches simulated: the middle one is as all others are."""


@dataclass(frozen=True)
class StagePrices:
    """Prices of a sharding.

    Attributes:
        sharding: on one position's devices.
        forward_s, backward_s: per segment, of one microbatch.
        end_s: of a step, beside its microbatches: reductions and updates, counts and losses.
        workspace_bytes: the most that any call holds for a moment.
        cut_forward_s, cut_backward_s: what a microbatch takes more for each stage that the chain is cut into: gathers
            and reductions under way do not cross from one to the next.
    """

    sharding: Sharding
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    end_s: float
    workspace_bytes: int
    cut_forward_s: float
    cut_backward_s: float
    _memories: dict[tuple[int, ...], ChainMemory] = field(default_factory=dict)

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """Per segment, of one microbatch."""
        return tuple(a + b for a, b in zip(self.forward_s, self.backward_s, strict=True))

    @cached_property
    def options(self) -> tuple[tuple[RematOption, ...], ...]:
        """Per segment, what it may recompute, most bytes saved first."""
        return tuple(self.sharding.options[segment.kind] for segment in self.sharding.job.program.segments)

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
        return self.memory(mesh_shape).kept_bytes(0, len(self.sharding.job.program.segments))


def stage_prices(sharding: Sharding) -> StagePrices:
    """Prices of a sharding, by simulated steps of few microbatches, whole and cut."""
    plan = few_microbatches(sharding.whole)
    trace, forward_s, backward_s = _walked(plan)
    shown = len(_microbatches(trace)) or 1
    held = [point.live_bytes for point in trace.memory]
    above = [
        point.peak_bytes - max(before, point.live_bytes) for before, point in zip(held, trace.memory[1:], strict=False)
    ]
    more = (0.0, 0.0)
    count = min(CUT, len(plan.program.segments))
    if plan is not sharding.whole and count > 1:
        _, cut_forward_s, cut_backward_s = _walked(cut_plan(sharding.whole, count))
        more_f, more_b = sum(cut_forward_s) - sum(forward_s), sum(cut_backward_s) - sum(backward_s)
        more = max(more_f, 0.0) / (count - 1), max(more_b, 0.0) / (count - 1)
    return StagePrices(
        sharding,
        tuple(forward_s),
        tuple(backward_s),
        max(trace.step_s - shown * (sum(forward_s) + sum(backward_s)), 0.0),
        max(above, default=0),
        *more,
    )


def _walked(plan: Plan) -> tuple[RankTrace, list[float], list[float]]:
    """A simulated step of one position, and what a middle microbatch's forward and backward take, per segment."""
    (trace, *_) = simulate_plan(plan, lower(plan)).traces
    shown = _middle(trace)
    forward_s, backward_s = ([0.0] * len(plan.program.segments) for _ in range(2))
    for span in trace.spans:
        if span.segment >= 0 and span.stream == "compute" and span.microbatch in (shown, -1) and span.phase in "FB":
            (forward_s if span.phase == "F" else backward_s)[span.segment] += span.end_s - span.start_s
    return trace, forward_s, backward_s


def cut_plan(whole: Plan, count: int) -> Plan:
    """A plan of one stage cut into several on the same devices, whose schedule runs the first microbatches alone."""
    bounds = cut_evenly([1.0] * len(whole.program.segments), count, len(whole.program.segments))
    assert bounds is not None
    kinds = ((ActionKind.F, range(count)), (ActionKind.B, range(count - 1, -1, -1)))
    order = [at(stage, kind, m) for m in range(FEW) for kind, stages in kinds for stage in stages]
    return pipelined(whole, whole.cluster, bounds, complete("interleaved", (tuple(order),)), [(0,)] * count)


def _middle(trace: RankTrace) -> int:
    """A microbatch that is neither the first nor the last of those simulated, where there is one."""
    seen = _microbatches(trace)
    return seen[len(seen) // 2] if seen else 0


def _microbatches(trace: RankTrace) -> list[int]:
    """Whose segments ran."""
    return sorted({span.microbatch for span in trace.spans if span.microbatch >= 0 and span.segment >= 0})


def few_microbatches(plan: Plan) -> Plan:
    """A plan of one stage whose schedule runs the first microbatches alone, each as large as it is.

    It can be lowered and simulated; it is no legal plan, as it leaves the others out.
    """
    program = plan.program
    if plan.num_microbatches <= FEW or program.buffer_updates or program_micro(program, plan.num_microbatches).has_tail:
        return plan  # what is read of all microbatches, or of the last
    kept: Callable[[str], bool] = lambda action: not action[2:].isdigit() or int(action[2:]) < FEW  # noqa: E731
    classes = tuple(tuple(filter(kept, actions)) for actions in plan.schedule.classes)
    return msgspec.structs.replace(plan, schedule=msgspec.structs.replace(plan.schedule, classes=classes))
