"""Hugging Face types nobody wrote anything for: settings that make them small, and the standard example inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.zoo.small import Small
from paraplan.ir.model.program import BatchInput
from paraplan.ir.model.tensor import TensorSpec
from paraplan.jobs.data import RandomBatches
from paraplan.jobs.models import Made, hf_batch, hf_model

BATCH, SEQ = 8, 16
SIZES: dict[str, Any] = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embedding_size": 16, "hidden_dim": 64,
    "word_embed_proj_dim": 32, "intermediate_size": 64, "ffn_dim": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96, "max_position_embeddings": 64, "context_length": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 6, "image_size": 16, "patch_size": 4,
    "use_cache": False,
}  # fmt: skip
"""Given to every type that has the setting, unless `MODELS` says otherwise."""

MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "topk_group": 1,
}
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**TOWER, "vocab_size": 96, "max_position_embeddings": 16, "projection_size": 32}
PLAIN = (
    "gemma2", "gemma3_text", "mistral", "phi3", "opt", "gpt_neox", "falcon", "bloom", "olmo2", "distilbert", "roberta",
    "albert", "electra", "bart", "pegasus", "dinov2", "fnet", "stablelm", "cohere", "nemotron", "mpt",
)  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {} for name in PLAIN},
    "gptj": {"rotary_dim": 4},
    "deepseek_v2": {**MLA, "n_group": 1},
    "deepseek_v3": {**MLA, "n_group": 2},
    "qwen2_moe": MIXTURE,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deberta": {},
    "mamba": {"state_size": 4, "time_step_rank": 4, "expand": 2, "conv_kernel": 4},
    "mamba2": {"state_size": 8, "num_heads": 8, "n_groups": 2, "chunk_size": 8},
    "rwkv": {},
    "swin": {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2, "patch_size": 2},
    "segformer": {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sr_ratios": [2, 1],
        "hidden_sizes": [8, 16],
        "patch_sizes": [3, 3],
        "strides": [2, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
        "decoder_hidden_size": 16,
    },
    "siglip": {"text_config": TEXT, "vision_config": {**TOWER, "image_size": 16, "patch_size": 4}},
    "mobilebert": {"embedding_size": 32, "intra_bottleneck_size": 32},
    "regnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
}


def settings_of(model_type: str, chosen: dict[str, Any], dropout: float) -> dict[str, Any]:
    """Small sizes, every rate of dropout, and what is chosen."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415  (optional extra)

    kind = CONFIG_MAPPING[model_type]
    known = kind().to_dict()
    renamed: dict[str, str] = getattr(kind, "attribute_map", {})
    sizes = {
        key: value
        for key, value in SIZES.items()
        if (key in known or key in renamed) and renamed.get(key, key) not in chosen
    }
    dropped = {key: dropout for key, value in known.items() if "drop" in key and isinstance(value, float)}
    return {**sizes, **dropped, **chosen}


def transformer(model_type: str, dropout: float) -> Small:
    """A model and the batch `paraplan run` would give it."""
    torch.manual_seed(0)
    model = hf_model(model_type, settings_of(model_type, SETTINGS[model_type], dropout), meta=False).double()
    shapes = hf_batch(model, BATCH, SEQ)
    inputs = {
        name: BatchInput(spec=TensorSpec(dtype=str(x.dtype).removeprefix("torch."), shape=tuple(x.shape)))
        for name, x in shapes.items()
    }
    plan: Any = SimpleNamespace(program=SimpleNamespace(batch=inputs, step_batch=inputs))
    batch = RandomBatches(plan, Made(model), 0)(0)
    return Small(model_type, model, {name: x.double() if x.is_floating_point() else x for name, x in batch.items()})


MODELS: dict[str, Callable[[float], Small]] = {name: partial(transformer, name) for name in SETTINGS}
