"""Example inputs of Hugging Face image classifiers; text models keep theirs."""

from __future__ import annotations

import pytest
import torch

from paraplan.capture import capture
from paraplan.ir.errors import CaptureError
from paraplan.jobs.models import hf_batch, hf_model, model_ref

SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "num_channels": 1,
    "num_labels": 3,
}


def test_pixels_of_the_configurations_size() -> None:
    model = hf_model("vit", SMALL, meta=True)
    batch = hf_batch(model, 2, 128)
    assert {name: tuple(x.shape) for name, x in batch.items()} == {"pixel_values": (2, 1, 16, 16), "labels": (2,)}
    reference = model_ref(model, capture(model, batch), made_here=True)
    assert reference.hf_type == "vit" and reference.hf_settings["image_size"] == 16


def test_text_and_the_rest() -> None:
    assert "input_ids" in hf_batch(hf_model("gpt2", {"n_layer": 1}, meta=True), 2, 8)
    with pytest.raises(CaptureError, match="at least 1"):
        hf_batch(hf_model("vit", SMALL, meta=True), 0, 8)
    with pytest.raises(CaptureError, match="no Hugging Face language model, classifier"):
        hf_batch(torch.nn.Linear(2, 2), 2, 8)
