"""What every collective is, by definition: parts of a dense array that ranks put in, and those they end with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paraplan.ir.machine.collectives import COLLECTIVES
from paraplan.runtime.transport.collectives import UnevenRoute

Dims = tuple[int, ...]
Array = NDArray[np.float64]


class Case(NamedTuple):
    """A collective of n ranks; inputs, wanted and routes are per rank."""

    name: str
    reduction: str
    inputs: list[Tensor]
    wanted: list[Tensor]
    routes: tuple[UnevenRoute, ...] = ()

    def route(self, rank: int) -> UnevenRoute | None:
        return self.routes[rank] if self.routes else None


Parts = tuple[list[Array], list[Array]]


def _dense(*shape: int) -> Array:
    """Whole numbers, so that sums are exact in any order."""
    return np.random.default_rng(sum(shape)).integers(-99, 99, shape).astype(np.float64)


def _all_reduce(n: int, block: Dims, reduction: str) -> Parts:
    addends = _dense(n, *block)
    total = addends.max(0) if reduction == "max" else addends.sum(0)
    return [*addends], [total] * n


def _all_gather(n: int, block: Dims, reduction: str) -> Parts:
    whole = _dense(n * block[0], *block[1:])
    return [whole[rank * block[0] : (rank + 1) * block[0]] for rank in range(n)], [whole] * n


def _reduce_scatter(n: int, block: Dims, reduction: str) -> Parts:
    addends = _dense(n, n * block[0], *block[1:])
    total = addends.sum(0)
    return [*addends], [total[rank * block[0] : (rank + 1) * block[0]] for rank in range(n)]


def _all_to_all(n: int, block: Dims, reduction: str) -> Parts:
    sent = _dense(n, n, *block)  # [from, to, ...]
    return [np.concatenate([*sent[rank]]) for rank in range(n)], [np.concatenate([*sent[:, rank]]) for rank in range(n)]


def _permute(n: int, block: Dims, reduction: str) -> Parts:
    whole = _dense(n, *block)
    return [*whole], [*np.roll(whole, 1, 0)]


EVEN: dict[str, Callable[[int, Dims, str], Parts]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "permute": _permute,
}
BLOCKS = ((3, 4), (5,), (1, 2, 3), (2, 1))


def _route(n: int, block: Dims, spare: int) -> Case:
    """Rank s sends (3 s + t) mod 4 rows of `block[1:]` to rank t; buffers hold the most of any rank, and `spare` more,
    of which what is sent is anything."""
    counts = np.array([[(3 * s + t) % 4 for t in range(n)] for s in range(n)])
    rows = [[_dense(counts[s, t], *block[1:]) + s - t for t in range(n)] for s in range(n)]

    def buffers(parts: list[list[Array]], filler: float) -> list[Tensor]:
        found = [np.full((spare + max(len(np.concatenate(each)) for each in parts), *block[1:]), filler) for _ in parts]
        for buffer, each in zip(found, parts, strict=True):
            buffer[: len(np.concatenate(each))] = np.concatenate(each)
        return [*map(torch.tensor, found)]

    wanted = buffers([[rows[s][t] for s in range(n)] for t in range(n)], 0.0)
    routes = tuple(
        UnevenRoute(torch.tensor(counts[rank]), torch.tensor(counts[:, rank]), len(wanted[rank])) for rank in range(n)
    )
    return Case("route", "", buffers(rows, 7.0), wanted, routes)


def cases(n: int) -> Iterator[Case]:
    """Every collective, by every reduction, of several shapes."""
    for name, parts in EVEN.items():
        for reduction in COLLECTIVES[name].reductions or ("",):
            for block in (*BLOCKS, ()) if name == "all_reduce" else BLOCKS:
                inputs, wanted = parts(n, block, reduction)
                yield Case(name, reduction, [*map(torch.tensor, inputs)], [*map(torch.tensor, wanted)])
    for block in BLOCKS:
        yield from (_route(n, block, spare) for spare in (0, 2))
