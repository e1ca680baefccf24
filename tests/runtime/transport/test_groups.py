"""Process groups have the job's time limit, messages groups of their own; each rank and thread has its GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paraplan.ir.errors import ConstraintError, RuntimeFailure
from paraplan.runtime.optimizers.delayed import LateUpdates
from paraplan.runtime.transport.launch import host_threads, init_distributed, spawn_local
from paraplan.runtime.transport.tier_copies import Copier, CopyUnderWay

WORKER = str(Path(__file__).with_name("groups_worker.py"))


def test_every_group_has_the_jobs_limit_and_every_pair_its_own(tmp_path: Path) -> None:
    assert spawn_local(4, WORKER, [str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("done*")} == {f"done{rank}" for rank in range(4)}


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), "60", 1e300])
def test_impossible_limits_are_refused(wrong: Any) -> None:
    with pytest.raises(ConstraintError, match=r"timeout_s=.*: give the seconds"):
        init_distributed("gloo", timeout_s=wrong)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[tuple[int, Any]]]:
    """A machine of so many GPUs; who sets which device, by thread."""

    def machine(count: int) -> list[tuple[int, Any]]:
        told: list[tuple[int, Any]] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: told.append((threading.get_ident(), device)))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        return told

    return machine


def _joined(monkeypatch: pytest.MonkeyPatch, rank: int, backend: str | None) -> dict[str, Any]:
    given: dict[str, Any] = {}
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: given.update(more, backend=backend))
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    assert init_distributed(backend, timeout_s=60) == (5, 8)
    return given


@pytest.mark.parametrize(("count", "rank", "device"), [(4, 2, 2), (1, 2, 0)])
def test_a_rank_joins_with_its_gpu(
    count: int, rank: int, device: int, gpus: Callable[[int], list[tuple[int, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    told, wanted = gpus(count), torch.device("cuda", device)
    given = _joined(monkeypatch, rank, "nccl")
    assert told == [(threading.get_ident(), wanted)]
    assert given == {"backend": "nccl", "device_id": wanted, "timeout": timedelta(seconds=60)}


def test_a_rank_without_a_gpu_is_refused_or_uses_gloo(
    gpus: Callable[[int], list[tuple[int, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(2)
    with pytest.raises(RuntimeFailure, match="LOCAL_RANK is 2 and this process sees 2 GPUs"):
        _joined(monkeypatch, 2, "nccl")
    assert _joined(monkeypatch, 2, None) == {"backend": "gloo", "timeout": timedelta(seconds=60)}


def test_threads_work_on_the_device_of_who_starts_them(gpus: Callable[[int], list[tuple[int, Any]]]) -> None:
    told, found = gpus(4), []
    flight = CopyUnderWay(lambda: found.append(threading.get_ident()), "a copy", 0.0)
    copier = Copier("cuda")
    copier._queue("disk", "out").put(flight)
    assert flight.done.wait(10)
    assert told == [(found[0], 3)] and found[0] != threading.get_ident()
    told.clear()
    rank = SimpleNamespace(
        executor=SimpleNamespace(rank=0), device="cuda", params={}, late=frozenset(), update_late_with=lambda late: None
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    late = LateUpdates(rank, optimizer, None, True, None)  # type: ignore[arg-type]
    assert late._thread is not None
    assert told == [] and late._thread.submit(threading.get_ident).result(10) == told[0][0] and told[0][1] == 3
    late._thread.shutdown()


def test_a_cpu_process_sets_no_device(gpus: Callable[[int], list[tuple[int, Any]]]) -> None:
    told, flight, copier = gpus(4), CopyUnderWay(lambda: None, "a copy", 0.0), Copier(beside=True)
    copier._queue("disk", "out").put(flight)
    assert flight.done.wait(10) and told == []


@pytest.mark.parametrize(
    ("env", "threads"),
    [
        ({}, 16),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "8"}, 2),
        ({"OMP_NUM_THREADS": "5"}, 5),
        ({"LOCAL_WORLD_SIZE": "32"}, 1),
    ],
)
def test_ranks_share_the_cores_of_their_node(env: dict[str, str], threads: int) -> None:
    assert host_threads(env, cores=16) == threads
