"""The outer namespace: what is alive before a step, and when its values are given up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec

from paraplan.ir.execution import names as outer_names
from paraplan.ir.execution.name import Name, Role
from paraplan.ir.execution.names import LOSS_SCALE
from paraplan.ir.execution.rank_program import OuterValue, Step, StepKind
from paraplan.ir.machine.mesh import Layout, R, is_view_of, layout_text, local_shape, parse_layout
from paraplan.ir.model.program import Program, master_dtype
from paraplan.ir.model.tensor import DTYPE_BYTES, TensorSpec
from paraplan.lowering.stage_blocks import PlanBlocks


def outer_values(blocks: PlanBlocks, group: int, late: Sequence[str] = ()) -> dict[Name, OuterValue]:
    """What a group of ranks has before the step: parameters, optimizer views, batch, buffers, seeds.

    Args:
        blocks: of the plan.
        group: of ranks.
        late: parameters whose gradients of the step before are held.
    """
    plan, held = blocks.plan, blocks.held[group]
    program, shape = plan.program, held.mesh.shape
    whole = (R,) * len(shape)
    found: dict[Name, OuterValue] = {}
    trained = set(held.trained)
    for name, layouts in held.params.items():
        if name in blocks.casts:
            continue
        spec = program.params[name].spec
        at, dtype = layouts.stored_tier, master_dtype(program.precision, spec.dtype)
        if at and name in trained:  # the state's storage
            spec = TensorSpec(dtype, spec.shape)
        stored, state = parse_layout(layouts.resting), parse_layout(layouts.state)
        found[outer_names.param(name)] = _value(Role.PARAMETER, name, spec, stored, shape, True, at)
        if name in trained:
            tier = layouts.state_tier
            own = tier != at or dtype != spec.dtype or not is_view_of(spec.shape, stored, state, shape)
            updated = _value(Role.STATE, name, TensorSpec(dtype, spec.shape), state, shape, own, tier)
            found[outer_names.state(name)] = updated
            if layouts.staged and plan.optimizer.state_slots:
                found[outer_names.slots(name)] = _slots(updated, plan.optimizer.state_slots)
            if layouts.grad_tier:
                found[outer_names.waiting(name)] = _own(updated, Role.WAITING)
    for name in late:
        found[outer_names.late(name)] = _own(found[outer_names.state(name)], Role.LATE)
    for name, text in held.batch.items():
        entry = program.batch[name]
        extended = (blocks.micro.values[f"batch:{name}"], *parse_layout(text))
        local = local_shape(entry.spec.shape, extended, (plan.num_shares, *shape))
        for m in _microbatches(blocks, group, name):
            nbytes = math.prod(local) * DTYPE_BYTES[entry.spec.dtype]
            found[outer_names.batch(name, m)] = OuterValue(
                role=Role.BATCH, source=name, dtype=entry.spec.dtype, shape=local, layout=text, nbytes=nbytes
            )
    for name in held.buffers:
        spec = program.buffers[name]
        found[outer_names.buffer(name)] = _value(Role.BUFFER, name, spec, whole, shape, True)
    if program.precision == "fp16":
        found[LOSS_SCALE] = _value(Role.LOSS_SCALE, "", TensorSpec("float32", ()), whole, shape, True)
    for index in held.segments:
        for number, m in itertools.product(program.segments[index].seeds, range(program.apart)):
            source = str(m * program.seeds + number)
            value = _value(Role.SEED, source, TensorSpec("int64", ()), whole, shape, True)
            found[seed_name(program, number, m)] = value
    return found


def _microbatches(blocks: PlanBlocks, group: int, name: str) -> list[int]:
    """The microbatches of a batch input that a group reads: those it runs; of what the loss divides by, all."""
    program, found = blocks.plan.program, set[int]()
    counted = {
        (term.numerator, n)
        for term in program.loss
        if (at := term.denominator) is not None
        for n in program.denominators[at].inputs
    }
    for stage in blocks.held[group].stages:
        here = blocks.plan.stages[stage]
        if name in here.batch:
            found.update(blocks.microbatches_of(stage, group))
        if any(blocks.maker[numerator] == stage and n == f"batch:{name}" for numerator, n in counted):
            found.update(range(blocks.plan.num_microbatches))
    return sorted(found)


def _value(
    role: Role, source: str, spec: TensorSpec, layout: Layout, mesh_shape: tuple[int, ...], own: bool, tier: str = ""
) -> OuterValue:
    local = local_shape(spec.shape, layout, mesh_shape)
    nbytes = math.prod(local) * DTYPE_BYTES[spec.dtype] if own else 0
    return OuterValue(
        role=role, source=source, dtype=spec.dtype, shape=local, layout=layout_text(layout), nbytes=nbytes, tier=tier
    )


def seed_name(program: Program, number: int, m: int) -> Name:
    """The outer name of one of a batch's seeds; microbatches that are batches by themselves have their own.

    Args:
        program: that draws.
        number: of the seed in the batch.
        m: the microbatch.
    """
    return outer_names.seed(number, m if program.apart > 1 else -1)


def _slots(state: OuterValue, count: int) -> OuterValue:
    """The other states of a parameter, stacked."""
    return _own(msgspec.structs.replace(state, shape=(count, *state.shape)), Role.SLOTS)


def _own(value: OuterValue, role: Role) -> OuterValue:
    """Something that lies likewise, in storage of its own."""
    nbytes = math.prod(value.shape) * DTYPE_BYTES[value.dtype]
    return msgspec.structs.replace(value, role=role, nbytes=nbytes)


def with_drops(steps: tuple[Step, ...], outer: dict[Name, OuterValue], kept: set[Name]) -> tuple[Step, ...]:
    """The steps, each giving up the values it is the last to read (what nobody reads is dropped at once).

    A name that a later microbatch gives to another value is given up by the last reader of the first.

    Args:
        steps: in order.
        outer: values that exist before the step.
        kept: what nothing gives up.
    """
    always = set(outer) | kept
    seen = set(always)
    found: list[Step] = []
    for step in reversed(steps):
        unread = tuple(out for out in step.outs if out is not None and out not in seen)
        if unread:
            found.append(
                Step(
                    kind=StepKind.DROP,
                    action=step.action,
                    drops=unread,
                    microbatch=step.microbatch,
                    segment=step.segment,
                )
            )
        seen.update(step.drops)
        seen.difference_update(out for out in step.outs if out is not None and out not in always)
        dying = dict.fromkeys(name for name in step.args if name not in seen)
        seen.update(dying)
        if step.kind in (StepKind.CALL, StepKind.AWAIT):
            found.append(msgspec.structs.replace(step, drops=(*step.drops, *dying)))
            continue
        if step.kind is StepKind.ACCUMULATE:  # takes its addend's name away
            dying.pop(step.args[1], None)
        if dying:
            found.append(
                msgspec.structs.replace(step, kind=StepKind.DROP, args=(), outs=(), drops=tuple(dying), transfer="")
            )
        found.append(step)
    return tuple(reversed(found))
