"""Attention as people write it by hand: no fused kernel, and every way to lay out samples and heads.

Each module takes and gives [batch, sequence, hidden] and projects queries, keys and values with linear layers of its
own, so that tensor parallelism has heads to split. `Stack` makes a language model of one of them, its layers numbered.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _Projected(nn.Module):
    """Projections around what `mix` does with queries, keys and values of [batch, heads, sequence, size]."""

    def __init__(self, hidden: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.heads, self.size = heads, hidden // heads
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        """Heads before the sequence."""
        b, s, _ = x.shape
        return x.view(b, s, -1, self.size).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x)))
        return self.out(y.transpose(1, 2).reshape(x.shape))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Scores, their softmax, and its product with the values."""
        return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(self.size), -1) @ v


def _softmax(scores: Tensor) -> Tensor:
    """In float32 at least."""
    return F.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))


class Causal(_Projected):
    """Scores of later positions are filled in a buffer's mask."""

    def __init__(self, hidden: int, heads: int, sequence: int) -> None:
        super().__init__(hidden, heads, sequence)
        self.register_buffer("later", torch.ones(sequence, sequence, dtype=torch.bool).triu(1))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.mT) * self.size**-0.5
        return torch.matmul(scores.masked_fill(self.later, float("-inf")).softmax(-1), v)


class RelativePositions(_Projected):
    """T5's: a learned number per head and distance is added to the scores, whose softmax is taken in float32."""

    def __init__(self, hidden: int, heads: int, sequence: int) -> None:
        super().__init__(hidden, heads, sequence)
        self.distances = nn.Embedding(2 * sequence - 1, heads)
        place = torch.arange(sequence)
        self.register_buffer("bucket", place[None, :] - place[:, None] + sequence - 1)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += self.distances(self.bucket).permute(2, 0, 1).unsqueeze(0)
        return torch.matmul(_softmax(scores).type_as(scores), v)


class Alibi(_Projected):
    """BLOOM's: samples and heads are merged; a slope per head times the key's place is added to the product."""

    def __init__(self, hidden: int, heads: int, sequence: int) -> None:
        super().__init__(hidden, heads, sequence)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, s, d = q.shape
        places = torch.ones(b, s, dtype=q.dtype).cumsum(-1)
        alibi = (self.slopes[None, :, None] * places[:, None, :]).reshape(b * h, 1, s).to(q.dtype)
        keys = k.transpose(2, 3).reshape(b * h, d, s)
        scores = alibi.baddbmm(q.reshape(b * h, s, d), keys, beta=1.0, alpha=d**-0.5).view(b, h, s, s)
        probs = _softmax(scores).to(q.dtype).view(b * h, s, s)
        return torch.bmm(probs, v.reshape(b * h, s, d)).view(b, h, s, d)


class SequenceFirst(_Projected):
    """fairseq's: [sequence, batch · heads, size] from the projections on, a mask added to all scores alike."""

    def __init__(self, hidden: int, heads: int, sequence: int) -> None:
        super().__init__(hidden, heads, sequence)
        self.register_buffer("mask", torch.full((sequence, sequence), -1e4).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        b, s, hidden = x.shape
        rows = x.transpose(0, 1)
        q, k, v = (
            each(rows).contiguous().view(s, b * self.heads, self.size).transpose(0, 1)
            for each in (self.q, self.k, self.v)
        )
        scores = torch.bmm(q * self.size**-0.5, k.transpose(1, 2))
        scores += self.mask.unsqueeze(0)
        y = torch.bmm(F.softmax(scores, -1), v)
        return self.out(y.transpose(0, 1).contiguous().view(s, b, hidden)).transpose(0, 1)


class Einsum(_Projected):
    """Heads stay behind the sequence, and einsums say what is multiplied."""

    def forward(self, x: Tensor) -> Tensor:
        b, s, hidden = x.shape
        q, k, v = (each(x).view(b, s, self.heads, self.size) for each in (self.q, self.k, self.v))
        probs = (torch.einsum("bihd,bjhd->bhij", q, k) * self.size**-0.5).softmax(-1)
        return self.out(torch.einsum("bhij,bjhd->bihd", probs, v).reshape(b, s, hidden))


class GroupedQueries(_Projected):
    """Two heads of queries share one of keys and values, which the product broadcasts."""

    def __init__(self, hidden: int, heads: int, sequence: int) -> None:
        super().__init__(hidden, heads, sequence)
        self.k, self.v = nn.Linear(hidden, hidden // 2), nn.Linear(hidden, hidden // 2)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, s, d = q.shape
        q = q.reshape(b, h // 2, 2, s, d)
        return super().mix(q, k.unsqueeze(2), v.unsqueeze(2)).view(b, h, s, d)


class Windows(_Projected):
    """Queries see the keys of their own window and of the one before it."""

    WIDTH = 4

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, s, d = q.shape
        q = q.reshape(b, h, s // self.WIDTH, self.WIDTH, d)
        return super().mix(q, self._with_previous(k), self._with_previous(v)).reshape(b, h, s, d)

    def _with_previous(self, x: Tensor) -> Tensor:
        b, h, s, d = x.shape
        parts = x.reshape(b, h, s // self.WIDTH, self.WIDTH, d)
        return torch.cat([F.pad(parts, (0, 0, 0, 0, 1, -1)), parts], 3)


class Linear(_Projected):
    """Katharopoulos et al. 2020: features of keys times values first, then those of the queries."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return (q @ (k.transpose(-1, -2) @ v)) / (q @ k.sum(-2).unsqueeze(-1))


class TalkingHeads(_Projected):
    """Shazeer et al. 2020: scores and probabilities of all heads are mixed before and after the softmax."""

    def __init__(self, hidden: int, heads: int, sequence: int) -> None:
        super().__init__(hidden, heads, sequence)
        self.before, self.after = (nn.Parameter(torch.eye(heads) + 0.1) for _ in range(2))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bhij,hg->bgij", q @ k.transpose(-1, -2) * self.size**-0.5, self.before)
        return torch.einsum("bhij,hg->bgij", scores.softmax(-1), self.after) @ v


ATTENTIONS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "plain": _Projected,
    "causal": Causal,
    "relative positions": RelativePositions,
    "alibi": Alibi,
    "sequence first": SequenceFirst,
    "einsum": Einsum,
    "grouped queries": GroupedQueries,
    "windows": Windows,
    "linear": Linear,
    "talking heads": TalkingHeads,
}


class Layer(nn.Module):
    """An attention and a feed-forward layer, a norm before each."""

    def __init__(self, attention: nn.Module, hidden: int) -> None:
        super().__init__()
        self.attention, self.norms = attention, nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Stack(nn.Module):
    """A language model with one of the attentions; its forward gives the loss."""

    def __init__(
        self, attention: str, hidden: int = 64, heads: int = 8, sequence: int = 16, layers: int = 3, vocab: int = 64
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        made = (ATTENTIONS[attention](hidden, heads, sequence) for _ in range(layers))
        self.layers = nn.ModuleList(Layer(each, hidden) for each in made)
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
