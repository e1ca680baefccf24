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
from dataclasses import dataclass
from functools import cached_property

import msgspec

from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.simulate import RankTrace
from paraplan.ir.execution.schedule import ActionKind
from paraplan.ir.plan import Plan
from paraplan.lowering import lower
from paraplan.planner.pipeline.stage_cuts import ChainMemory, chain_memory
from paraplan.planner.pipeline.stage_sharding import Sharding
from paraplan.planner.recompute.kind_options import RematOption
from paraplan.rules.time_axis import program_micro

FEW = 3
"""Microbatches simulated: the middle one is as all others are."""


@dataclass(frozen=True)
class StagePrices:
    """Prices of a sharding.

    Attributes:
        sharding: on one position's devices.
        forward_s, backward_s: per segment, of one microbatch.
        end_s: of a step, after the last microbatch: reductions and updates.
        workspace_bytes: the most that any call holds for a moment.
    """

    sharding: Sharding
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    end_s: float
    workspace_bytes: int

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
        plan = self.sharding.whole
        mesh = msgspec.structs.replace(plan.stages[0].mesh, shape=mesh_shape)
        stage = msgspec.structs.replace(plan.stages[0], mesh=mesh)
        saved = [options[0].saved_bytes for options in self.sharding.options]
        return chain_memory(msgspec.structs.replace(plan, stages=(stage,)), saved)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the mesh that was priced."""
        return self.sharding.decisions.mesh.shape

    def kept_bytes(self, mesh_shape: tuple[int, ...]) -> int:
        """What the whole model keeps on one rank of a mesh of this shape."""
        return self.memory(mesh_shape).kept_bytes(0, len(self.sharding.job.program.segments))


def stage_prices(sharding: Sharding) -> StagePrices:
    """Prices of a sharding, by a simulated step of few microbatches."""
    plan = few_microbatches(sharding.whole)
    (trace, *_) = simulate_plan(plan, lower(plan)).traces
    shown = _middle(plan, trace)
    seconds = {phase: [0.0] * len(plan.program.segments) for phase in (ActionKind.F, ActionKind.B)}
    last_s = 0.0
    for span in trace.spans:
        if span.segment < 0 or span.stream != "compute":
            continue
        kind = ActionKind(span.phase)
        if kind in seconds and span.microbatch in (shown, -1):
            seconds[kind][span.segment] += span.end_s - span.start_s
        if kind in seconds:
            last_s = max(last_s, span.end_s)
    held = [point.live_bytes for point in trace.memory]
    above = [
        point.peak_bytes - max(before, point.live_bytes) for before, point in zip(held, trace.memory[1:], strict=False)
    ]
    return StagePrices(
        sharding,
        tuple(seconds[ActionKind.F]),
        tuple(seconds[ActionKind.B]),
        max(trace.step_s - last_s, 0.0),
        max(above, default=0),
    )


def _middle(plan: Plan, trace: RankTrace) -> int:
    """A microbatch that is neither the first nor the last of those simulated, where there is one."""
    seen = sorted({span.microbatch for span in trace.spans if span.microbatch >= 0})
    return seen[len(seen) // 2] if seen else 0


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
