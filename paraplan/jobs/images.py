"""Example inputs of Hugging Face classifiers of images and videos."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from paraplan.ir.errors import CaptureError

_SIDE = 224  # what configurations without an image size are made for


def classifies_images(model: nn.Module) -> bool:
    """Whether a Hugging Face model takes pixels and class numbers and nothing of text."""
    names = inspect.signature(model.forward).parameters
    has = getattr(model, "config", None) is not None
    return has and "pixel_values" in names and "labels" in names and "input_ids" not in names


def image_batch(model: nn.Module, batch: int) -> dict[str, Tensor]:
    """`batch` images of the configuration's size, or videos of as many frames as it says, with class numbers.

    Raises:
        CaptureError: no image, or a model that does not classify images.
    """
    if batch < 1:
        raise CaptureError(f"batch={batch}: it must be at least 1")
    config: Any = model.config
    is_video = type(model).__name__.endswith("ForVideoClassification")
    if not is_video and not type(model).__name__.endswith("ForImageClassification"):
        raise CaptureError(
            f"{type(model).__name__} reads images but does not classify them, so its labels cannot be guessed: pass "
            "example_inputs (on the command line: a factory that returns (model, example_inputs))"
        )
    size = getattr(config, "image_size", None) or _SIDE
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    frames = (config.num_frames,) if is_video else ()
    shape = (batch, *frames, getattr(config, "num_channels", 3), height, width)
    return {
        "pixel_values": torch.empty(shape, device="meta"),
        "labels": torch.empty((batch,), dtype=torch.int64, device="meta"),
    }
