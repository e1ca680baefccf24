"""How many microbatches a search tries, and in which order.

Usual: the pinned count, or the powers of two that each replica's batch divides into. That is all where one of them has
a plan. Where none has, every other divisor is tried: the most first, since it holds least and so tells soonest whether
anything fits, and then, as fewer are mostly faster, the fewest that fit. What is not tried is not called infeasible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.model.program import Program
from paraplan.planner.constraints import Constraints
from paraplan.planner.sharding.expert_pins import EXPERT_AXES
from paraplan.rules.time_axis import splittable

Found = TypeVar("Found")

USUAL = (1, 2, 4, 8, 16)
MOST_ORDERED = 64
"""In more, steps are too long to be ordered op by op."""


def usual_counts(program: Program, constraints: Constraints, mesh: Mesh) -> tuple[int, ...]:
    """The pinned count, or powers of two, fewest first; 1 where the batch does not divide over the mesh's replicas.

    Args:
        program: whose batch is cut.
        constraints: that pin the count, or do not.
        mesh: whose replicas share a microbatch.
    """
    if constraints.microbatches is not None:
        return (constraints.microbatches,)
    batch, replicas = program.batch_size, _replicas(mesh)
    return tuple(m for m in USUAL if batch % (m * replicas) == 0 and splittable(program, m)) or (1,)


def other_counts(program: Program, constraints: Constraints, mesh: Mesh) -> tuple[int, ...]:
    """Every other count in which each replica has as many rows as any, fewest first; nothing where it is pinned.

    Args:
        program, constraints, mesh: as of `usual_counts`.
    """
    if constraints.microbatches is not None:
        return ()
    usual = usual_counts(program, constraints, mesh)
    return tuple(m for m in _divisors(program.batch_size, _replicas(mesh)) if m not in usual and splittable(program, m))


def most_to_order(program: Program, constraints: Constraints, mesh: Mesh) -> tuple[int, ...]:
    """Counts whose steps are short enough to be ordered op by op, most first: usual ones, and another.

    Args:
        program, constraints, mesh: as of `usual_counts`.
    """
    others = [m for m in other_counts(program, constraints, mesh) if m <= MOST_ORDERED][-1:]
    return tuple(sorted({*others, *usual_counts(program, constraints, mesh)}, reverse=True))


def most_first(counts: Sequence[int], beyond: int, tried: Callable[[int], list[Found]]) -> list[Found]:
    """What is found with the most microbatches, and with the fewest above `beyond` (fewer found nothing) that give
    anything; where the most give nothing, with the most of the others that do.

    Args:
        counts: fewest first.
        beyond: the most already tried in vain.
        tried: what a count gives.
    """
    if not counts:
        return []
    *others, most = counts
    found = tried(most)
    for count in [each for each in others if each > beyond] if found else reversed(others):
        if here := tried(count):
            return found + here
    return found


def _divisors(batch: int, replicas: int) -> list[int]:
    rows, left = divmod(batch, replicas)
    return [] if left else [m for m in range(1, rows + 1) if rows % m == 0]


def _replicas(mesh: Mesh) -> int:
    """Ranks that are pinned to a part of the batch each."""
    found = 1
    for axis, size in zip(mesh.axes, mesh.shape, strict=True):
        found *= size if axis in ("dp", *EXPERT_AXES) else 1
    return found
