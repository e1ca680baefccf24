"""GPT-2, Llama, Qwen3 and BERT from transformers, and an MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.zoo.small import Small
from examples.models.mlp import MLP

VOCABULARY, POSITIONS = 96, 64
HF = {
    "gpt2": {
        "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": POSITIONS,
        "bos_token_id": None, "eos_token_id": None,
    },
    "llama": {
        "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS,
    },
    "qwen3": {
        "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS,
    },
    "bert": {
        "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS,
    },
}  # fmt: skip
DROPOUTS = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "llama": ("attention_dropout",),
    "qwen3": ("attention_dropout",),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}


def settings(name: str, dropout: float) -> dict[str, object]:
    """The configuration of a transformers model."""
    return {**HF[name], **dict.fromkeys(DROPOUTS[name], dropout), "use_cache": False}


def mlp(dropout: float) -> Small:
    """Features in, features out, with a loss of its own."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    pair = torch.randn(2, 8, 32, generator=draw, dtype=torch.float64)
    return Small("mlp", MLP(dropout=dropout).double().train(), {"x": pair[0], "y": pair[1]})


def transformer(name: str, dropout: float, batch: int = 8, seq: int = 32) -> Small:
    """Tokens with unequal numbers of ignored labels."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM  # noqa: PLC0415  (optional extra)

    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    config = AutoConfig.for_model(name, **settings(name, dropout))
    maker = AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM
    tokens, labels = (torch.randint(0, VOCABULARY, (batch, seq), generator=draw) for _ in range(2))
    labels[0, : seq // 2] = -100
    return Small(name, maker.from_config(config).double().train(), {"input_ids": tokens, "labels": labels})


MODELS: dict[str, Callable[[float], Small]] = {**{name: partial(transformer, name) for name in HF}, "mlp": mlp}
