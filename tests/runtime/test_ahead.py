"""Batches made ahead: in order, none lost, errors where they belong, never more than one; on CUDA pinned and not waited
for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paraplan.runtime import batch as batch_module
from paraplan.runtime.batch import ShardedBatch, microbatches, shard_batch
from paraplan.runtime.in_process import InProcessTrainer
from paraplan.runtime.optimizers.prefetch import Ahead
from paraplan.runtime.trainer import Trainer
from tests.runtime import plans


class Loader:
    """Yields 0, 1, ...; raises at some, goes on after it. `taken` says how far it was read."""

    def __init__(self, count: int, raises: tuple[int, ...] = ()) -> None:
        self.count, self.raises, self.taken = count, raises, 0
        self.threads: set[int] = set()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.threads.add(threading.get_ident())
        time.sleep(0.002)
        index, self.taken = self.taken, self.taken + 1
        if index in self.raises:
            raise OSError(f"file {index}")
        if index >= self.count:
            raise StopIteration
        return index


def _settled(loader: Loader, count: int) -> bool:
    time.sleep(0.05)
    return loader.taken == count


def test_items_come_in_order_one_ahead() -> None:
    loader = Loader(20)
    ahead, begun = Ahead(lambda index: index * 10, loader), threading.get_ident()
    assert _settled(loader, 0), "nothing is taken before it is asked for"
    for index in range(20):
        assert next(ahead) == index * 10
        assert index not in (0, 7, 19) or _settled(loader, index + 2)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(ahead)
    assert begun not in loader.threads and len(loader.threads) == 1
    assert list(Ahead(str, ())) == [] and list(Ahead(str, [1, 2])) == ["1", "2"]


@pytest.mark.parametrize("where", ["loader", "make"])
def test_an_error_comes_at_its_item_and_nothing_is_taken_after_it(where: str) -> None:
    loader = Loader(4, (2,) if where == "loader" else ())

    def make(index: int) -> int:
        if index == 2 and where == "make":
            raise OSError("file 2")
        return index

    ahead, plain = Ahead(make, loader), map(make, Loader(4, loader.raises))
    assert [next(ahead), next(ahead)] == [next(plain), next(plain)] == [0, 1]
    with pytest.raises(OSError, match="file 2"):
        next(ahead)
    assert _settled(loader, 3), "it ran on after the error"
    with pytest.raises(OSError, match="file 2"):
        next(plain)
    assert list(ahead) == list(plain) == [3]


def test_who_leaves_early_finds_the_loader_idle() -> None:
    loader, before = Loader(10), threading.active_count()
    for index in Ahead(int, loader):
        if index == 3:
            break
    assert loader.taken == 5 and threading.active_count() == before
    assert list(Ahead(int, loader)) == [5, 6, 7, 8, 9]


def test_a_loader_that_cannot_be_iterated_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="not iterable"):
        Ahead(int, 3)  # type: ignore[arg-type]


def test_the_thread_begins_with_what_it_is_told() -> None:
    told: list[int] = []
    loader = Loader(2)
    assert list(Ahead(int, loader, lambda: told.append(threading.get_ident()))) == [0, 1]
    assert set(told) == loader.threads


def test_a_trainer_makes_batches_ahead_for_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", told.append)
    for device, taken in (("cpu", 1), ("cuda", 2)):
        loader, trainer = Loader(5), SimpleNamespace(transport=SimpleNamespace(device=device), cut=str)
        batches = Trainer.shard(trainer, loader)  # type: ignore[arg-type]
        assert next(batches) == "0" and _settled(loader, taken)
        assert [*batches] == ["1", "2", "3", "4"]
    assert told == [3]


def test_a_batch_for_cuda_is_pinned_and_copied_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what torch is asked for: no device is needed."""
    plan, programs = plans.planned(plans.SEEDS[0])
    local = InProcessTrainer(plan, programs, plans.emitted(programs), plans.net())
    stage, outer = local.ranks[0].stage, programs[0].outer
    on_cpu = shard_batch(plan, stage, (0,) * len(stage.mesh.shape), plans.batch(0))
    wanted = microbatches(plan, stage, on_cpu, outer)
    pinned: list[Tensor] = []
    asked: list[dict[str, Any]] = []
    to = Tensor.to

    def noted(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and args[0] == "cuda":
            asked.append(kwargs)
            args = ("cpu", *args[1:])
        return to(x, *args, **kwargs)

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        pinned.append(torch.empty(shape, dtype=dtype))
        return pinned[-1]

    monkeypatch.setattr(batch_module, "pinned", empty)
    monkeypatch.setattr(Tensor, "to", noted)
    batch = shard_batch(plan, stage, (0,) * len(stage.mesh.shape), plans.batch(0), "cuda")
    assert not asked and len(pinned) == len(batch) == len(stage.batch)
    found = microbatches(plan, stage, batch, outer, "cuda")
    assert len(asked) == len(found) == len(wanted) and all(each["non_blocking"] for each in asked)
    assert all(torch.equal(found[name], x) and found[name].is_contiguous() for name, x in wanted.items())
    held = {x.untyped_storage().data_ptr() for x in batch.values()}
    assert not any(x.untyped_storage().data_ptr() in held for x in found.values())
    assert isinstance(batch, ShardedBatch)
