"""How the collectives of `ir.machine.collectives` are run: over torch.distributed, and in one process on all ranks'
tensors.

A start is called by emitted code as `start(x, reduction, n, process group, *route)`; what it returns is under way until
it is waited for. An exchange takes the inputs of an axis' ranks, in order, and gives what each of them ends with, which
may be views of inputs and of one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paraplan.ir.errors import RuntimeFailure
from paraplan.ir.machine.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER, ROUTE
from paraplan.runtime.executing.torch_private import exchange_rows, rank_in_group
from paraplan.runtime.transport.row_counts import row_counts


class UnevenRoute(NamedTuple):
    """How an uneven collective goes: rows sent to and received from each rank, rows of the result, rows priced."""

    sent: Tensor
    received: Tensor
    rows: int
    priced_rows: int = 0


class Implementation(NamedTuple):
    """One collective.

    Attributes:
        start: starts it, over a process group.
        exchange: of the inputs, the reduction, and routes where it is uneven, all ranks' results.
        start_in_place: starts it with the input overwritten; None where it cannot.
    """

    start: Callable[..., Tensor]
    exchange: Callable[[Sequence[Tensor], str, Sequence[UnevenRoute]], Sequence[Tensor]]
    start_in_place: Callable[..., Tensor] | None = None


def as_sent(x: Tensor) -> Tensor:
    """x as backends know it: Gloo has no float8, whose bytes go as integers; complex numbers go as pairs of floats."""
    if x.is_complex():
        return torch.view_as_real(x)
    return x.view(torch.uint8) if x.element_size() == 1 and x.is_floating_point() else x


def _as_meant(issued: Tensor, dtype: torch.dtype) -> Tensor:
    if issued.dtype == dtype:
        return issued
    return torch.view_as_complex(issued) if dtype.is_complex else issued.view(dtype)


def start_all_reduce(x: Tensor, reduction: str, n: int, group: str) -> Tensor:
    """Starts reducing x.

    Args:
        x: a rank's contribution.
        reduction: torch's name of it.
        n: ranks of the group.
        group: its name.
    """
    return _as_meant(torch.ops._c10d_functional.all_reduce(as_sent(x), reduction, group), x.dtype)


def start_all_reduce_(x: Tensor, reduction: str, n: int, group: str) -> Tensor:
    """Starts reducing x in place.

    Args:
        x, reduction, n, group: as of `start_all_reduce`.
    """
    return _as_meant(torch.ops._c10d_functional.all_reduce_(as_sent(x), reduction, group), x.dtype)


def _reduced(inputs: Sequence[Tensor], reduction: str) -> Tensor:
    total = inputs[0].clone()
    for x in inputs[1:]:
        total = torch.maximum(total, x) if reduction == "max" else total.add_(x)
    return total


def start_all_gather(x: Tensor, reduction: str, n: int, group: str) -> Tensor:
    """Starts gathering x of every rank.

    Not by `all_gather_into_tensor`: over Gloo it is the one collective here whose name ("ALLGATHER_COALESCED") does not
    fit into a string without memory of its own, and on torch 2.13 both threads of a group write the name of what they
    completed last into one string, without a lock, so that memory is freed twice now and then.

    Args:
        x, n, group: as of `start_all_reduce`.
        reduction: none.
    """
    out = x.new_empty(ALL_GATHER.result_shape(x.shape, n))
    issued = torch.ops._c10d_functional.all_gather_into_tensor_out(as_sent(x), n, group, out=as_sent(out))
    return _as_meant(issued, x.dtype)


def start_reduce_scatter(x: Tensor, reduction: str, n: int, group: str) -> Tensor:
    """Starts reducing x, each rank to have its block.

    Args:
        x, reduction, n, group: as of `start_all_reduce`; blocks of x lie along dim 0.
    """
    made = torch.ops._c10d_functional.reduce_scatter_tensor(as_sent(x), reduction, n, group)
    return _as_meant(made, x.dtype)


def start_all_to_all(x: Tensor, reduction: str, n: int, group: str) -> Tensor:
    """Starts sending each rank its block of x.

    Args:
        x, n, group: as of `start_all_reduce`; blocks of x lie along dim 0.
        reduction: none.
    """
    rows = [x.shape[0] // n] * n
    issued = torch.ops._c10d_functional.all_to_all_single(as_sent(x), rows, rows, group)
    return _as_meant(issued, x.dtype)


def start_permute(x: Tensor, reduction: str, n: int, group: str) -> Tensor:
    """Starts sending x to the next rank and receiving the previous one's: an uneven all-to-all.

    Args:
        x, n, group: as of `start_all_reduce`.
        reduction: none.
    """
    rank = rank_in_group(group)
    sends, receives = [0] * n, [0] * n
    sends[(rank + 1) % n] = receives[(rank - 1) % n] = x.shape[0]
    issued = torch.ops._c10d_functional.all_to_all_single(as_sent(x), receives, sends, group)
    return _as_meant(issued, x.dtype)


def start_route(
    x: Tensor, reduction: str, n: int, group: str, sent: Tensor, received: Tensor, rows: int, priced_rows: int = 0
) -> Tensor:
    """Starts sending each rank its rows of x, which lie one after another; they arrive likewise, zeros after them.

    Args:
        x, n, group: as of `start_all_reduce`; rows lie along dim 0, in the order of the ranks they go to.
        reduction: none.
        sent, received: rows to and from every rank.
        rows: room for what arrives.
        priced_rows: what it was priced at; not used here.
    """
    out = x.new_empty(ROUTE.result_shape(x.shape, n, rows))
    sends, receives = row_counts(sent, received)
    out[sum(receives) :].zero_()
    exchange_rows(as_sent(out[: sum(receives)]), as_sent(x[: sum(sends)]), receives, sends, group)
    return out


def _routed(inputs: Sequence[Tensor], routes: Sequence[UnevenRoute]) -> list[Tensor]:
    """What each rank has after an all-to-all of unequal parts.

    Raises:
        RuntimeFailure: ranks disagree on what goes from one to another.
    """
    sent = [route.sent.tolist() for route in routes]
    found = []
    for index, route in enumerate(routes):
        if route.received.tolist() != [row[index] for row in sent]:
            raise RuntimeFailure(f"route: place {index} expects {route.received.tolist()} rows, its peers send {sent}")
        places = [sum(row[:index]) for row in sent]
        rows = [x[at : at + row[index]] for x, at, row in zip(inputs, places, sent, strict=True)]
        short = route.rows - sum(row[index] for row in sent)
        found.append(torch.cat([*rows, rows[0].new_zeros((short, *rows[0].shape[1:]))]))
    return found


IMPLEMENTATIONS = {
    ALL_REDUCE.name: Implementation(
        start_all_reduce, lambda inputs, reduction, _: [_reduced(inputs, reduction)] * len(inputs), start_all_reduce_
    ),
    ALL_GATHER.name: Implementation(start_all_gather, lambda inputs, *_: [torch.cat([*inputs])] * len(inputs)),
    REDUCE_SCATTER.name: Implementation(
        start_reduce_scatter, lambda inputs, reduction, _: _reduced(inputs, reduction).chunk(len(inputs))
    ),
    ALL_TO_ALL.name: Implementation(
        start_all_to_all,
        lambda inputs, *_: [torch.cat(blocks) for blocks in zip(*(x.chunk(len(inputs)) for x in inputs), strict=True)],
    ),
    PERMUTE.name: Implementation(start_permute, lambda inputs, *_: [*inputs[-1:], *inputs[:-1]]),
    ROUTE.name: Implementation(start_route, lambda inputs, _, routes: _routed(inputs, routes)),
}
"""By the collective's name."""
