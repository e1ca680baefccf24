"""Logical meshes worth solving: the devices arranged along one, two or three axes.

Devices are numbered node by node, so an inner axis no longer than a node stays inside it. One axis and every split into
two are always tried. The option space grows with the third power of what an op may do along an axis: where it is small,
all splits into three are tried; else those with an axis boundary at the edge of a node, so that no axis crosses nodes
that could stay inside one.
"""

from __future__ import annotations

import msgspec

from paraplan.ir.machine.mesh import Mesh, make_mesh
from paraplan.ir.model.program import Program
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.sharding.expert_pins import EXPERT_AXES
from paraplan.rules.graph_strategies import op_signature
from paraplan.rules.strategies import dims_of, mesh_choices

MOST_OPTIONS = 5_000
"""Op strategies (about) up to which every split into three axes is tried."""


def candidate_meshes(job: Job, constraints: Constraints) -> tuple[Mesh, ...]:
    """Those of what is pinned if anything is; else all worth solving, those that fit nodes first."""
    n = job.cluster.num_devices
    inner = min(group.devices_per_node for group in job.cluster.groups)
    pinned = _pinned(n, inner, constraints)
    if pinned:
        return pinned
    shapes: dict[tuple[int, ...], None] = {}
    if 1 < inner < n and n % inner == 0:
        shapes[n // inner, inner] = None
    shapes[n,] = None
    divisors = [a for a in range(2, n) if n % a == 0]
    shapes.update(dict.fromkeys((a, n // a) for a in divisors))
    threes = [(a, b, n // a // b) for a in divisors for b in divisors if a * b in divisors]
    small = num_options(job.program, 3) <= MOST_OPTIONS
    shapes.update(dict.fromkeys(shape for shape in threes if small or inner in (shape[2], shape[1] * shape[2])))
    return tuple(make_mesh(shape, tuple(f"axis{i}" for i in range(len(shape)))) for shape in shapes)


def num_options(program: Program, num_axes: int) -> int:
    """About how many strategies the program's distinct ops have on a mesh of so many axes."""
    total = 0
    for kind in program.kinds:
        choices = {
            op_signature(op, kind.graph.values): len(mesh_choices(dims_of(op, kind.graph.values)))
            for op in kind.graph.ops
        }
        total += sum(count**num_axes for count in choices.values())
    return total


def _pinned(n: int, inner: int, c: Constraints) -> tuple[Mesh, ...]:
    """One mesh, and where experts' ranks span nodes of `inner` devices a second one, with an axis over those nodes."""
    if c.mesh is not None:
        return (make_mesh(c.mesh, tuple(f"axis{i}" for i in range(len(c.mesh)))),)
    if meshes_free(c):
        return ()
    tp, cp, ep = c.tp or 1, c.cp or 1, c.ep or 1
    dp = c.dp if c.dp is not None else n // (tp * cp)
    behind = max(1, n // dp)
    local = inner // behind
    splits = 1 < local < ep and inner % behind == 0 and ep % local == 0
    found = []
    for nodes in (1, ep // local) if splits else (1,):
        experts = zip(EXPERT_AXES, (nodes, ep // nodes), strict=True)
        sizes = (("dp", dp // ep), *experts, ("cp", cp), ("tp", tp), ("free", behind // (tp * cp)))
        named = [(name, size) for name, size in sizes if size > 1] or [("dp", 1)]
        found.append(make_mesh(tuple(size for _, size in named), tuple(name for name, _ in named)))
    return tuple(found)


def meshes_free(constraints: Constraints) -> bool:
    """Whether neither a mesh nor a degree is pinned, so that a search chooses meshes."""
    c = constraints
    return all(each is None for each in (c.mesh, c.dp, c.tp, c.cp, c.ep, c.zero))


def dividing_data(constraints: Constraints, num_devices: int) -> Constraints | None:
    """The constraints, without their mesh, where data parallelism over all devices is open to them at every ZeRO level;
    else None."""
    c = constraints
    if any(each is not None for each in (c.tp, c.cp, c.ep, c.zero)) or c.dp not in (None, num_devices):
        return None
    return msgspec.structs.replace(c, mesh=None) if c.mesh in (None, (num_devices,)) else None
