"""A mixture of experts of fixed capacity (GShard, Switch): what each expert takes is known before any token is seen.

Tokens are routed in groups. Within a group an expert takes at most `capacity` of them, first choices before second
ones and earlier tokens before later ones; a token no expert has room for passes by on the residual path. Routing is
written as two masks [group, token, expert, slot] and everything else as einsums over them, so that the rows given to
the experts, [expert, group, slot, hidden], lie by group on one side of their experts and by expert inside: with groups
and experts sharded over the same ranks that change is an all-to-all.

Source: Lepikhin et al. 2020, GShard (arXiv 2006.16668), algorithm 1; Fedus et al. 2021, Switch Transformers
(arXiv 2101.03961), for one choice and the float32 router.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Experts(nn.Module):
    """Perceptrons side by side.

    Args:
        experts: how many.
        hidden, width: of each.
    """

    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)
        self.b_in = nn.Parameter(torch.zeros(experts, width))
        self.w_out = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x: [expert, group, slot, hidden] -> the same."""
        inner = torch.einsum("egch,ehf->egcf", x, self.w_in) + self.b_in[:, None, None]
        return torch.einsum("egcf,efh->egch", F.relu(inner), self.w_out)


class Mixture(nn.Module):
    """Routes tokens to experts and back.

    Args:
        experts: how many.
        choices: experts a token asks for.
        hidden, width: of each expert.
        capacity_factor: slots of all experts over the choices of all tokens.
        group: tokens routed together.
    """

    def __init__(self, experts: int, choices: int, hidden: int, width: int, capacity_factor: float, group: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(experts, hidden, width)
        self.choices, self.group = choices, group
        self.capacity = max(1, math.ceil(choices * group * capacity_factor / experts))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of the chosen slots, and the loss that balances the experts.

        x: [group, token, hidden] -> [group, token, expert, slot] (zero where a token has no slot), []. The loss is
        E · Σ_e (share of first choices)_e · (mean probability)_e per group, averaged: 1 where all is even.
        """
        probs = F.softmax(self.router(x).float(), -1)
        gates, experts = probs.topk(self.choices, -1)
        if self.choices > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        count = probs.shape[-1]
        chosen = (experts.unsqueeze(-1) == torch.arange(count, device=x.device)).float()
        share, mean = chosen[:, :, 0].mean(1), probs.mean(1)
        slots = torch.arange(self.capacity, device=x.device)
        combine, taken = 0.0, 0.0
        for choice in range(self.choices):
            mask = chosen[:, :, choice]
            place = (mask.cumsum(1) - 1 + taken) * mask
            taken = taken + mask.sum(1, keepdim=True)
            slot = (place.sum(-1, keepdim=True) == slots).float()
            combine = combine + torch.einsum("gt,gte,gtc->gtec", gates[:, :, choice], mask, slot)
        return combine, (share * mean).sum(-1).mean() * count

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [batch, token, hidden] -> the same, and the balancing loss."""
        tokens = x.reshape(-1, self.group, x.shape[-1])
        combine, balance = self.route(tokens)
        dispatch = (combine > 0).to(x.dtype)
        given = torch.einsum("gtec,gth->egch", dispatch, tokens)
        out = torch.einsum("gtec,egch->gth", combine.to(x.dtype), self.experts(given))
        return out.reshape(x.shape), balance


class Block(nn.Module):
    """Attention and a mixture, each beside a residual path."""

    def __init__(self, hidden: int, heads: int, mixture: Mixture, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.heads, self.mixture, self.dropout = heads, mixture, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [batch, token, hidden] -> the same, and the balancing loss."""
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        mixed, balance = self.mixture(self.norms[1](x))
        return x + self.dropout(mixed), balance


class Switch(nn.Module):
    """A causal language model.

    Args:
        vocabulary: token ids.
        hidden, width, heads, layers: sizes of the transformer; `width` is an expert's.
        experts, choices, capacity_factor, group: see `Mixture`.
        balance: weight of the balancing loss.
        dropout: on what the mixture adds.
    """

    def __init__(
        self,
        vocabulary: int = 96,
        hidden: int = 32,
        width: int = 48,
        heads: int = 4,
        layers: int = 2,
        experts: int = 8,
        choices: int = 1,
        capacity_factor: float = 1.25,
        group: int = 16,
        balance: float = 0.01,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(
            Block(hidden, heads, Mixture(experts, choices, hidden, width, capacity_factor, group), dropout)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)
        self.balance = balance

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of the labels (-100 is ignored) and the mixtures' balancing losses.

        Args:
            tokens, labels: [batch, token]; `group` divides token.
        """
        x, balances = self.embedding(tokens), []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
        return loss + self.balance * torch.stack(balances).mean()


def factory(batch: int = 8, seq: int = 16, **sizes: float) -> tuple[Switch, dict[str, Tensor]]:
    """A small model and a batch, for `paraplan plan examples.models.switch:factory`."""
    draw = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(0, 96, (batch, seq), generator=draw) for _ in range(2))
    return Switch(**sizes), {"tokens": tokens, "labels": labels}  # type: ignore[arg-type]
