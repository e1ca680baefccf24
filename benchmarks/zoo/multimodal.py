"""Two towers with a contrastive loss over the whole batch (CLIP), and speech to text (Whisper)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.zoo.small import Small

VOCABULARY = 64
_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
_WHISPER = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 4,
    "max_source_positions": 8, "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 3, "use_cache": False,
}  # fmt: skip


class _WithLoss(nn.Module):
    """A pair of towers asked for its loss."""

    def __init__(self, towers: nn.Module) -> None:
        super().__init__()
        self.towers = towers

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        """The contrastive loss."""
        return self.towers(input_ids=input_ids, pixel_values=pixel_values, return_loss=True).loss  # type: ignore[no-any-return]


def clip(dropout: float, batch: int = 4) -> Small:
    """Pairs of images and texts, each compared with all others."""
    from transformers import CLIPConfig, CLIPModel  # noqa: PLC0415  (optional extra)

    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    text = {
        **_TOWER,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8,
        "attention_dropout": dropout,
        "bos_token_id": 61,
        "eos_token_id": 62,
        "pad_token_id": 63,
    }
    vision = {**_TOWER, "image_size": 8, "patch_size": 4, "attention_dropout": dropout}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).double().train()
    tokens = torch.randint(0, 60, (batch, 8), generator=draw)
    tokens[:, 5] = 62
    pixels = torch.randn(batch, 3, 8, 8, generator=draw, dtype=torch.float64)
    return Small("clip", _WithLoss(model), {"input_ids": tokens, "pixel_values": pixels})


def whisper(dropout: float, batch: int = 4) -> Small:
    """Spectra and the tokens said."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration  # noqa: PLC0415  (optional extra)

    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    drops = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), dropout)
    model = WhisperForConditionalGeneration(WhisperConfig(**_WHISPER, **drops)).double().train()
    labels = torch.randint(3, VOCABULARY, (batch, 8), generator=draw)
    labels[0, 4:] = -100
    features = torch.randn(batch, 4, 16, generator=draw, dtype=torch.float64)
    return Small("whisper", model, {"input_features": features, "labels": labels})


MODELS: dict[str, Callable[[float], Small]] = {"clip": clip, "whisper": whisper}
