"""Llama as torchtitan trains it: Hugging Face's layers, torchtitan's losses.

torchtitan's loss is `F.cross_entropy(pred.float(), labels)` in eager mode: logits are cast to float32, their
log-softmax is kept for the backward, and the backward makes a gradient of the log-softmax and one of the logits, each
in float32 (torchtitan/components/loss.py). Where the vocabulary is whole on a rank these copies are its peak. Under
tensor parallelism it is the same within `loss_parallel` (torch/distributed/tensor/parallel/loss.py), which writes the
log-softmax out over a vocabulary in shards, and both gradients as one sum.
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
        return torch.where(_is_label(labels, ctx.vocab), -grads[0] / labels.numel(), 0.0), None


class _LossParallel(torch.autograd.Function):
    """The mean over tokens of float32 logits whose vocabulary may lie in shards: maxima and sums meet, nothing else.

    torchtitan flattens the tokens of each rank, after they were sharded; so samples and sequence are kept apart here.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        kept = shifted - shifted.exp().sum(-1, keepdim=True).log()
        ctx.save_for_backward(kept, labels)
        return -torch.where(_is_label(labels, kept.shape[-1]), kept, 0.0).sum(-1).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        kept, labels = ctx.saved_tensors
        update = torch.where(_is_label(labels, kept.shape[-1]), -1.0, torch.zeros_like(kept))
        return (update + kept.exp()) * (grads[0] / labels.numel()), None


def _is_label(labels: Tensor, vocab: int) -> Tensor:
    return labels.unsqueeze(-1) == torch.arange(vocab, device=labels.device)


class TorchtitanLlama(nn.Module):
    """The model; its forward gives the loss.

    Args:
        settings: of Hugging Face's configuration.
        loss_parallel: whether the loss is written for a vocabulary in shards.
    """

    def __init__(self, settings: dict[str, Any], loss_parallel: bool = False) -> None:
        super().__init__()
        self.llama = hf_model("llama", settings, meta=True)
        self.loss_parallel = loss_parallel

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.llama(input_ids=input_ids, use_cache=False).logits.float()
        if self.loss_parallel:
            return _LossParallel.apply(logits, labels)
        return _NegativeLogLikelihood.apply(torch.log_softmax(logits, -1), labels)
