"""Mixtures of experts with the loss that balances their routers: Mixtral, Qwen3-MoE, and those of fixed capacity."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.zoo.small import Small
from examples.models import switch

VOCABULARY = 96
_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
    "num_experts_per_tok": 2,
    "use_cache": False,
}
HF: dict[str, dict[str, object]] = {
    "mixtral": {**_BASE, "num_local_experts": 4},
    "qwen3_moe": {
        **_BASE,
        "num_hidden_layers": 1,
        "num_experts": 8,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "norm_topk_prob": True,
    },
}


def mixture(name: str, dropout: float, batch: int = 4, seq: int = 16) -> Small:
    """Tokens with unequal numbers of ignored labels."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  (optional extra)

    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    config = AutoConfig.for_model(name, **HF[name], attention_dropout=dropout)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().train()
    tokens, labels = (torch.randint(0, VOCABULARY, (batch, seq), generator=draw) for _ in range(2))
    labels[0, : seq // 2] = -100
    return Small(name, model, {"input_ids": tokens, "labels": labels})


def capacity(name: str, choices: int, dropout: float) -> Small:
    """A mixture whose experts overflow (capacities below the mean load), one group of tokens a sequence half."""
    torch.manual_seed(0)
    sizes = {"experts": 8, "choices": choices, "capacity_factor": 0.75, "group": 8, "layers": 2, "balance": 0.1}
    model, batch = switch.factory(batch=8, seq=16, dropout=dropout, **sizes)
    batch["labels"][0, :8] = -100
    return Small(name, model.double().train(), batch)


MODELS: dict[str, Callable[[float], Small]] = {
    **{name: partial(mixture, name) for name in HF},
    "switch": partial(capacity, "switch", 1),
    "gshard": partial(capacity, "gshard", 2),
}
