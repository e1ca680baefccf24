"""All blocks of a plan: each (kind, choice, context) lowered once, however many segments share it.

Stages are gone through in order for the forward and in reverse for the backward. A value that a segment reads and
another group of ranks makes arrives by a message (`mesh_transfers`), once per group; the gradient of a value goes
back, once per group, to the ranks that made it, where it is added to what readers there gave. Where stages are held
by several groups this is done for each way that microbatches take through them: what a group makes itself for some
microbatches it may receive for others.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import msgspec

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.schedule import ActionKind
from paraplan.ir.machine.mesh import Layout, R, Shard, parse_layout
from paraplan.ir.machine.rank_groups import GroupPath, Holding, holdings, routes
from paraplan.ir.machine.reshard import reshard_path
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.model.fused_updates import fusible_places
from paraplan.ir.model.program import HALVES, master_dtype
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.plan import KindChoice, Plan
from paraplan.ir.process.memo import SESSION, Lately, Same
from paraplan.lowering.blocks.backward import LoweredBackward, lower_backward
from paraplan.lowering.blocks.forward import Given, KindContext, LoweredForward, evaluate_forward, lower_forward
from paraplan.lowering.rewrites.chunks import gradients_known
from paraplan.lowering.steps.whole_batch import whole_of
from paraplan.lowering.transfers.crossings import Crossing, arrives_in_parts
from paraplan.lowering.transfers.held_casts import HeldCast
from paraplan.lowering.transfers.mesh_transfers import Message, crossing_layouts
from paraplan.rules.time_axis import ProgramMicro, dual, program_micro

_INSTRS = 50_000  # some 45 MB
_FORWARDS: Lately[LoweredForward] = SESSION.lately(
    "stage_blocks.forwards", _INSTRS, lambda made: len(made.block.instrs)
)
_BACKWARDS: Lately[LoweredBackward] = SESSION.lately(
    "stage_blocks.backwards", _INSTRS, lambda made: sum(len(part.block.instrs) for part in (made, *(made.parts or ())))
)


@dataclass
class StageBlocks:
    """Blocks of what a group of ranks runs on a route, as they are built.

    Attributes:
        forwards, backwards: per segment.
        contexts: of the segments.
        given: how every program value that is here lies.
        grads: how the gradient of every segment output lies.
        wholes, whole_grads: layouts and strides of what the tail reads, gathered, and of its gradient before it is cut.
        zeros: outputs whose readers all detach them: their gradient is zero.
    """

    forwards: dict[int, LoweredForward] = field(default_factory=dict)
    backwards: dict[int, LoweredBackward] = field(default_factory=dict)
    contexts: dict[int, KindContext] = field(default_factory=dict)
    given: dict[str, Given] = field(default_factory=dict)
    grads: dict[str, Given] = field(default_factory=dict)
    wholes: dict[str, Given] = field(default_factory=dict)
    whole_grads: dict[str, Given] = field(default_factory=dict)
    zeros: set[str] = field(default_factory=set)


@dataclass
class RouteBlocks:
    """The blocks of a route.

    Attributes:
        groups: per stage, the group that runs it.
        parts: per group of the plan.
        values: every value that crosses in the forward, in the order it is first read.
        grads: every gradient that crosses.
    """

    groups: tuple[int, ...]
    parts: tuple[StageBlocks, ...]
    values: list[Crossing] = field(default_factory=list)
    grads: list[Crossing] = field(default_factory=list)

    def at(self, stage: int) -> StageBlocks:
        """The part of the group that runs a stage."""
        return self.parts[self.groups[stage]]


class PlanBlocks:
    """The blocks of a plan, per route and group of ranks.

    Attributes:
        casts: parameters that are held casts (see `held_casts`).
        held: the groups.
        ways: the routes.
        routes: the blocks of each.
        micro: what everything does along the microbatch axis.
        tail_stage: the stage that holds the tail; -1 where there is none.
        maker, fused: value -> the stage that makes it; the places whose updates fused kernels make.
        reduce_dtype: what gradients are cast to before they are summed over ranks as they are made; "" for nothing.
    """

    def __init__(self, plan: Plan, evaluate: bool = False, casts: Mapping[str, HeldCast] | None = None) -> None:
        self.plan, self.evaluates, self.casts = plan, evaluate, casts or {}
        self.held: tuple[Holding, ...] = holdings(plan)
        self.ways: tuple[GroupPath, ...] = routes(plan, self.held)
        self.micro: ProgramMicro = program_micro(plan.program, plan.num_microbatches)
        self.tail_stage = self._stage_of_tail()
        self.maker: dict[str, int] = {}
        self.fused = fusible_places(plan.program, self.held) if plan.optimizer.fused else frozenset[str]()
        self.reduce_dtype = "" if plan.wire_dtype == HALVES.get(plan.program.precision) else plan.wire_dtype
        self._halves = plan.schedule.backward_parts()
        self._makers = tuple(_makers(plan, each) for each in self.held)
        self._choices: list[KindChoice] = []
        self._done: dict[object, LoweredForward] = {}
        self._done_back: dict[object, LoweredBackward] = {}
        self._specs: dict[str, TensorSpec] = {}
        self.routes = tuple(self._route(way.groups) for way in self.ways)
        self._route_of = {m: self.routes[index] for index, way in enumerate(self.ways) for m in way.microbatches}

    def _stage_of_tail(self) -> int:
        """The stage that holds the tail.

        Raises:
            InvalidPlanError: several do, or several groups of ranks share its microbatches out.
        """
        if not self.micro.has_tail:
            return -1
        found = next(index for index, stage in enumerate(self.plan.stages) if self.micro.tail < stage.stop)
        why = f"{self.micro.mixes} reads all microbatches, so that segments from {self.micro.tail} on run once a step"
        if found != len(self.plan.stages) - 1:
            raise InvalidPlanError(
                f"{why}, in one stage, and stages {found} to {len(self.plan.stages) - 1} hold some; let the last stage "
                f"begin at segment {self.micro.tail} or before"
            )
        if self.plan.schedule.num_replicas > 1:
            raise InvalidPlanError(
                f"{why}, and in schedule {self.plan.schedule.name} several groups of ranks share the microbatches of a "
                "stage out; use the schedule gpipe"
            )
        return found

    def route(self, m: int) -> RouteBlocks:
        """The route of a microbatch."""
        return self._route_of[m]

    def groups_of(self, stage: int) -> tuple[int, ...]:
        """The groups of ranks that run a stage, in order."""
        return tuple(sorted({way.groups[stage] for way in self.ways}))

    def part(self, stage: int, group: int) -> StageBlocks:
        """What a group runs of a stage: layouts are the same on every route, strides of what arrives may differ."""
        return next(route for route in self.routes if route.groups[stage] == group).parts[group]

    def microbatches_of(self, stage: int, group: int) -> tuple[int, ...]:
        """The microbatches of a stage that a group runs."""
        return tuple(sorted(m for way in self.ways if way.groups[stage] == group for m in way.microbatches))

    def _route(self, groups: tuple[int, ...]) -> RouteBlocks:
        plan = self.plan
        route = RouteBlocks(groups, tuple(StageBlocks() for _ in self.held))
        for holding, parts in zip(self.held, route.parts, strict=True):
            whole = (R,) * (1 + len(holding.mesh.shape))
            parts.given.update({f"buffer:{name}": Given(whole) for name in plan.program.buffers})
            for name, text in holding.batch.items():
                parts.given[f"batch:{name}"] = Given((self.micro.values[f"batch:{name}"], *parse_layout(text)))
        for stage in range(len(plan.stages)):
            for index in range(plan.stages[stage].first, plan.stages[stage].stop):
                self._forward(route, stage, index)
        if self.evaluates:
            return route
        for term in plan.program.loss:
            group = groups[self.maker[term.numerator]]
            route.parts[group].grads[term.numerator] = Given((R,) * (1 + len(self.held[group].mesh.shape)))
        for stage in reversed(range(len(plan.stages))):
            for index in reversed(range(plan.stages[stage].first, plan.stages[stage].stop)):
                self._backward(route, stage, index)
            self._send_grads(route, stage)
        return route

    def spec_of(self, value: str) -> TensorSpec:
        """The global spec of a segment's output."""
        return self._specs[value]

    def _forward(self, route: RouteBlocks, stage: int, index: int) -> None:
        program, parts = self.plan.program, route.at(stage)
        segment = program.segments[index]
        kind = program.kinds[segment.kind]
        for name in segment.inputs:
            if name not in parts.given and name in self.maker:
                self._receive(route, name, stage)
        context = parts.contexts[index] = self._context(route, stage, index)
        choice = self._choice(stage, index)
        micro = self.micro.segments[index]
        key = (choice, context, tuple(micro.placements[name] for name in kind.inputs))
        if key not in self._done:
            split = self._choices[choice].split
            if split is not None and split.at_once and not gradients_known(program, index):
                raise InvalidPlanError(
                    f"segment {index}: its split is at_once, but the gradients of its outputs come from other "
                    "segments; only a segment that makes numerators of the loss and nothing else is differentiated at "
                    "once"
                )
            lowering, suffix = (evaluate_forward, "E") if self.evaluates else (lower_forward, "F")
            name = f"{kind.name}.{len(self._done)}.{suffix}"
            chosen = self._choices[choice]
            made_of = (name, Same(kind), _hashable(chosen), *key[1:])
            self._done[key] = _FORWARDS.get(made_of, lambda: lowering(name, kind, chosen, micro, context))
        parts.forwards[index] = lowered = self._done[key]
        values = (*segment.outputs, *segment.asides) if self.evaluates else segment.outputs
        parts.given.update(zip(values, lowered.outputs, strict=True))
        for outer, local in zip((*segment.outputs, *segment.asides), (*kind.outputs, *kind.asides), strict=True):
            self.maker[outer], self._specs[outer] = stage, kind.graph.values[local]

    def _receive(self, route: RouteBlocks, value: str, stage: int) -> None:
        """A value another group makes arrives here for this stage and the later ones of its ranks."""
        maker = self.maker[value]
        source, target = route.groups[maker], route.groups[stage]
        spec, given = self._specs[value], route.parts[source].given[value]
        in_parts = self.plan.parted_messages
        message = self.message(f"{value}:{source}>{target}", spec, given.layout, source, target, in_parts=in_parts)
        route.parts[target].given[value] = Given(message.received)
        route.values.append(Crossing(message, value, maker, stage))

    def message(
        self, name: str, spec: TensorSpec, layout: Layout, source: int, target: int, wanted: Layout | None = None,
        in_parts: bool = False,
    ) -> Message:  # fmt: skip
        """A message of a value that lies in some extended layout.

        Args:
            name: of the message.
            spec, layout: of the value at the source.
            source, target: groups.
            wanted: of a value of the whole step, the layout the target is to have; None for values of microbatches,
                which are taken as they arrive.
            in_parts: as in `crossing_layouts`.
        """
        meshes, m = (self.held[source].mesh, self.held[target].mesh), self.plan.num_shares
        of_microbatch = wanted is None
        sent, received = crossing_layouts(spec, layout, *meshes, m if of_microbatch else 1, in_parts)
        return Message(name, source, target, spec, sent, received, wanted or received, of_microbatch)

    def _choice(self, stage: int, index: int) -> int:
        """A number for what a segment's stage chooses for it; equal choices have the same."""
        at = self.plan.stages[stage]
        choice = at.choices[at.segment_choice[index - at.first]]
        outputs = self.plan.program.kinds[choice.kind].outputs
        inside = {name: fate for name, fate in choice.activations.items() if name not in outputs or fate not in TIERS}
        if len(inside) < len(choice.activations):  # what waits between segments is no part of blocks
            choice = msgspec.structs.replace(choice, activations=inside)
        if choice not in self._choices:
            self._choices.append(choice)
        return self._choices.index(choice)

    def _context(self, route: RouteBlocks, stage: int, index: int) -> KindContext:
        plan, held, parts = self.plan, self.plan.stages[stage], route.at(stage)
        segment = plan.program.segments[index]
        try:
            params = [held.params[name] for name in segment.params]
            inputs = tuple(self._read(parts, name, index) for name in segment.inputs)
        except KeyError as missing:
            raise InvalidPlanError(
                f"segment {index} reads {missing.args[0]!r}, which the plan gives no layout"
            ) from None
        m = plan.num_shares if index < self.micro.tail else 1
        return KindContext(
            num_microbatches=m,
            mesh_shape=held.mesh.shape,
            inputs=inputs,
            params=tuple(parse_layout(p.stored) for p in params),
            param_grads=tuple(parse_layout(p.grad) for p in params),
            grad_dtypes=self._grad_dtypes(route.groups[stage], index),
            reduce_dtype=self.reduce_dtype,
            grouped=plan.group > 1 and index < self.micro.tail,
            fetched=tuple(bool(p.stored_tier) or p.ahead for p in params),
            ahead=plan.params_ahead,
            rows=tuple(map(self._rows, segment.inputs)) if m < plan.num_shares else (),
        )

    def _grad_dtypes(self, group: int, index: int) -> tuple[str, ...]:
        """The dtype of an accumulator where, of one microbatch, that begins with a segment's gradient; what is added
        to it later is cast by the addition."""
        if self.plan.program.precision not in HALVES or self.plan.num_microbatches > 1:
            return ("",) * len(self.plan.program.segments[index].params)
        return tuple(
            self.accumulates(group, name) if self._makers[group].get(name, ())[-1:] == (index,) else ""
            for name in self.plan.program.segments[index].params
        )

    def accumulates(self, group: int, name: str) -> str:
        """The dtype of an accumulator: the optimizer's, but where one gradient is all of the sum and reduced as
        it was made."""
        plan, held = self.plan, self.held[group]
        made, layouts = plan.program.params[name].spec, held.params[name]
        if plan.wire_dtype == made.dtype and plan.num_microbatches == len(self._makers[group].get(name, ())) == 1:
            source, target = parse_layout(layouts.grad), parse_layout(layouts.state)
            if any(move.reduction for move in reshard_path(made.shape, source, target, held.mesh.shape)):
                return made.dtype
        return master_dtype(plan.program.precision, made.dtype)

    def _read(self, parts: StageBlocks, name: str, index: int) -> Given:
        """How a segment is given a value."""
        given = parts.given[name]
        if index < self.micro.tail or whole_of(given) == given:
            return given
        return parts.wholes.setdefault(name, whole_of(given))

    def _rows(self, value: str) -> int | None:
        """The dim of a value that microbatches cut."""
        place = self.micro.values.get(value, R)
        return place.dim if isinstance(place, Shard) else None

    def _backward(self, route: RouteBlocks, stage: int, index: int) -> None:
        plan, parts = self.plan, route.at(stage)
        segment = plan.program.segments[index]
        kind = plan.program.kinds[segment.kind]
        forward, context = parts.forwards[index], parts.contexts[index]
        tangents = []
        for tangent, out, made in zip(kind.tangents, segment.outputs, forward.outputs, strict=True):
            if tangent is not None and out not in parts.grads:
                parts.zeros.add(out)
                parts.grads[out] = Given(
                    tuple(placement if isinstance(placement, Shard) else R for placement in made.layout)
                )
            tangents.append(None if tangent is None else parts.grads[out])
        halves = self._halves.get(stage, frozenset({ActionKind.B}))
        key = (forward.block.name, context, tuple(tangents), halves)
        if key not in self._done_back:
            name, micro = f"{kind.name}.{len(self._done_back)}.B", self.micro.segments[index]
            choice = self._choices[self._choice(stage, index)]
            self._done_back[key] = _BACKWARDS.get(
                (name, Same(forward), *key[2:]),
                lambda: lower_backward(name, kind, choice, micro, context, forward, tuple(tangents), halves),
            )
        parts.backwards[index] = lowered = self._done_back[key]
        for slot, (outer, given) in enumerate(zip(segment.inputs, lowered.grads, strict=True)):
            if given is None:
                continue
            if index >= self.micro.tail and outer not in self.micro.after:
                given = self._cut(route, stage, index, slot, given)
            if parts.grads.setdefault(outer, given).layout != given.layout:
                raise InvalidPlanError(
                    f"the gradient of {outer} reaches its segment in two layouts; give every reader's choice the same "
                    "input_grads layout"
                )

    def _cut(self, route: RouteBlocks, stage: int, index: int, slot: int, given: Given) -> Given:
        """Layout and strides of a microbatch's part of a gradient that the tail makes whole."""
        parts, outer = route.at(stage), self.plan.program.segments[index].inputs[slot]
        parts.whole_grads.setdefault(outer, given)
        text = self._choices[self._choice(stage, index)].input_grads[slot]
        assert text is not None
        place = dual(self.micro.values[outer]) if self._specs[outer].shape else R
        return Given((place, *parse_layout(text)))

    def _send_grads(self, route: RouteBlocks, stage: int) -> None:
        """The gradients that readers in this group give to others, once its first stage that reads them is through."""
        target_of = {each.value: each for each in route.values if each.end == stage}
        group = route.groups[stage]
        for value, crossing in target_of.items():
            given = route.parts[group].grads.get(value)
            if given is None:
                continue
            maker = route.groups[crossing.begin]
            in_parts = arrives_in_parts(self.plan, self.held, route.groups, value, maker)
            name, spec = f"d:{value}:{group}>{maker}", self._specs[value]
            message = self.message(name, spec, given.layout, group, maker, in_parts=in_parts)
            there = route.parts[maker].grads.setdefault(value, Given(message.received))
            if there.layout != message.received:
                raise InvalidPlanError(
                    f"the gradient of {value} reaches stage {crossing.begin} in two layouts, one of them from stage "
                    f"{stage}; give every reader's choice the same input_grads layout"
                )
            route.grads.append(Crossing(message, value, stage, crossing.begin))


def _hashable(choice: KindChoice) -> Hashable:
    return choice.ops, choice.input_grads, tuple(choice.activations.items()), choice.split


def _makers(plan: Plan, held: Holding) -> dict[str, tuple[int, ...]]:
    """Parameter -> the segments that make its gradient, ascending; one that makes two of it twice."""
    found: dict[str, tuple[int, ...]] = {}
    for index in held.segments:
        segment = plan.program.segments[index]
        for name, grad in zip(segment.params, plan.program.kinds[segment.kind].param_grads, strict=True):
            if grad is not None:
                found[name] = (*found.get(name, ()), index)
    return found
