"""Small models every benchmark of correctness runs, by family: each file lists its own in `MODELS`."""

from __future__ import annotations

from benchmarks.zoo import (
    adapters,
    generators,
    huggingface,
    language,
    moe,
    multimodal,
    recommender,
    recurrent,
    seq2seq,
    sequences,
    structures,
    vision,
)
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
UNSEEN = {**huggingface.MODELS, **sequences.MODELS, **generators.MODELS, **structures.MODELS, **recurrent.LOOPS}
"""What no part of paraplan was written for; see `benchmarks.unseen`."""


def build(name: str, dropout: float) -> Small:
    """A model with random weights and one batch; equal calls give equal models."""
    return (MODELS.get(name) or UNSEEN[name])(dropout)


__all__ = ["MODELS", "NAMES", "UNSEEN", "Small", "build"]
