"""A program made deeper is the program that capturing the deeper model gives."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.deepen import CAPTURED, deepen
from paraplan.capture import capture
from paraplan.ir.errors import CaptureError
from paraplan.ir.model.program import Program
from paraplan.jobs.inputs import hf_batch
from paraplan.jobs.models import hf_model

GPT = {
    "n_embd": 16,
    "n_head": 2,
    "vocab_size": 32,
    "n_positions": 8,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": 8,
    "tie_word_embeddings": False,
}
MODELS = {
    "tied gpt2": ("gpt2", {**GPT, "tie_word_embeddings": True}, "n_layer"),
    "gpt2": ("gpt2", {**GPT, "tie_word_embeddings": False}, "n_layer"),
    "llama": ("llama", LLAMA, "num_hidden_layers"),
}


def captured(name: str, layers: int) -> Program:
    family, settings, depth = MODELS[name]
    model = hf_model(family, {**settings, depth: layers}, meta=True)
    return capture(model, hf_batch(model, 4, 8), precision="bf16")


@pytest.mark.parametrize("name", MODELS)
def test_a_deepened_program_is_the_deeper_models(name: str) -> None:
    made, real = deepen(captured(name, CAPTURED), 5), captured(name, 5)
    assert made == msgspec.structs.replace(real, fingerprint=made.fingerprint, settings=made.settings, outputs={})
    assert list(made.params) == list(real.params)


def test_what_cannot_be_made_deeper_is_refused() -> None:
    program = captured("llama", 4)
    with pytest.raises(CaptureError, match="numbered"):
        deepen(program, 6)
    with pytest.raises(CaptureError, match="equal kinds"):
        deepen(captured("llama", CAPTURED), 2)
