"""Models whose weights are frozen but for small adapters (LoRA, Hu et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.zoo.language import transformer
from benchmarks.zoo.small import Small


class LoRA(nn.Module):
    """base(x) + (x A) B · scale, with the base frozen; structured as peft does it.

    Args:
        base: the wrapped layer, [batch, seq, in] -> [batch, seq, out].
        sizes: (in, out) of the base.
        rank: of the update.
        dropout: on the adapter's input.
    """

    def __init__(self, base: nn.Module, sizes: tuple[int, int], rank: int, dropout: float) -> None:
        super().__init__()
        self.base_layer = base
        like = next(base.parameters())
        self.lora_A = nn.Linear(sizes[0], rank, bias=False, dtype=like.dtype)
        self.lora_B = nn.Linear(rank, sizes[1], bias=False, dtype=like.dtype)
        nn.init.normal_(self.lora_B.weight, std=0.02)
        self.dropout, self.scale = nn.Dropout(dropout), 2.0

    def forward(self, x: Tensor) -> Tensor:
        """The base's output with the low-rank update."""
        return self.base_layer(x) + self.lora_B(self.lora_A(self.dropout(x))) * self.scale  # type: ignore[no-any-return]


def adapted_gpt2(dropout: float, first: int = 1) -> Small:
    """GPT-2 with every attention projection of the layers from `first` on adapted, all else frozen."""
    small = transformer("gpt2", dropout)
    torch.manual_seed(5)
    small.model.requires_grad_(False)
    for layer in small.model.transformer.h[first:]:  # type: ignore[union-attr]
        for name in ("c_attn", "c_proj"):
            base = getattr(layer.attn, name)
            setattr(layer.attn, name, LoRA(base, tuple(base.weight.shape), 4, dropout))
    return Small("gpt2_lora", small.model.train(), small.batch)


MODELS: dict[str, Callable[[float], Small]] = {"gpt2_lora": adapted_gpt2}
