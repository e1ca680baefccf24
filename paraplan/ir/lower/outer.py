"""The outer namespace: what is alive before a step, and when its values are given up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec

from paraplan.ir.lower.grads import home_name
from paraplan.ir.lower.stage import PlanBlocks
from paraplan.ir.mesh import Layout, R, is_view_of, layout_text, local_shape, parse_layout
from paraplan.ir.program import Program, master_dtype
from paraplan.ir.rank_program import OuterValue, Step, StepKind
from paraplan.ir.tensor import DTYPE_BYTES, TensorSpec


def outer_values(blocks: PlanBlocks, group: int, late: Sequence[str] = ()) -> dict[str, OuterValue]:
    """What a group of ranks has before the step: parameters, optimizer views, batch, buffers, seeds.

    Args:
        blocks: of the plan.
        group: of ranks.
        late: parameters whose gradients of the step before are held.
    """
    plan, held = blocks.plan, blocks.held[group]
    program, shape = plan.program, held.mesh.shape
    whole = (R,) * len(shape)
    found: dict[str, OuterValue] = {}
    trained = set(held.trained)
    for name, layouts in held.params.items():
        if name in blocks.casts:
            continue
        spec = program.params[name].spec
        at, dtype = layouts.stored_tier, master_dtype(program.precision, spec.dtype)
        if at and name in trained:  # the state's storage
            spec = TensorSpec(dtype, spec.shape)
        found[f"param:{name}"] = _value("param", name, spec, parse_layout(layouts.resting), shape, True, at)
        if name in trained:
            stored, state = parse_layout(layouts.resting), parse_layout(layouts.state)
            tier = layouts.state_tier
            own = tier != at or dtype != spec.dtype or not is_view_of(spec.shape, stored, state, shape)
            found[f"state:{name}"] = _value("state", name, TensorSpec(dtype, spec.shape), state, shape, own, tier)
            if layouts.staged and plan.optimizer.state_slots:
                found[f"slots:{name}"] = _slots(found[f"state:{name}"], plan.optimizer.state_slots)
            if layouts.grad_tier:
                found[home_name(name)] = _own(found[f"state:{name}"], "grad")
    for name in late:
        found[late_name(name)] = _own(found[f"state:{name}"], "late")
    for name, text in held.batch.items():
        entry = program.batch[name]
        extended = (blocks.micro.values[f"batch:{name}"], *parse_layout(text))
        local = local_shape(entry.spec.shape, extended, (plan.num_shares, *shape))
        for m in _microbatches(blocks, group, name):
            nbytes = math.prod(local) * DTYPE_BYTES[entry.spec.dtype]
            found[f"batch:{name}@{m}"] = OuterValue(
                role="batch", source=name, dtype=entry.spec.dtype, shape=local, layout=text, nbytes=nbytes
            )
    for name in held.buffers:
        spec = program.buffers[name]
        found[f"buffer:{name}"] = _value("buffer", name, spec, whole, shape, True)
    if program.precision == "fp16":
        found["loss_scale"] = _value("scale", "", TensorSpec("float32", ()), whole, shape, True)
    for index in held.segments:
        for number, m in itertools.product(program.segments[index].seeds, range(program.apart)):
            source = str(m * program.seeds + number)
            value = _value("seed", source, TensorSpec("int64", ()), whole, shape, True)
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
    role: str, source: str, spec: TensorSpec, layout: Layout, mesh_shape: tuple[int, ...], own: bool, tier: str = ""
) -> OuterValue:
    local = local_shape(spec.shape, layout, mesh_shape)
    nbytes = math.prod(local) * DTYPE_BYTES[spec.dtype] if own else 0
    return OuterValue(
        role=role, source=source, dtype=spec.dtype, shape=local, layout=layout_text(layout), nbytes=nbytes, tier=tier
    )


def seed_name(program: Program, number: int, m: int) -> str:
    """The outer name of one of a batch's seeds; microbatches that are batches by themselves have their own."""
    return f"seed:{number}@{m}" if program.apart > 1 else f"seed:{number}"


def late_name(name: str) -> str:
    """The outer name of a parameter's gradient that is held until the next step."""
    return f"late:{name}"


def _slots(state: OuterValue, count: int) -> OuterValue:
    """The other states of a parameter, stacked."""
    return _own(msgspec.structs.replace(state, shape=(count, *state.shape)), "slots")


def _own(value: OuterValue, role: str) -> OuterValue:
    """Something that lies likewise, in storage of its own."""
    nbytes = math.prod(value.shape) * DTYPE_BYTES[value.dtype]
    return msgspec.structs.replace(value, role=role, nbytes=nbytes)


def with_drops(steps: tuple[Step, ...], outer: dict[str, OuterValue], kept: set[str]) -> tuple[Step, ...]:
    """The steps, each giving up the values it is the last to read (what nobody reads is dropped at once).

    A name that a later microbatch gives to another value is given up by the last reader of the first.
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
        gives_up = step.kind in (StepKind.CALL, StepKind.AWAIT)
        found.append(msgspec.structs.replace(step, drops=(*step.drops, *dying)) if gives_up else step)
    return tuple(reversed(found))
