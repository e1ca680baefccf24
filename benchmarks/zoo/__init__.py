"""Small models every benchmark of correctness runs, by family: each file lists its own in `MODELS`."""

from __future__ import annotations

from benchmarks.zoo import adapters, language, moe, multimodal, recommender, recurrent, seq2seq, vision
from benchmarks.zoo.small import Small

MODELS = {
    **language.MODELS,
    **adapters.MODELS,
    **vision.MODELS,
    **seq2seq.MODELS,
    **moe.MODELS,
    **multimodal.MODELS,
    **recommender.MODELS,
    **recurrent.MODELS,
}
NAMES = tuple(MODELS)


def build(name: str, dropout: float) -> Small:
    """A model with random weights and one batch; equal calls give equal models."""
    return MODELS[name](dropout)


__all__ = ["MODELS", "NAMES", "Small", "build"]
