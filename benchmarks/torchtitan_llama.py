"""Llama as torchtitan trains it on data-parallel ranks: Hugging Face's layers, torchtitan's loss.

torchtitan's loss is `F.cross_entropy(pred.float(), labels)` in eager mode: logits are cast to float32, their
log-softmax is kept for the backward, and the backward makes a gradient of the log-softmax and one of the logits, each
in float32 (torchtitan/components/loss.py). Where the vocabulary is whole on a rank these copies are its peak.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paraplan.jobs.models import hf_model


class _NegativeLogLikelihood(torch.autograd.Function):
    """The mean over tokens; its gradient is one tensor of the size of its input, as `nll_loss_backward`'s is."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(labels)
        ctx.vocab = kept.shape[-1]
        return -kept.gather(-1, labels.unsqueeze(-1)).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (labels,) = ctx.saved_tensors
        places = torch.arange(ctx.vocab, device=labels.device)
        return torch.where(labels.unsqueeze(-1) == places, -grads[0] / labels.numel(), 0.0), None


class TorchtitanLlama(nn.Module):
    """The model; its forward gives the loss."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.llama = hf_model("llama", settings, meta=True)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.llama(input_ids=input_ids, use_cache=False).logits
        return _NegativeLogLikelihood.apply(torch.log_softmax(logits.float(), -1), labels)
