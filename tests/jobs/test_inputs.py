"""Example inputs of Hugging Face models, by what their forward takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from torch import nn

from paraplan.ir.errors import CaptureError
from paraplan.jobs.models import ModelError, factory_model, hf_batch, hf_model

TOWER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def shapes(model_type: str, settings: dict[str, object], seq: int = 8) -> dict[str, tuple[int, ...]]:
    made = hf_batch(hf_model(model_type, settings, meta=True), 2, seq)
    return {name: tuple(x.shape) for name, x in made.items()}


def test_text_to_text_has_a_first_token() -> None:
    model = hf_model("t5", {"num_layers": 1, "d_model": 16, "d_ff": 16}, meta=True)
    assert model.config.decoder_start_token_id == 0
    assert {name: tuple(x.shape) for name, x in hf_batch(model, 2, 8).items()} == {
        "input_ids": (2, 8),
        "labels": (2, 8),
    }


def test_speech_and_pairs() -> None:
    small = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "max_source_positions": 20, "num_mel_bins": 4}
    small |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    assert shapes("whisper", small) == {"input_features": (2, 4, 40), "labels": (2, 8)}
    pair = {"text_config": TOWER, "vision_config": {**TOWER, "image_size": 32, "patch_size": 16}}
    assert shapes("clip", pair) == {"input_ids": (2, 8), "pixel_values": (2, 3, 32, 32)}
    with pytest.raises(CaptureError, match="77 positions"):
        shapes("clip", pair, seq=78)
    assert hf_batch(hf_model("clip", pair, meta=True))["input_ids"].shape == (8, 77), "as many as it has positions for"


def test_a_mixture_is_balanced_unless_told_otherwise() -> None:
    small = {**TOWER, "num_key_value_heads": 1, "num_local_experts": 2}
    assert hf_model("mixtral", small, meta=True).config.output_router_logits is True
    told = {**small, "output_router_logits": False}
    assert hf_model("mixtral", told, meta=True).config.output_router_logits is False


def test_videos_and_sounds_have_classes() -> None:
    video = {**TOWER, "num_frames": 2, "image_size": 16, "patch_size": 8}
    assert shapes("timesformer", video) == {"pixel_values": (2, 2, 3, 16, 16), "labels": (2,)}
    spectra = {**TOWER, "num_mel_bins": 16, "max_length": 24}
    assert shapes("audio-spectrogram-transformer", spectra) == {"input_values": (2, 24, 16), "labels": (2,)}
    waves = {**TOWER, "conv_dim": [4, 4], "conv_kernel": [4, 3], "conv_stride": [2, 2], "num_conv_pos_embeddings": 4}
    waves |= {"num_feat_extract_layers": 2, "num_conv_pos_embedding_groups": 2}
    assert shapes("wav2vec2", waves) == {"input_values": (2, (7 * 2 + 3 - 1) * 2 + 4), "labels": (2,)}


def test_a_table_of_positions_ends_and_rotary_ones_do_not() -> None:
    tiny = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    llama = hf_model("llama", {**tiny, "num_key_value_heads": 2, "max_position_embeddings": 8}, meta=True)
    assert hf_batch(llama, 1, 64)["input_ids"].shape == (1, 64)
    gpt2 = hf_model("gpt2", {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 8}, meta=True)
    with pytest.raises(CaptureError, match=r"longer than the model's 8 positions; .*\(n_positions=64\)"):
        hf_batch(gpt2, 1, 64)


def test_settings_the_model_reads_and_tokens_within_the_vocabulary() -> None:
    deberta = {**TOWER, "relative_attention": True, "position_buckets": 4}
    assert hf_model("deberta-v2", deberta, meta=True).config.position_buckets == 4
    with pytest.raises(ModelError, match="no setting 'position_bucket'"):
        hf_model("deberta-v2", {"position_bucket": 4}, meta=True)
    with pytest.raises(ModelError, match=r"gpt2 cannot have n_layer=-1: it is a size \(12 where"):
        hf_model("gpt2", {"n_layer": -1}, meta=True)
    assert hf_model("gpt2", {"n_layer": 1, "n_embd": 16, "n_head": 2, "eos_token_id": -1}, meta=True) is not None
    small = {"vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 3}
    assert hf_model("marian", small, meta=True).config.decoder_start_token_id == 3


def test_a_factory_may_be_named_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_it.py").write_text("from torch import nn\n\ndef make():\n    return nn.Linear(2, 3)\n")
    for name in ("own_model.py", "json.py"):  # the second has the name of a module that is there
        (tmp_path / name).write_text("from beside_it import make\n\ndef model():\n    return make()\n")
        made = factory_model(f"{tmp_path / name}:model").model
        assert isinstance(made, nn.Linear) and made.out_features == 3
    assert sys.modules["json"] is json
    with pytest.raises(ModelError, match=r"cannot import .*nowhere\.py.*No such file"):
        factory_model(f"{tmp_path / 'nowhere.py'}:model")
