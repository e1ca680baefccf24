"""What a model's layers take on one group of devices: the profile that planners of the literature measure first.

A layer is an element of a list of modules (`ir.model.layers`), or a segment that is in none. On a group of devices
under given degrees a sharding is chosen and a few microbatches are simulated (`pipeline.stage_prices`): seconds of
forward and backward, what is kept of parameters, gradients and states, what a microbatch saves under each way to
recompute, what is handed on. A model whose last segments run once on the whole batch has these as one layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import msgspec

from paraplan.cost_models.communication.collectives import (
    AxisLink,
    axis_link,
    p2p_s,
    reduce_scatter_s,
    ring_all_reduce_s,
)
from paraplan.ir.errors import ConstraintError, NoPlanError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.mesh import local_shape, make_mesh, parse_layout
from paraplan.ir.model.joined_segments import join
from paraplan.ir.model.layers import layers_of
from paraplan.ir.model.program import master_dtype, trained_params
from paraplan.ir.model.tensor import TensorSpec
from paraplan.planner.assemble import Decisions, Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import check_constraints
from paraplan.planner.deadline import Deadline, SolveLimits
from paraplan.planner.pipeline.cuts.stage_cuts import Bounds
from paraplan.planner.pipeline.first_devices import first_devices
from paraplan.planner.pipeline.meshes import candidate_meshes
from paraplan.planner.pipeline.prices.stage_prices import Sharding
from paraplan.planner.recompute.stage_recompute import options_of
from paraplan.planner.sharding.solve import choose
from paraplan.rules.time_axis import program_micro, splittable

_Number = TypeVar("_Number", int, float)

GAP = 1e-2
"""Of the work of a sharding that is priced, what it may be above the least."""
SOLVED_SHARE = 0.1
"""Of the time left, for the choice of one sharding."""


@dataclass(frozen=True)
class LayerProfile:
    """Layers on one group of devices.

    Attributes:
        size: devices of the group.
        samples: of a microbatch on the group.
        count: microbatches of a step, were all its samples to go through one such group.
        forward_s, backward_s: per layer, of a microbatch.
        stored_bytes, grad_bytes, state_bytes: per layer, what a rank keeps.
        saved_bytes: per layer, what a microbatch in flight holds on a rank if all is kept, its output included.
        again_s: by preset, per layer, seconds of making again what is not kept.
        remade_bytes: by preset, per layer, what is held instead of `saved_bytes`.
        output_bytes: per layer, what a rank hands on of a microbatch.
        workspace_bytes: the most that any call holds for a moment.
        reduce_s: what the group itself takes to reduce all gradients once a step.
    """

    size: int
    samples: float
    count: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    stored_bytes: tuple[int, ...]
    grad_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    again_s: dict[str, tuple[float, ...]]
    remade_bytes: dict[str, tuple[int, ...]]
    output_bytes: tuple[int, ...]
    workspace_bytes: int
    reduce_s: float

    @property
    def num_layers(self) -> int:
        """How many."""
        return len(self.forward_s)

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """Per layer, of a microbatch."""
        return tuple(a + b for a, b in zip(self.forward_s, self.backward_s, strict=True))

    def seconds_with(self, preset: str) -> tuple[float, ...]:
        """Per layer, of a microbatch, with what a preset makes again."""
        return tuple(a + b for a, b in zip(self.seconds, self.again_s[preset], strict=True))

    def kept_bytes(self, zero: int = 0, dp: int = 1) -> tuple[int, ...]:
        """Per layer, what a rank keeps of parameters, gradients and states, sharded over data-parallel ranks."""
        parts = (self.state_bytes, self.grad_bytes, self.stored_bytes)
        shares = tuple(dp if level < zero else 1 for level in range(3))
        layers = zip(*parts, strict=True)
        return tuple(sum(math.ceil(n / d) for n, d in zip(each, shares, strict=True)) for each in layers)

    def stage_bytes(
        self, bound: tuple[int, int], in_flight: int, preset: str = "none", zero: int = 0, dp: int = 1
    ) -> int:
        """What a stage of some layers holds when it is fullest.

        Args:
            bound: its layers, [first, stop).
            in_flight: microbatches that it holds at once.
            preset: of recomputation.
            zero: ZeRO's stage.
            dp: data-parallel ranks.
        """
        layers = slice(*bound)
        held = sum(self.remade_bytes[preset][layers]) * in_flight + self.workspace_bytes
        if preset != "none":  # one layer's activations are whole while it is made again
            held += max(self.saved_bytes[layers], default=0)
        return held + sum(self.kept_bytes(zero, dp)[layers])


@dataclass
class Profiles:
    """Profiles as they are asked for.

    Attributes:
        job, constraints, budget: what is planned, what is pinned of any plan, bytes a device may hold.
        deadline, progress: of the planner.
    """

    job: Job
    constraints: Constraints
    budget: int
    deadline: Deadline
    progress: Callable[[str], None]
    _found: dict[bytes, LayerProfile | None] = field(default_factory=dict)
    _groups: dict[int, tuple[Job, Decisions]] = field(default_factory=dict)

    @cached_property
    def layered(self) -> tuple[Job, tuple[int, ...]]:
        """The job with every layer as one segment, and per segment of the job its layer."""
        program, place = join(self.job.program, layers_of(self.job.program))
        return replace(self.job, program=program), place

    @cached_property
    def repeated(self) -> tuple[bool, ...]:
        """Per layer, whether others are equal to it."""
        kinds = [segment.kind for segment in self.layered[0].program.segments]
        return tuple(kinds.count(kind) > 1 for kind in kinds)

    def in_segments(self, bounds: Bounds) -> Bounds:
        """Stages of layers as stages of the job's own segments."""
        place = self.layered[1]
        starts = [place.index(first) for first, _ in bounds]
        return tuple(zip(starts, [*starts[1:], len(place)], strict=True))

    def of(self, tp: int, samples: int) -> LayerProfile | None:
        """Layers on one tensor-parallel group that runs some samples at a time; None where it cannot."""
        n, batch = self.job.cluster.num_devices, self.job.program.batch_size
        if n % tp or batch % samples or not splittable(self.job.program, batch // samples):
            return None
        return self.on(Constraints(pp=n // tp, dp=1, tp=tp, sp=tp > 1, zero=0, microbatches=batch // samples))

    def on(self, pins: Constraints) -> LayerProfile | None:
        """Layers on one position's devices; None where there is no such position.

        Args:
            pins: `pp`, `microbatches`, and the degrees or mesh of a position.
        """
        key = msgspec.json.encode(pins)
        if key not in self._found:
            try:
                self._found[key] = self._profiled(pins)
            except (ConstraintError, NoPlanError):
                self._found[key] = None
        return self._found[key]

    def decisions(self, pins: Constraints) -> tuple[Job, Decisions]:
        """The sharding of least work on one position's devices, every layer being one segment.

        Raises:
            ConstraintError, NoPlanError: there is none.
        """
        job, pp = self.layered[0], pins.pp or 1
        check_constraints(pins, job.cluster.num_devices)
        if not splittable(job.program, pins.microbatches or 1):
            raise ConstraintError(f"the batch does not divide into {pins.microbatches} microbatches")
        part = replace(job, cluster=first_devices(job.cluster, pp))
        inner = msgspec.structs.replace(
            self.constraints, dp=pins.dp, tp=pins.tp, sp=pins.sp, zero=pins.zero, mesh=pins.mesh,
            microbatches=pins.microbatches, params=pins.params or self.constraints.params,
            place_states=pins.place_states or self.constraints.place_states or "device",
            update_on=pins.update_on or self.constraints.update_on,
            pp=None, schedule=None, stages=None, memory_bytes=None, reserve_bytes=0, recompute="none",
        )  # fmt: skip
        limits = SolveLimits(
            time_s=self.deadline.share_s(SOLVED_SHARE), memory_bytes=self.budget, relative_gap=GAP, certify=False
        )
        mesh = candidate_meshes(part, inner)[0]
        return part, choose(part, mesh, pins.microbatches or 1, inner, limits)

    def _chosen(self, pins: Constraints) -> tuple[Job, Decisions]:
        """As `decisions`; on one tensor-parallel group, whose sharding is the same whatever it runs at a time, chosen
        once."""
        if pins.dp != 1:
            return self.decisions(pins)
        key = pins.tp or 1
        if key not in self._groups:
            self._groups[key] = self.decisions(pins)
        part, decisions = self._groups[key]
        return part, replace(decisions, num_microbatches=pins.microbatches or 1)

    def _profiled(self, pins: Constraints) -> LayerProfile:
        self.progress(f"profile of layers: pp={pins.pp} tp={pins.tp} mesh={pins.mesh} microbatches={pins.microbatches}")
        part, decisions = self._chosen(pins)
        sharding = Sharding(part, decisions)
        program, count = part.program, pins.microbatches or 1
        prices, plan, size = sharding.prices, sharding.whole, decisions.mesh.size
        tail = program_micro(program, count).tail
        kinds = [segment.kind for segment in program.segments]
        outputs = [
            sum(kind.graph.values[name].nbytes for name in kind.outputs) // (count * size) for kind in program.kinds
        ]
        again_s, remade = {}, {}
        for preset in ("none", "selective", "full"):
            options = options_of(plan, preset)
            again_s[preset] = [options[kind][0].extra_s for kind in kinds]
            remade[preset] = [options[kind][0].saved_bytes + outputs[kind] for kind in kinds]
        held = _held(part, decisions)
        return LayerProfile(
            size=size,
            samples=program.batch_size / count,
            count=count,
            forward_s=_joined(prices.forward_s, tail),
            backward_s=_joined(prices.backward_s, tail),
            stored_bytes=_joined(held[0], tail),
            grad_bytes=_joined(held[1], tail),
            state_bytes=_joined(held[2], tail),
            saved_bytes=_joined(remade["none"], tail),
            again_s={name: _joined(each, tail) for name, each in again_s.items()},
            remade_bytes={name: _joined(each, tail) for name, each in remade.items()},
            output_bytes=tuple(outputs[kind] for kind in kinds)[: min(tail + 1, len(kinds))],
            workspace_bytes=max(prices.other_bytes, prices.workspace_bytes((0, len(kinds)))),
            reduce_s=prices.reduce_s,
        )


def _joined(each: Sequence[_Number], tail: int) -> tuple[_Number, ...]:
    """Per layer, those from `tail` on as one."""
    found = list(each[: tail + 1])
    for more in each[tail + 1 :]:
        found[-1] = found[-1] + more
    return tuple(found)


def _held(job: Job, decisions: Decisions) -> tuple[list[int], list[int], list[int]]:
    """Per segment, what a rank keeps: stored parameters, gradients, states with their own copies."""
    plan = Sharding(job, decisions).whole
    program, stage = plan.program, plan.stages[0]
    trained, parts = set(trained_params(program)), ([], [], [])  # type: tuple[set[str], tuple[list[int], ...]]
    for segment in program.segments:
        sums = [0, 0, 0]
        for name in segment.params:
            spec, layouts = program.params[name].spec, stage.params[name]

            def local(dtype: str, layout: str, shape: tuple[int, ...] = spec.shape) -> int:
                return TensorSpec(dtype, local_shape(shape, parse_layout(layout), stage.mesh.shape)).nbytes

            sums[0] += local(spec.dtype, layouts.stored)
            if name in trained:
                dtype = master_dtype(program.precision, spec.dtype)
                sums[1] += local(dtype, layouts.grad)
                sums[2] += (plan.optimizer.kept_slots + (dtype != spec.dtype)) * local(dtype, layouts.state)
        for part, total in zip(parts, sums, strict=True):
            part.append(total)
    return parts  # type: ignore[return-value]


class GroupLinks:
    """What messages take between groups of devices that lie one after another.

    Args:
        cluster: all devices.
    """

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = cluster

    def all_reduce_s(self, nbytes: float, dp: int, tp: int = 1) -> float:
        """A sum over the data-parallel ranks of one position of (dp, tp) devices, in a ring.

        Args:
            nbytes: of every rank.
            dp, tp: devices of the position.
        """
        return ring_all_reduce_s(round(nbytes), self._axis(dp, tp)) if dp > 1 else 0.0

    def reduce_scatter_s(self, nbytes: float, dp: int, tp: int = 1) -> float:
        """Likewise, of which every rank has its share; a gather of as many bytes in all takes as long.

        Args:
            nbytes: of every rank, before.
            dp, tp: devices of the position.
        """
        return reduce_scatter_s(round(nbytes), self._axis(dp, tp)) if dp > 1 else 0.0

    def bytes_per_s(self, dp: int, tp: int = 1) -> float:
        """What a ring through the data-parallel ranks carries."""
        return self._axis(dp, tp).ring_bytes_per_s if dp > 1 else self.message_bytes_per_s(tp)

    def message_bytes_per_s(self, size: int) -> float:
        """What a rank sends to its neighbour in the next position of so many devices."""
        return (1 << 30) / max(self.message_s(1 << 30, size) - self.message_s(0, size), 1e-12)

    def message_s(self, nbytes: float, size: int) -> float:
        """One message from a rank to its neighbour in the next position; 0 where there is no other."""
        if size >= self.cluster.num_devices:
            return 0.0
        pair, backend = (0, size), self.cluster.group_of(0).device.backend
        level = self.cluster.span(pair)
        link = self.cluster.link(level, 0) if level == "in_node" else self.cluster.network(pair)
        return p2p_s(round(nbytes), link, backend, level)

    def _axis(self, dp: int, tp: int) -> AxisLink:
        return axis_link(self.cluster, make_mesh((dp, tp), ("dp", "tp")), 0)
