"""T5: layers that share a bias of relative positions, a decoder that reads the encoder's output."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.zoo.small import Small

VOCABULARY = 96
HF = {
    "t5": {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 1,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 16,
        "decoder_start_token_id": 0,
    }
}
DROPOUTS = {"t5": ("dropout_rate",)}


def encoder_decoder(name: str, dropout: float, batch: int = 8, source: int = 12, target: int = 16) -> Small:
    """Text to text: sources with padding, targets with unequal numbers of ignored labels."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM  # noqa: PLC0415  (optional extra)

    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    settings = {**HF[name], **dict.fromkeys(DROPOUTS[name], dropout), "use_cache": False}
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(name, **settings)).double().train()
    tokens = torch.randint(3, VOCABULARY, (batch, source), generator=draw)
    labels = torch.randint(3, VOCABULARY, (batch, target), generator=draw)
    labels[0, target // 2 :] = -100
    inputs = {"input_ids": tokens, "labels": labels}
    mask = torch.ones(batch, source, dtype=torch.int64)
    mask[1, source // 2 :] = 0
    return Small(name, model, {**inputs, "attention_mask": mask})


MODELS: dict[str, Callable[[float], Small]] = {name: partial(encoder_decoder, name) for name in HF}
