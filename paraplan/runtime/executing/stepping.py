"""Driving recordings: all ranks of a mesh in one thread, or this process' own rank alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext

from paraplan.ir.errors import RuntimeFailure
from paraplan.ir.execution.rank_program import RankProgram, Step
from paraplan.ir.machine.mesh import Mesh
from paraplan.ir.model.sources import Locate, no_source
from paraplan.runtime.executing.executor import Executor, Modules, make_tapes
from paraplan.runtime.executing.observers import Observer
from paraplan.runtime.executing.plain import plainly
from paraplan.runtime.transport.tier_copies import Copier
from paraplan.runtime.transport.transport import InProcessTransport, Transport


def make_executors(
    mesh: Mesh | Sequence[Mesh],
    programs: Sequence[RankProgram],
    rank_class: Sequence[int],
    modules: Sequence[Modules],
    locate: Locate = no_source,
    device: str = "cpu",
) -> tuple[InProcessTransport, list[Executor]]:
    """An in-process transport and one executor per device of the mesh (several: of all of them, by number).

    Args:
        mesh: devices are ranks; no two meshes share one.
        programs, modules: per rank class.
        rank_class: class of every rank.
        locate: see `Executor`.
        device: of every rank.
    """
    transport = InProcessTransport(*([mesh] if isinstance(mesh, Mesh) else mesh))
    tapes = [make_tapes(*pair) for pair in zip(programs, modules, strict=True)]
    mesh_of = transport.mesh_of
    executors = [
        Executor(
            programs[rank_class[rank]],
            modules[rank_class[rank]],
            mesh_of[rank].coordinates(rank),
            transport.port(rank),
            rank,
            locate,
            tapes[rank_class[rank]],
            Copier(device, rank=rank),
        )
        for rank in (mesh.devices if isinstance(mesh, Mesh) else sorted(mesh_of))
    ]
    return transport, executors


def step_together(
    transport: Transport,
    executors: Sequence[Executor],
    steps: Sequence[Iterable[Step]],
    observer: Observer | None = None,
) -> None:
    """Record the given steps of every rank of this process, each going on until it waits for a peer.

    Args:
        transport: of all of them.
        executors: one per rank.
        steps: of each.
        observer: of all of them; left out, each one's account. Another tracks nothing, which takes a third of the time.
    Raises:
        RuntimeFailure: a rank failed, or all that are left wait for each other.
    """
    tracker, tracks = transport.tracker, observer is None
    running = [(executor, executor.record(mine, observer)) for executor, mine in zip(executors, steps, strict=True)]
    with plainly(), tracker if tracks else nullcontext():
        while running:
            issued = transport.num_issued
            left = []
            for executor, recording in running:
                with tracker.booking(executor.account.ledger if tracks else None):
                    if next(recording, "end") != "end":
                        left.append((executor, recording))
            # Only what is issued can end a wait: a round in which nobody issues and nobody ends is the last.
            if len(left) == len(running) and transport.num_issued == issued:
                raise RuntimeFailure(f"ranks wait for each other: {'; '.join(_last(executor) for executor, _ in left)}")
            running = left


def _last(executor: Executor) -> str:
    last = executor.account.entries[-1] if executor.account.entries else None
    return f"rank {executor.rank} after {'nothing' if last is None else f'{last.note} {last.target} of {last.action}'}"
