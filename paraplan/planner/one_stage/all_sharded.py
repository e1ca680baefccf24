"""The pins of plans that need least memory and are quickly made: what a search falls back on that found nothing.

All parameters and states are sharded over all devices, all activations are made again, and the step takes as many
microbatches as it may: by data-parallel ranks (ZeRO-3), by tensor- and sequence-parallel ones, or by both. With that
pinned, a plan of one stage is one small problem, solved in about a second. Where states and parameters may leave the
device they do. Little else holds less. Where segments are small, or one is most of what is held (a head, its large
vocabulary), one made again may be more than what all save: each is followed by the same with nothing made again.
Gradients that add up may be more than microbatches save, so that the same degrees follow with all of this left open
(`divided`). Where none fits, a search is given up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import msgspec

from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.mesh import Mesh, make_mesh
from paraplan.ir.machine.tier_placement import HOST
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import check_constraints
from paraplan.planner.options.placements import OFFLOAD_STATES
from paraplan.planner.pipeline.meshes import candidate_meshes
from paraplan.planner.pipeline.microbatches import other_counts, usual_counts

MOST_CALLS = 20_000
"""Segments times microbatches of a plan that is quickly made."""


def all_sharded(job: Job, constraints: Constraints) -> Iterator[Constraints]:
    """What is pinned with all else pinned as needs least memory, plans of the least traffic first; nothing of
    pipelines, nor where all that is free already is pinned.

    Args:
        job: what is planned.
        constraints: what is pinned of any plan.
    """
    if constraints.pp not in (None, 1) or constraints.schedule is not None or constraints.stages is not None:
        return
    n, seen = job.cluster.num_devices, [constraints]
    placed = _leanest(constraints)
    for tp in _degrees(constraints, n) or [0]:
        pins = _pinned(placed, tp, n)
        try:
            check_constraints(pins, n)
            mesh = candidate_meshes(job, pins)[0]
        except ConstraintError:
            continue
        pins = msgspec.structs.replace(pins, microbatches=_most(job, pins, mesh))
        for recompute in dict.fromkeys((pins.recompute, constraints.recompute or "none")):
            pins = msgspec.structs.replace(pins, recompute=recompute)
            if pins not in seen:
                seen.append(pins)
                yield pins


def divided(job: Job, constraints: Constraints) -> Iterator[Constraints]:
    """What is pinned with degrees that divide everything, and all else left open.

    Args:
        job, constraints: as of `all_sharded`.
    """
    if constraints.pp not in (None, 1) or constraints.schedule is not None or constraints.stages is not None:
        return
    n, placed = job.cluster.num_devices, _leanest(constraints)
    for tp in _degrees(constraints, n):
        pins = msgspec.structs.replace(_degree(placed, tp, n), pp=1)
        with suppress(ConstraintError):
            check_constraints(pins, n)
            if pins != constraints and candidate_meshes(job, pins):
                yield pins


def _degrees(constraints: Constraints, devices: int) -> list[int]:
    """Degrees of tensor parallelism, those of the least traffic first; none where other degrees are pinned."""
    free = [each is None for each in (constraints.mesh, constraints.cp, constraints.ep)]
    if not all(free) or devices == 1:
        return []
    return [1, devices, *(size for size in range(2, devices) if devices % size == 0)]


def _leanest(constraints: Constraints) -> Constraints:
    """The constraints with states and parameters off the device, as far as they may be."""
    place = max(constraints.places, key=lambda each: (each.params != "", each.states != "", each.update == HOST))
    return constraints.placed(OFFLOAD_STATES[place.text]) if place.states else constraints


def _pinned(constraints: Constraints, tp: int, devices: int) -> Constraints:
    """The constraints with a degree of tensor parallelism, and data parallelism beside it; 0: with what they have."""
    c = msgspec.structs.replace(constraints, pp=1, recompute=constraints.recompute or "full")
    return msgspec.structs.replace(_degree(c, tp, devices), sp=c.sp or (c.tp or tp) > 1) if tp else c


def _degree(c: Constraints, tp: int, devices: int) -> Constraints:
    """With a degree of tensor parallelism, data parallelism beside it, and nothing whole on every rank."""
    tp = c.tp or tp
    dp = c.dp if c.dp is not None else devices // tp
    zero = c.zero if c.zero is not None or dp == 1 else 3
    return msgspec.structs.replace(c, dp=dp, tp=None if tp == 1 else tp, zero=zero)


def _most(job: Job, pins: Constraints, mesh: Mesh) -> int:
    """The most microbatches that are quickly lowered and simulated."""
    replicas = make_mesh((pins.dp or 1,), ("dp",)) if pins.mesh is None else mesh
    counts = {*usual_counts(job.program, pins, replicas), *other_counts(job.program, pins, replicas)}
    return max((each for each in counts if each * len(job.program.segments) <= MOST_CALLS), default=min(counts))
