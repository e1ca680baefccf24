"""Megatron-LM's GPT, as far as its layouts and kernels are visible from outside.

Published rows of Megatron-LM are of this model, not of Hugging Face's GPT-2, and four things differ in what they cost
over tensor-parallel ranks (Megatron-LM, `megatron/core/transformer`):

- activations lie as [sequence, batch, hidden], so a gather or a scatter of the sequence moves whole blocks and copies
  nothing;
- the fused projection of queries, keys and values is laid out by heads, [heads, 3, size of a head], so a rank's rows of
  it are its own heads' (GPT-2's lies [3, heads, size], whose thirds are cut across ranks);
- the activation after the first product of a feed-forward layer is one kernel (`bias_gelu`);
- the loss casts its logits to float32, subtracts their maximum, takes the exponential, sums it and divides by the sum
  in passes of their own, and its backward multiplies what the division left (`tensor_parallel/cross_entropy.py`, not
  fused, as is its default), where a vocabulary of 131,072 is much to read.

Attention is one kernel, or, as before FlashAttention (2022), two products around a softmax whose kernel scales and
masks too (Narayanan et al. 2021, section 4.2; what it does to values does not matter here, for there are none).
Models of that time had dropout, of the softmax and before both residuals (0.1, Megatron-LM's default; Korthikanti et
al. 2022 count its masks); later ones leave it out. Names of parameters number the layers, as `deepen` wants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTSettings:
    """Sizes of a model: hidden, layers, heads, vocabulary, longest sequence; whether the head is the embedding,
    whether attention is one kernel, and what is dropped."""

    hidden: int
    layers: int
    heads: int
    vocab: int
    sequence: int
    tied: bool
    flash: bool
    dropout: float = 0.0


class _Thirds(torch.autograd.Function):
    """The thirds of the last dim; their gradients are joined in one pass (Transformer Engine's SplitAlongDim)."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(x.split(x.shape[-1] // 3, -1))

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:  # type: ignore[override]
        return torch.cat(grads, -1)


class _CrossEntropy(torch.autograd.Function):
    """The passes of the loss over its logits; what it does to the few numbers of the labels is left out."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        parts = (logits - logits.amax(-1, keepdim=True)).exp()
        sums = parts.sum(-1, keepdim=True)
        ctx.save_for_backward(parts / sums)
        return (sums.squeeze(-1).log() - labels).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (softmax,) = ctx.saved_tensors
        return softmax * (grads[0] / softmax[..., 0].numel()), None


class Attention(nn.Module):
    """Causal self-attention over [sequence, batch, hidden]."""

    def __init__(self, of: GPTSettings) -> None:
        super().__init__()
        self.heads, self.flash, self.dropout = of.heads, of.flash, of.dropout
        self.norm = nn.LayerNorm(of.hidden)
        self.qkv = nn.Linear(of.hidden, 3 * of.hidden)
        self.out = nn.Linear(of.hidden, of.hidden)

    def forward(self, x: Tensor) -> Tensor:
        s, b, h = x.shape
        size = h // self.heads
        parts = _Thirds.apply(self.qkv(self.norm(x)).view(s, b, self.heads, 3 * size))
        q, k, v = (part.permute(1, 2, 0, 3) for part in parts)
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = F.dropout(torch.softmax(q @ k.transpose(2, 3), -1), self.dropout) @ v
        return x + F.dropout(self.out(y.permute(2, 0, 1, 3).reshape(s, b, h)), self.dropout)


class FeedForward(nn.Module):
    """Two products and an activation between them."""

    def __init__(self, of: GPTSettings) -> None:
        super().__init__()
        self.dropout = of.dropout
        self.norm = nn.LayerNorm(of.hidden)
        self.up = nn.Linear(of.hidden, 4 * of.hidden)
        self.down = nn.Linear(4 * of.hidden, of.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)), approximate="tanh")), self.dropout)


class MegatronGPT(nn.Module):
    """The model; its forward gives the loss."""

    def __init__(self, of: GPTSettings) -> None:
        super().__init__()
        self.tokens = nn.Embedding(of.vocab, of.hidden)
        self.positions = nn.Embedding(of.sequence, of.hidden)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"attention": Attention(of), "feed_forward": FeedForward(of)}) for _ in range(of.layers)
        )
        self.norm = nn.LayerNorm(of.hidden)
        self.head = nn.Linear(of.hidden, of.vocab, bias=False)
        if of.tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        s = input_ids.shape[1]
        places = torch.arange(s, device=input_ids.device)
        x = self.tokens(input_ids.t().contiguous()) + self.positions(places).unsqueeze(1)
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            x = layer["feed_forward"](layer["attention"](x))
        logits = self.head(self.norm(x)).float()
        return _CrossEntropy.apply(logits, labels.t())


def gpt_model(of: GPTSettings) -> MegatronGPT:
    """The model without values."""
    with torch.device("meta"):
        return MegatronGPT(of)


def gpt_batch(batch: int, sequence: int) -> dict[str, Tensor]:
    """Tokens and labels, without values."""
    ids = torch.zeros((batch, sequence), dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": torch.empty_like(ids)}
