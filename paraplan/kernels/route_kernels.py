"""Kernels around an exchange of tokens with the ranks that hold their experts: who goes where, and adding up.

The experts lie in equal runs, `held` on each of n ranks. A token goes once to every rank that has one of its choices.
Buffers have the sizes of the worst case, so that memory is known beforehand: a rank sends at most min(n, choices) times
its tokens, and receives all tokens of the axis at most. What is really sent (`route` in
`runtime.executing.instructions`) is what was chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor


def route_plan(ids: Tensor, n: int, held: int, e_start: int = 0) -> tuple[Tensor, Tensor]:
    """Which tokens go to which rank.

    Args:
        ids: [token, choice], numbers of experts; one that none of the ranks has is nobody.
        n: ranks.
        held: experts on each.
        e_start: number of the first that any of them has.
    Returns:
        tokens: [min(n, choices) · token], those for the first rank first; what follows the last is arbitrary.
        sent: [rank], how many each gets.
    """
    count, choices = ids.shape
    tokens = ids.new_empty(min(n, choices) * count)
    sent = ids.new_empty(n)
    goes = torch.zeros(n + 2, count, dtype=torch.uint8, device=ids.device)  # those of nobody before and after the ranks
    firsts = torch.arange(e_start, e_start + n * held + 1, held, device=ids.device)
    goes.t().scatter_(1, torch.bucketize(ids.contiguous(), firsts, right=True), 1)
    torch.sum(goes[1:-1], 1, dtype=torch.int64, out=sent)
    order = goes[1:-1].view(-1).sort(descending=True, stable=True)[1]
    torch.remainder(order[: tokens.shape[0]], count, out=tokens)
    return tokens, sent


def route_here(ids: Tensor, weights: Tensor, n: int, held: int, e_start: int) -> tuple[Tensor, Tensor, Tensor]:
    """What of all tokens comes here, in the order in which it comes: rank by rank, each rank's tokens in theirs.

    Args:
        ids, weights: [token, choice] of all ranks.
        n: ranks.
        held: experts on each.
        e_start: number of the first held here.
    Returns:
        ids, weights: of the tokens that come, then of the others (which have no expert here).
        received: [rank], how many come from each.
    """
    here_ids, here_weights, received = torch.empty_like(ids), torch.empty_like(weights), ids.new_empty(n)
    comes = ((ids >= e_start) & (ids < e_start + held)).any(1)
    torch.sum(comes.view(n, -1), 1, dtype=torch.int64, out=received)
    order = comes.sort(descending=True, stable=True)[1]
    torch.index_select(ids, 0, order, out=here_ids)
    torch.index_select(weights, 0, order, out=here_weights)
    return here_ids, here_weights, received


def route_add(x: Tensor, tokens: Tensor, count: int) -> Tensor:
    """The sums of rows by the token they are of: [count, n].

    Args:
        x: [row, n], the rows that came back, in the order of `tokens`; those that nobody sent are zeros.
        tokens: [row], as `route_plan` gives them.
        count: tokens there are.
    """
    return x.new_zeros(count, x.shape[1]).index_add_(0, tokens, x)
