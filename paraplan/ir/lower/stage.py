"""All blocks of a stage: each (kind, choice, context) lowered once, however many segments share it."""

from __future__ import annotations

from dataclasses import dataclass, field

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.lower.chunks import gradients_known
from paraplan.ir.lower.kind import (
    Given,
    KindContext,
    LoweredBackward,
    LoweredForward,
    evaluate_forward,
    lower_backward,
    lower_forward,
)
from paraplan.ir.mesh import R, Shard, parse_layout
from paraplan.ir.micro import ProgramMicro, program_micro
from paraplan.ir.plan import Plan, Stage
from paraplan.ir.program import HALVES


@dataclass
class StageBlocks:
    """Blocks of a stage as they are built.

    Attributes:
        micro: what everything does along the microbatch axis.
        forwards, backwards: per segment.
        given: how every program value lies.
        grads: how the gradient of every segment output lies.
        zeros: outputs nobody gives a gradient (their readers detach them): theirs is zero.
    """

    micro: ProgramMicro
    forwards: dict[int, LoweredForward] = field(default_factory=dict)
    backwards: dict[int, LoweredBackward] = field(default_factory=dict)
    given: dict[str, Given] = field(default_factory=dict)
    grads: dict[str, Given] = field(default_factory=dict)
    zeros: set[str] = field(default_factory=set)


def lower_stage(plan: Plan, stage: Stage, evaluate: bool = False) -> StageBlocks:
    """Lower the forward of every segment in order, then (unless the stage only evaluates) the backwards in reverse."""
    program = plan.program
    blocks = StageBlocks(program_micro(program, plan.num_microbatches))
    whole = (R,) * (1 + len(stage.mesh.shape))
    blocks.given.update({f"buffer:{name}": Given(whole) for name in program.buffers})
    for name, text in stage.batch.items():
        blocks.given[f"batch:{name}"] = Given((blocks.micro.values[f"batch:{name}"], *parse_layout(text)))
    contexts = {}
    done: dict[object, LoweredForward] = {}
    for index in range(stage.first, stage.stop):
        contexts[index] = _context(plan, stage, blocks, index)
        _forward(plan, stage, blocks, index, contexts[index], done, evaluate)
    if evaluate:
        return blocks
    for term in program.loss:
        blocks.grads[term.numerator] = Given(whole)
    done_back: dict[object, LoweredBackward] = {}
    for index in reversed(range(stage.first, stage.stop)):
        _backward(plan, stage, blocks, index, contexts[index], done_back)
    return blocks


def _context(plan: Plan, stage: Stage, blocks: StageBlocks, index: int) -> KindContext:
    segment = plan.program.segments[index]
    try:
        params = [stage.params[name] for name in segment.params]
        inputs = tuple(blocks.given[name] for name in segment.inputs)
    except KeyError as missing:
        raise InvalidPlanError(f"segment {index} reads {missing.args[0]!r}, which the plan gives no layout") from None
    return KindContext(
        num_microbatches=plan.num_microbatches, mesh_shape=stage.mesh.shape, inputs=inputs,
        params=tuple(parse_layout(p.stored) for p in params), param_grads=tuple(parse_layout(p.grad) for p in params),
        grad_dtype="float32" if plan.program.precision in HALVES else "",
    )  # fmt: skip


def _forward(
    plan: Plan, stage: Stage, blocks: StageBlocks, index: int, context: KindContext, done: dict[object, LoweredForward],
    evaluate: bool,
) -> None:  # fmt: skip
    segment = plan.program.segments[index]
    kind = plan.program.kinds[segment.kind]
    chosen = stage.segment_choice[index - stage.first]
    micro = blocks.micro.segments[index]
    key = (chosen, context, tuple(micro.placements[name] for name in kind.inputs))
    if key not in done:
        split = stage.choices[chosen].split
        if split is not None and split.at_once and not gradients_known(plan.program, index):
            raise InvalidPlanError(
                f"segment {index}: its split is at_once, but the gradients of its outputs come from other segments; "
                "only a segment that makes numerators of the loss and nothing else is differentiated at once"
            )
        lowering, letter = (evaluate_forward, "E") if evaluate else (lower_forward, "F")
        done[key] = lowering(f"{kind.name}.{len(done)}.{letter}", kind, stage.choices[chosen], micro, context)
    blocks.forwards[index] = done[key]
    values = (*segment.outputs, *segment.asides) if evaluate else segment.outputs
    blocks.given.update(zip(values, done[key].outputs, strict=True))


def _backward(
    plan: Plan, stage: Stage, blocks: StageBlocks, index: int, context: KindContext, done: dict[object, LoweredBackward]
) -> None:
    segment = plan.program.segments[index]
    kind = plan.program.kinds[segment.kind]
    chosen = stage.segment_choice[index - stage.first]
    forward = blocks.forwards[index]
    tangents = []
    for tangent, out, made in zip(kind.tangents, segment.outputs, forward.outputs, strict=True):
        if tangent is not None and out not in blocks.grads:
            blocks.zeros.add(out)
            blocks.grads[out] = Given(
                tuple(placement if isinstance(placement, Shard) else R for placement in made.layout)
            )
        tangents.append(None if tangent is None else blocks.grads[out])
    key = (forward.block.name, context, tuple(tangents))
    if key not in done:
        name = f"{kind.name}.{len(done)}.B"
        micro = blocks.micro.segments[index]
        done[key] = lower_backward(name, kind, stage.choices[chosen], micro, context, forward, tuple(tangents))
    blocks.backwards[index] = done[key]
    for outer, given in zip(segment.inputs, done[key].grads, strict=True):
        if given is None:
            continue
        if blocks.grads.setdefault(outer, given).layout != given.layout:
            raise InvalidPlanError(
                f"the gradient of {outer} reaches its segment in two layouts; give every reader's choice the same "
                "input_grads layout"
            )
