"""What one option of a parameter class holds, on the device and on the host, and what a step of it costs.

On the device: the stored copy, the states, the gradient until it has been used. A stored copy that is gathered ahead is
whole at the loss and a shard at the update; that shard beside the whole is not counted, since a plan that does not fit
for it is made without (`planner.evaluate_plan`). With states on a tier nothing of them is left here but what is
fetched for the update, and gradients go to the host as they are made, unless the device updates or they wait beside
the states. With the stored copy there too, what a segment reads is on the device for a moment, which simulation finds
(`instants`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from paraplan.ir.machine.mesh import R
from paraplan.ir.model.fused_updates import is_fusible
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.plan import REDUCE_DTYPES
from paraplan.planner.assemble import Job
from paraplan.planner.decision_classes import ParamClass
from paraplan.planner.sharding.layout_options import ParamOption
from paraplan.planner.sharding.prices import MeshPrices, Price, add, scale


@dataclass(frozen=True)
class ParamHeld:
    """Of all parameters of a class under one option.

    Attributes:
        cost: reduction, update, restoration and copies of a step.
        loss, update: bytes on the device at these two instants.
        work: bytes while one of them updates on the device.
        grad: bytes of one gradient that lives from the backward to the update.
        away, away_work: per tier, bytes there at the update, and besides while one of them updates there.
        here: bytes of one parameter while a segment that reads it has it on the device, where it is stored elsewhere.
    """

    cost: Price
    loss: int
    update: int
    work: int = 0
    grad: int = 0
    away: dict[str, int] = field(default_factory=dict)
    away_work: dict[str, int] = field(default_factory=dict)
    here: int = 0


def param_held(job: Job, prices: MeshPrices, cls: ParamClass, option: ParamOption, m: int) -> ParamHeld:
    """The bytes and the price of an option, with m microbatches.

    Args:
        job: what is planned.
        prices: on the mesh.
        cls: the class of parameters.
        option: of its layouts and places.
        m: number of microbatches.
    """
    n, slots, place = len(cls.params), job.optimizer.state_slots, option.place
    stored, fetched = prices.nbytes(cls.spec, (R, *option.stored)), prices.zero
    stays = 0
    if place.params:
        comes = TensorSpec(option.state_dtype, cls.spec.shape) if cls.trained else cls.spec
        copied = prices.fetched(place.params, prices.nbytes(comes, (R, *option.stored)))
        cast = prices.cast(comes, cls.spec.dtype, (R, *option.stored))
        fetched = scale(add(copied, cast), _reads(job, cls) * m)
        stored, stays = 0, stored
    if not cls.trained:
        away = {place.params: stays * n} if place.params else {}
        return ParamHeld(fetched, stored * n, stored * n, away=away, here=stays)
    tier, at, waits = place.states, place.update_tier, place.grads_wait
    master = TensorSpec(option.state_dtype, cls.spec.shape)
    shard, grad = prices.nbytes(master, (R, *option.state)), prices.nbytes(master, (R, *option.grad))
    reduced = _reduced(job, prices, master, option)
    restored = prices.reshard(cls.spec, (R, *option.state), (R, *option.stored), bundled=option.ahead)
    assert restored is not None
    copy = prices.zero
    if option.needs_restore(cls.spec.dtype):  # cast as it is written, or before it is sent to other ranks
        given = option.state_dtype if option.resting == option.state else cls.spec.dtype
        copy = prices.write(cls.spec, (R, *option.resting), given)
    back = not place.params
    step = prices.updated_away(at, shard, slots, back, not waits) if at else prices.updated(shard, slots)
    brought = shard * (1 + slots) if place.is_staged else 0
    moved = prices.staged(tier, brought, bool(at)) if brought else prices.zero
    if waits:
        moved, brought = add(moved, prices.kept(tier, shard, bool(at))), brought + shard
    cost = add(scale(add(reduced, restored, copy, step, moved), n), fetched)
    owned = shard if option.owns_state(cls.spec, prices.extended[1:]) else 0
    states = owned + shard * slots + job.optimizer.scalar_bytes
    fused = job.optimizer.fused and is_fusible(cls.spec, option.state_dtype, option.layouts(), prices.extended[1:])
    workspace = 0 if fused else shard * job.optimizer.workspace_slots
    earlier = shard if job.optimizer.accumulates and not waits else 0
    kept = stored + (0 if tier else states) + (0 if at else earlier)
    rests = kept - stored + (prices.nbytes(cls.spec, (R, *option.resting)) if stored else 0)
    accumulated = grad if m > 1 else 0
    there = states + (shard if waits else 0)
    away = {tier: there * n} if tier else {}
    if at:
        work = workspace + brought
        away[at] = away.get(at, 0) + (0 if waits else (shard + earlier) * n)
        return ParamHeld(cost, (kept + accumulated) * n, kept * n, away=away, away_work={at: work}, here=stays)
    work, one = workspace + brought, grad if m == 1 and not waits else 0
    left = rests if waits else rests + shard
    return ParamHeld(cost, (kept + accumulated) * n, left * n, work, one, away=away, here=stays)


def _reduced(job: Job, prices: MeshPrices, master: TensorSpec, option: ParamOption) -> Price:
    """An accumulated gradient brought to the optimizer's layout, in the dtype it is summed over ranks in; what one
    gradient alone accumulates is not cast to it."""
    source, target, wire = (R, *option.grad), (R, *option.state), REDUCE_DTYPES[job.reduce_dtype]
    sent = TensorSpec(wire, master.shape) if wire and prices.sums(master, source, target) else master
    moved = prices.reshard(sent, source, target, bundled=True)
    assert moved is not None
    return add(moved, prices.cast(sent, master.dtype, target))


def _reads(job: Job, cls: ParamClass) -> int:
    """How many segments' forwards and backwards read a class' parameters."""
    counts = Counter(segment.kind for segment in job.program.segments)
    found = 0
    for index, slot in cls.slots:
        kind = job.program.kinds[index]
        phases = {op.phase for op in kind.graph.ops if kind.params[slot] in op.tensors}
        found += counts[index] * len(phases)
    return found
