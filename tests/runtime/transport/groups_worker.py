"""What each of four ranks of the tests of process groups runs (through `spawn_local`): `groups_worker.py <folder>`."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.distributed_c10d import _world

sys.path.insert(0, str(Path(__file__).parents[3]))

from paraplan.ir.machine.mesh import make_mesh, parse_layout
from paraplan.jobs.measuring.link_rank import measure
from paraplan.runtime.executing.torch_private import TorchDispatchMode
from paraplan.runtime.state.checkpoint import Checkpointing
from paraplan.runtime.transport.distributed import DistributedTransport
from paraplan.runtime.transport.launch import init_distributed, leave_job

PAIRS = [(0, 2), (1, 3), (2, 0), (3, 1), (0, 3)]


def limits() -> list[float]:
    """Seconds that each group of this process waits."""
    cpu = torch.device("cpu")
    return [group._get_backend(cpu).options._timeout.total_seconds() for group in _world.pg_map]


def ranks_of(groups: list[str]) -> list[tuple[int, ...]]:
    named = {group.group_name: tuple(dist.get_process_group_ranks(group)) for group in _world.pg_map}
    return [named[name] for name in groups]


def main() -> None:
    folder = Path(sys.argv[1])
    rank, _ = init_distributed("gloo", timeout_s=77)
    torch.set_num_threads(1)
    whole = DistributedTransport(make_mesh((2, 2), ("dp", "tp")))
    assert ranks_of([*whole.groups]) == [(rank % 2, rank % 2 + 2), (rank // 2 * 2, rank // 2 * 2 + 1)]
    halves = DistributedTransport(make_mesh((2,), ("dp",)), make_mesh((2,), ("dp",), 2))
    assert ranks_of([*halves.groups]) == [(rank // 2 * 2, rank // 2 * 2 + 1)]
    before = len(_world.pg_map)
    halves.connect([*PAIRS, PAIRS[0]])
    assert len(_world.pg_map) - before == sum(rank in pair for pair in PAIRS), "a group for a pair and direction"
    messages(halves, rank)
    measure(1 << 10, "cpu")
    assert limits() and set(limits()) == {77.0}, limits()
    init_distributed(timeout_s=88)
    late = DistributedTransport(make_mesh((2,), ("dp",)), make_mesh((2,), ("dp",), 2))
    late.connect(PAIRS)
    assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=88)
    assert limits().count(88.0) == 2 + sum(rank in pair for pair in PAIRS), limits()
    states_on_the_host(folder, rank)
    (folder / f"done{rank}").touch()
    leave_job()


def states_on_the_host(folder: Path, rank: int) -> None:
    """What lives on the host under a transport for CUDA is saved and loaded where it is, with no copy elsewhere."""
    torch.cuda.set_device = lambda device: None  # DeviceMesh sets it, and there is none
    transport = DistributedTransport(make_mesh((2, 2), ("dp", "tp")), device="cuda")
    trainer = SimpleNamespace(transport=transport, _shape=lambda name: (4, 6))
    local, layout = torch.rand(2, 6), parse_layout("S0,R")
    local.fill_(rank // 2)
    beside = transport.mesh_on("cpu")
    with Moved() as moved:
        made = Checkpointing._dtensor(trainer, "w", local, layout)  # type: ignore[arg-type]
    assert not moved.ops, moved.ops
    assert made.device.type == "cpu" and made.to_local().data_ptr() == local.data_ptr()
    assert transport.mesh_on("cuda") is transport.device_mesh and made.device_mesh is beside
    dcp.save({"w": made}, checkpoint_id=folder / "host")
    local.zero_()
    dcp.load({"w": made}, checkpoint_id=folder / "host")
    assert torch.equal(local, torch.full((2, 6), float(rank // 2))), local


class Moved(TorchDispatchMode):
    """Notes copies."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("_to_copy", "copy_", "clone"):
            self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def messages(transport: DistributedTransport, rank: int) -> None:
    """0 waits for 2 before it sends to 2 and 3; neither of them has to wait for what 0 receives."""
    if rank == 0:
        coming = transport.receive(torch.empty(3), 2, "up")
        sent = [transport.send(torch.full((3,), 1.0 + peer), peer, "down") for peer in (2, 3)]
        assert all(transport.ready(handle) for handle in (*sent, coming))
        assert torch.equal(coming.out, torch.full((3,), 30.0)), coming.out
    elif rank in (2, 3):
        handle = transport.receive(torch.empty(3), 0, "down")
        assert transport.ready(handle) and torch.equal(handle.out, torch.full((3,), 1.0 + rank))
        assert rank == 3 or transport.ready(transport.send(handle.out * 10, 0, "up"))


if __name__ == "__main__":
    main()
