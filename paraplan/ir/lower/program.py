"""Program + Plan -> RankProgram: the steps around the blocks.

Names of the outer namespace: `param:<name>` (stored copy), `state:<name>` (what the optimizer updates),
`batch:<name>@<m>`, `buffer:<name>`, `seed:<segment>`, `<output>@<m>`, `d:<output>@<m>` (its gradient),
`<segment>/<value>@<m>` (saved), `acc:<param>` (accumulated gradient), `grad:<param>` (as the optimizer reads
it), `sum:<i>` (under way), `whole:<segment>/<slot>@<action>` (a parameter gathered ahead), `den<i>`, `tangent<i>`,
`num<i>`, `loss`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.lower.ahead import Gathers, Visit
from paraplan.ir.lower.away import AwayValue, Copies, at
from paraplan.ir.lower.away import Visit as CopyVisit
from paraplan.ir.lower.kind import LoweredBackward
from paraplan.ir.lower.outer import outer_values, with_drops
from paraplan.ir.lower.parcels import Parcel, local_bytes
from paraplan.ir.lower.parted import PartedCalls
from paraplan.ir.lower.reduce import Partials, Reductions
from paraplan.ir.lower.stage import StageBlocks, lower_stage
from paraplan.ir.lower.updates import (
    buffer_block,
    count_block,
    loss_block,
    restore_block,
    tangent_block,
    zero_block,
)
from paraplan.ir.mesh import Layout, Partial, R
from paraplan.ir.plan import Optimizer, Plan, Stage
from paraplan.ir.program import master_dtype, trained_params
from paraplan.ir.rank_program import Block, OutputPlace, RankProgram, Step, StepKind
from paraplan.ir.reshard import Move, reshard_path
from paraplan.ir.schedule import ActionKind, parse_action
from paraplan.ir.tensor import TensorSpec


class StageSteps:
    """Writes the steps of one rank class, action by action; `evaluate` leaves out all but the forward."""

    def __init__(self, plan: Plan, stage: Stage, evaluate: bool = False) -> None:
        self.plan, self.stage, self.program, self.evaluates = plan, stage, plan.program, evaluate
        self.m = plan.num_microbatches
        self.extended = (self.m, *stage.mesh.shape)
        self.parts: StageBlocks = lower_stage(plan, stage, evaluate)
        self.blocks: dict[str, Block] = {}
        self.steps: list[Step] = []
        self.tangent_of: dict[str, str] = {}
        self.action = ""
        self.trained = trained_params(self.program, stage.first, stage.stop)
        self.metrics: dict[str, str] = {}
        specs = {name: self._grad_spec(name) for name in self.trained}
        self.calls = PartedCalls(self._call)
        self.reductions = Reductions(stage.params, specs, stage.mesh.shape, self.calls, plan.bundle_bytes)
        self.partials = Partials(self.extended, self.calls, self._accumulate, self.reductions.final, plan.bundle_bytes)
        self.gathers = Gathers(self.extended, self.calls, plan.bundle_bytes)
        self.copies = Copies(self._call_for)

    def _grad_spec(self, name: str) -> TensorSpec:
        spec = self.program.params[name].spec
        return TensorSpec(master_dtype(self.program.precision, spec.dtype), spec.shape)

    def _call(self, block: Block, args: tuple[str, ...], outs: tuple[str | None, ...]) -> None:
        self._add(StepKind.CALL, block, args=args, outs=outs)

    def _call_for(
        self, block: Block, args: tuple[str, ...], outs: tuple[str | None, ...], microbatch: int, segment: int
    ) -> None:
        self._add(StepKind.CALL, block, args=args, outs=outs, microbatch=microbatch, segment=segment)

    def build(self, actions: tuple[str, ...]) -> RankProgram:
        waits = self._tangents(self._denominators())
        kinds = [parse_action(text).kind for text in actions]
        last = {kind: index for index, kind in enumerate(kinds)}
        for index, text in enumerate(actions):
            action, self.action = parse_action(text), text
            if action.kind is ActionKind.F:
                self._forward(action.microbatch)
                if index == last[ActionKind.F]:
                    joined = self._joining()
                    ends = [self._loss(joined, waits)]
                    if self.stage.mesh.size == 1:  # nothing to wait for: the loss is known before its gradients
                        while waits:
                            waits.pop(0)()
                        ends.pop()()
            elif action.kind is ActionKind.B:
                while waits:
                    waits.pop(0)()
                self._backward(action.microbatch, index == last[ActionKind.B])
            elif action.kind is ActionKind.REDUCE_GRAD:
                self.partials.end()
                for parcel in joined:
                    self.reductions.send(parcel)
                self.reductions.end()
                grads = {name: self.reductions.grads[name] for name in self.trained}
                for end in ends:
                    end()
                self._buffers()
            elif action.kind is ActionKind.UPDATE:
                self._update()
            else:
                raise InvalidPlanError(f"action {text}: {action.kind.value} cannot occur in a single-stage plan")
        self._add(StepKind.DROP, drops=tuple(grads.values()))
        kept = {"loss", *self.metrics.values(), *grads.values()}
        return self._ended(kept, grads, {})

    def _ended(self, kept: set[str], grads: dict[str, str], outputs: dict[str, OutputPlace]) -> RankProgram:
        """The program of the steps written so far; `kept` are values nothing gives up."""
        outer = outer_values(self.plan, self.stage, self.parts)
        optimizer = self.plan.optimizer
        sizes = [outer[f"state:{name}"] for name in self.trained]
        full = [math.prod(value.shape) * _itemsize(value.dtype) for value in sizes]
        return RankProgram(
            mesh_axes=self.stage.mesh.axes,
            mesh_shape=self.stage.mesh.shape,
            num_microbatches=self.m,
            blocks=self.blocks,
            outer=outer,
            steps=with_drops(tuple(self.steps), outer, kept),
            loss="loss",
            metrics=self.metrics,
            outputs=outputs,
            grads=grads,
            optimizer_bytes=sum(n * optimizer.state_slots + optimizer.scalar_bytes for n in full),
            update_workspace_bytes=_update_workspace(full, optimizer),
        )

    def _add(self, kind: StepKind, block: Block | None = None, **fields: object) -> None:
        if block is not None:
            self.blocks[block.name] = block
            fields["block"] = block.name
        self.steps.append(Step(kind=kind, action=self.action, **fields))  # type: ignore[arg-type]

    def _denominators(self) -> list[Layout]:
        """Counts what the loss divides by, partial sums; how each lies."""
        self.action = "0F0"
        layouts = []
        for index, denominator in enumerate(self.program.denominators):
            given = tuple(self.parts.given[name].layout for name in denominator.inputs)
            block, layout = count_block(
                f"den{index}.count", denominator, self.parts.micro.denominators[index], given, self.extended
            )
            layouts.append(layout)
            named = dict(zip(denominator.graph.inputs, denominator.inputs, strict=True))
            for m in range(self.m):
                args = tuple(self._at(named[local], m) for local in block.inputs)
                self._add(StepKind.CALL, block, args=args, outs=(f"den{index}@{m}",), microbatch=m)
                self._add(StepKind.ACCUMULATE, args=(f"den{index}", f"den{index}@{m}"), microbatch=m)
        return layouts

    def _tangents(self, layouts: list[Layout]) -> list[Callable[[], None]]:
        """Whole denominators, and the gradient of every numerator; begun, with what ends each."""
        ends = []
        scaled = self.program.precision == "fp16"
        for index, term in enumerate(self.program.loss):
            spec, d = self._scalar(term.numerator), term.denominator
            block = tangent_block(
                f"tangent{index}", spec, None if d is None else layouts[d], self.extended, scaled=scaled
            )
            sources = {"count": f"den{d}", "scale": "loss_scale"}
            total = None if d is None else f"total{index}"
            ends.append(self.calls.begin(block, sources, (total, f"tangent{index}")))
            self.tangent_of[term.numerator] = f"tangent{index}"
        return ends

    def _scalar(self, value: str) -> TensorSpec:
        for segment in self.program.segments:
            if value in segment.outputs:
                kind = self.program.kinds[segment.kind]
                return kind.graph.values[kind.outputs[segment.outputs.index(value)]]
        raise InvalidPlanError(f"the loss reads {value!r}, which no segment makes")

    def _at(self, value: str, m: int) -> str:
        return value if value.startswith("buffer:") else f"{value}@{m}"

    def _visit(self, index: int, early: Sequence[Move | None]) -> Visit:
        """What is gathered for a segment before its block is called."""
        segment = self.program.segments[index]
        parcels = (
            Parcel(f"param:{name}", self._whole(index, slot), self.program.params[name].spec, (move,))
            for slot, (name, move) in enumerate(zip(segment.params, early, strict=True))
            if move is not None
        )
        return Visit(index, tuple(parcels))

    def _whole(self, index: int, slot: int) -> str:
        return f"whole:{index}/{slot}@{self.action}"

    def _sources(self, index: int, m: int, early: Sequence[Move | None]) -> dict[str, str]:
        """Local name in a segment's blocks -> outer name."""
        segment = self.program.segments[index]
        kind = self.program.kinds[segment.kind]
        names = {
            local: f"param:{outer}" if early[slot] is None else self._whole(index, slot)
            for slot, (local, outer) in enumerate(zip(kind.params, segment.params, strict=True))
        }
        names |= {local: self._at(outer, m) for local, outer in zip(kind.inputs, segment.inputs, strict=True)}
        if kind.seed is not None:
            names[kind.seed] = f"seed:{index}"
        return names

    def _forward(self, m: int) -> None:
        numerators = {term.numerator: index for index, term in enumerate(self.program.loss)}
        order = range(self.stage.first, self.stage.stop)
        self.gathers.start([self._visit(index, self.parts.forwards[index].early) for index in order])
        for index in order:
            segment, lowered = self.program.segments[index], self.parts.forwards[index]
            self.gathers.reach(index)
            names = self._sources(index, m, lowered.early)
            asides = segment.asides if self.evaluates else ()
            outs = tuple(f"{out}@{m}" for out in (*segment.outputs, *asides))
            saved = tuple(at(index, local, m) for local in lowered.block.saved)
            args = tuple(names[local] for local in lowered.block.inputs)
            self._add(StepKind.CALL, lowered.block, args=args, outs=(*outs, *saved), microbatch=m, segment=index)
            for out in segment.outputs:
                if out in numerators:
                    self._add(
                        StepKind.ACCUMULATE, args=(f"num{numerators[out]}", f"{out}@{m}"), microbatch=m, segment=index
                    )
            self.copies.passed(CopyVisit(index, tuple(lowered.away.values())), m)
        self.copies.end()

    def _backward(self, m: int, last: bool) -> None:
        """One microbatch's backward; after the last one, gradients are final as their first user is passed."""
        final = self._final() if last else {}
        order = tuple(reversed(range(self.stage.first, self.stage.stop)))
        self.gathers.start([self._visit(index, self.parts.backwards[index].early) for index in order])
        self.copies.start([CopyVisit(index, self._returning(index)) for index in order], m)
        self.partials.start(max((self._partial_bytes(index) for index in order), default=0))
        for index in order:
            segment, lowered = self.program.segments[index], self.parts.backwards[index]
            kind = self.program.kinds[segment.kind]
            self.gathers.reach(index)
            self.copies.reach(m)
            names = self._sources(index, m, lowered.early)
            names |= {local: at(index, local, m) for local in self.parts.forwards[index].block.saved}
            for value in self._returning(index):
                names |= {each.base: at(index, each.base, m) for each in (value.back, value.there)}
            names |= {local: f"{outer}@{m}" for local, outer in zip(kind.outputs, segment.outputs, strict=True)}
            for tangent, local, out in zip(kind.tangents, kind.outputs, segment.outputs, strict=True):
                if tangent is not None:
                    names[tangent] = self.tangent_of.get(out, f"d:{out}@{m}")
                    if out in self.parts.zeros and tangent in lowered.block.inputs:
                        self._zero(kind.graph.values[local], out, m, index)
            self._call_backward(index, m, lowered, names)
            self.partials.passed(final.get(index, ()))
        if not last:
            self.partials.end()

    def _returning(self, index: int) -> tuple[AwayValue, ...]:
        """What a segment's backward reads from tiers."""
        inputs = self.parts.backwards[index].block.inputs
        return tuple(value for value in self.parts.forwards[index].away.values() if value.back.base in inputs)

    def _final(self) -> dict[int, list[str]]:
        """Segment -> the parameters whose gradients it is the last to add to."""
        first: dict[str, int] = {}
        for index in range(self.stage.first, self.stage.stop):
            params = self.program.segments[index].params
            grads = self.parts.backwards[index].block.outputs[-len(params) :] if params else ()
            for name, grad in zip(params, grads, strict=True):
                if grad is not None:
                    first.setdefault(name, index)
        found: dict[int, list[str]] = {}
        for name in self.trained:
            found.setdefault(first[name], []).append(name)
        return found

    def _zero(self, spec: TensorSpec, out: str, m: int, index: int) -> None:
        block = zero_block(f"zero.{out}", spec, self.parts.grads[out].layout, self.extended)
        self._add(StepKind.CALL, block, args=(), outs=(f"d:{out}@{m}",), microbatch=m, segment=index)

    def _call_backward(self, index: int, m: int, lowered: LoweredBackward, names: dict[str, str]) -> None:
        segment, block = self.program.segments[index], lowered.block
        first = len(segment.inputs)
        targets = [f"d:{outer}@{m}" for outer in segment.inputs] + [f"acc:{outer}" for outer in segment.params]
        if not any(local is not None for local in block.outputs):
            return
        outs = tuple(
            None if local is None else f"{target}+{index}.{position}"
            for position, (local, target) in enumerate(zip(block.outputs, targets, strict=True))
        )
        args = tuple(names[local] for local in block.inputs)
        self._add(StepKind.CALL, block, args=args, outs=outs, microbatch=m, segment=index)
        for position, (out, target) in enumerate(zip(outs, targets, strict=True)):
            path = lowered.partial[position - first] if position >= first else ()
            if out is not None and not path:
                self._add(StepKind.ACCUMULATE, args=(target, out), microbatch=m, segment=index)
            elif out is not None:
                self._send(segment.params[position - first], out, path)

    def _partial_bytes(self, index: int) -> int:
        """Bytes of the gradients that a segment's backward leaves as they were made."""
        params, paths = self.program.segments[index].params, self.parts.backwards[index].partial
        found = zip((self.program.params[name].spec for name in params), paths, strict=True)
        return sum(local_bytes(spec, path[0].before, self.extended) for spec, path in found if path)

    def _send(self, name: str, out: str, path: tuple[Move, ...]) -> None:
        param = self.program.params[name]
        dtype = self._grad_spec(name).dtype
        self.partials.send(name, Parcel(out, f"{out}^", param.spec, path, dtype))

    def _accumulate(self, name: str, addend: str) -> None:
        self._add(StepKind.ACCUMULATE, args=(f"acc:{name}", addend))

    def _joining(self) -> tuple[Parcel, ...]:
        """Numerators of the loss that are summed along with gradients rather than by themselves."""
        whole = (R,) * len(self.extended)
        parcels = []
        for index, term in enumerate(self.program.loss):
            spec, layout = self._scalar(term.numerator), (R, *self.parts.given[term.numerator].layout[1:])
            path = reshard_path(spec.shape, layout, whole, self.extended, frozen=1)
            if self.reductions.takes(spec, path):
                parcels.append(Parcel(f"num{index}", f"whole:num{index}", spec, path))
        return tuple(parcels)

    def _loss(self, joined: Sequence[Parcel], waits: list[Callable[[], None]]) -> Callable[[], None]:
        """The loss from what the microbatches say, begun; what ends it. `joined` are whole by then.

        Of several terms one may be divided before another's sum is begun: `waits`, which end denominators, come first.
        """
        terms = self.program.loss
        specs = tuple(self._scalar(term.numerator) for term in terms)
        came = {parcel.source: parcel.result for parcel in joined}
        layouts = tuple(
            (R,) * len(self.extended) if f"num{i}" in came else self.parts.given[term.numerator].layout
            for i, term in enumerate(terms)
        )
        block = loss_block("loss", terms, specs, layouts, self.extended)
        while waits and block[0] is not None and any(name.startswith("denominator") for name in block[0].inputs):
            waits.pop(0)()
        names = {f"numerator{i}": came.get(f"num{i}", f"num{i}") for i in range(len(terms))} | {
            f"denominator{i}": f"total{i}" for i in range(len(terms))
        }
        self.metrics = {name: f"loss:{name}" for name in dict.fromkeys(term.name for term in terms) if name}
        return self.calls.begin(block, names, ("loss", *self.metrics.values()))

    def _buffers(self) -> None:
        """Every buffer the model writes gets its new value, whole on every rank: the sum of what the microbatches
        say where that is partial, else what all of them say."""
        made: dict[object, Block] = {}
        for name, value in self.program.buffer_updates.items():
            spec, given = self.program.buffers[name], self.parts.given[value]
            micros = range(self.m) if isinstance(given.layout[0], Partial) else range(self.m - 1, self.m)
            key = (spec, given)
            if key not in made:
                block = buffer_block(
                    f"buffer.{len(made)}", spec, given.layout, given.strides, len(micros), self.extended
                )
                made[key] = block
            sources = {"stored": f"buffer:{name}"} | {f"new{i}": f"{value}@{m}" for i, m in enumerate(micros)}
            self._add(StepKind.CALL, made[key], args=tuple(sources[local] for local in made[key].inputs), outs=())

    def _update(self) -> None:
        names = self.trained
        self._add(StepKind.UPDATE, args=tuple(f"state:{name}" for name in names))
        made: dict[object, Block] = {}
        for name in names:
            param, layouts = self.program.params[name], self.stage.params[name]
            dtype = master_dtype(self.program.precision, param.spec.dtype)
            if layouts.stored == layouts.state and dtype == param.spec.dtype:
                continue
            key = (param.spec, layouts.stored, layouts.state)
            if key not in made:
                made[key] = restore_block(f"restore.{len(made)}", param, dtype, layouts, self.stage.mesh.shape)
            block = made[key]
            sources = {"stored": f"param:{name}", "state": f"state:{name}"}
            self._add(StepKind.CALL, block, args=tuple(sources[local] for local in block.inputs), outs=())


def _update_workspace(sizes: list[int], optimizer: Optimizer) -> int:
    """The most one parameter's update allocates, with what lingers of the one before it."""
    before = [0, *sizes[:-1]]
    pairs = zip(sizes, before, strict=True)
    return max((optimizer.workspace_slots * n + optimizer.lingering_slots * last for n, last in pairs), default=0)


def _itemsize(dtype: str) -> int:
    return TensorSpec(dtype, ()).nbytes
