"""Example inputs of Hugging Face models: one table, keyed by what a model's forward takes.

Text (with labels, also from encoder to decoder), speech to text, images, videos and sounds with class numbers, and
pairs of image and text whose loss compares all pairs of the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paraplan.ir.errors import CaptureError
from paraplan.jobs.images import classifies_images, image_batch

Batch = dict[str, Tensor]
_HINT = "pass example_inputs (on the command line: a factory that returns (model, example_inputs))"


def hf_batch(model: nn.Module, batch: int | None = None, seq: int | None = None) -> Batch:
    """Example inputs of a Hugging Face model: sequences of tokens, images or sounds, with labels.

    Args:
        model: of transformers.
        batch: how many samples; None: 8.
        seq: tokens of each at most; None: 128, or as many as the model has positions for.
    Raises:
        CaptureError: no such model, or the sequence is longer than its positions.
    """
    config = getattr(model, "config", None)
    texts = (each for each in (config, getattr(config, "text_config", None)) if each is not None)
    longest = next((found for each in texts if (found := getattr(each, "max_position_embeddings", None))), None)
    usual = min(128, longest) if isinstance(longest, int) and longest > 0 else 128
    batch, seq = 8 if batch is None else batch, usual if seq is None else seq
    if classifies_images(model):
        return image_batch(model, batch)
    taken = inspect.signature(model.forward).parameters
    makers = [maker for names, maker in _MAKERS if all(name in taken for name in names)]
    if getattr(model, "config", None) is None or not makers:
        raise CaptureError(
            f"{type(model).__name__} is no Hugging Face language model, classifier, speech recogniser or pair of "
            f"image and text towers, so its batch cannot be guessed: {_HINT}"
        )
    if batch < 1 or seq < 1:
        raise CaptureError(f"batch={batch}, seq={seq}: both must be at least 1")
    return makers[0](model, batch, seq)


def max_positions(config: Any) -> int | None:
    """Longest sequence of a table of positions, or None (rotary ones have no end)."""
    if any(getattr(config, name, None) is not None for name in ("rope_parameters", "rope_theta")):
        return None
    found = getattr(config, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def vocabulary(config: Any) -> int | None:
    """How many tokens there are, for a pair of towers those of the text; else how many classes."""
    text = getattr(config, "text_config", None)
    found = getattr(config, "vocab_size", None) or getattr(text, "vocab_size", None)
    return found or getattr(config, "num_labels", None)


def classes(config: Any) -> int | None:
    """How many classes a model that reads no text tells apart; the tokens it writes, where it writes text."""
    return vocabulary(config) if getattr(config, "is_encoder_decoder", False) else getattr(config, "num_labels", None)


def _tokens(config: Any, batch: int, seq: int, longest: int | None, name: str = "max_position_embeddings") -> Tensor:
    if longest is not None and seq > longest:
        setting = getattr(config, "attribute_map", {}).get(name, name)
        raise CaptureError(
            f"a sequence of {seq} is longer than the model's {longest} positions; use seq={longest}, or a longer model "
            f"({setting}={seq})"
        )
    return torch.zeros((batch, seq), dtype=torch.int64, device="meta")


def _text(model: nn.Module, batch: int, seq: int) -> Batch:
    config: Any = model.config
    ids = _tokens(config, batch, seq, max_positions(config))
    return {"input_ids": ids, "labels": torch.empty_like(ids)}


def _speech(model: nn.Module, batch: int, seq: int) -> Batch:
    """Whisper: spectra of fixed length, twice the encoder's positions."""
    config: Any = model.config
    bins, frames = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    if bins is None or frames is None:
        raise CaptureError(f"the spectra {type(model).__name__} reads have no size in its configuration: {_HINT}")
    return {
        "input_features": torch.empty((batch, bins, 2 * frames), device="meta"),
        "labels": _tokens(config, batch, seq, getattr(config, "max_target_positions", None), "max_target_positions"),
    }


def _pairs(model: nn.Module, batch: int, seq: int) -> Batch:
    config: Any = model.config
    vision, text = getattr(config, "vision_config", None), getattr(config, "text_config", None)
    size = getattr(vision, "image_size", None)
    if vision is None or text is None or not isinstance(size, int):
        raise CaptureError(f"{type(model).__name__} names no towers in its configuration: {_HINT}")
    return {
        "input_ids": _tokens(text, batch, seq, max_positions(text)),
        "pixel_values": torch.empty((batch, getattr(vision, "num_channels", 3), size, size), device="meta"),
    }


def _sounds(model: nn.Module, batch: int, seq: int) -> Batch:
    """Spectra of the configuration's size, or waves of as many samples as make `seq` frames; a class for each."""
    config: Any = model.config
    if not type(model).__name__.endswith("Classification"):
        raise CaptureError(f"{type(model).__name__} reads sounds but does not classify them: {_HINT}")
    bins, frames = getattr(config, "num_mel_bins", None), getattr(config, "max_length", None)
    shape: tuple[int, ...] = (frames, bins) if isinstance(bins, int) and isinstance(frames, int) else ()
    if not shape and getattr(config, "conv_kernel", None) and getattr(config, "conv_stride", None):
        length = seq
        for kernel, stride in reversed(list(zip(config.conv_kernel, config.conv_stride, strict=True))):
            length = (length - 1) * stride + kernel
        shape = (length,)
    if not shape:
        raise CaptureError(f"the sounds {type(model).__name__} reads have no size in its configuration: {_HINT}")
    return {
        "input_values": torch.empty((batch, *shape), device="meta"),
        "labels": torch.zeros((batch,), dtype=torch.int64, device="meta"),
    }


_MAKERS: tuple[tuple[tuple[str, ...], Callable[[nn.Module, int, int], Batch]], ...] = (
    (("input_ids", "pixel_values", "return_loss"), _pairs),
    (("input_features", "labels"), _speech),
    (("input_values", "labels"), _sounds),
    (("input_ids", "labels"), _text),
)
