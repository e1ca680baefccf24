"""Small twins of the models `sized` has: the same layers in the same number, narrow and on small inputs, in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.zoo.sized import Made, decoder
from examples.models.mlp import MLP
from examples.models.resnet import ResNet, images
from examples.models.unet import UNet
from examples.models.vgg import VGG


def _mlp(depth: int) -> Made:
    return MLP(32, 32, depth), {"x": torch.randn(256, 32), "y": torch.randn(256, 32)}


def _unet() -> Made:
    planes = images(4, 64, 2)
    return UNet(8, groups=4), {**planes, "labels": torch.randint(0, 2, (4, 64, 64))}


def _language(kind: str, layers: int, vocabulary: int) -> Made:
    return decoder(kind, layers, 32, 4, vocabulary, torch.randint(0, vocabulary, (4, 64)))


TWINS: dict[str, tuple[str, Callable[[], Made]]] = {
    "vgg16": ("width 4, 8 images of 64", lambda: (VGG(width=4, hidden=32, classes=16, pooled=2), images(8, 64, 16))),
    "resnet50": ("width 8, 4 images of 64", lambda: (ResNet((3, 4, 6, 3), 8, 16), images(4, 64, 16))),
    "resnet152": ("width 8, 4 images of 64", lambda: (ResNet((3, 8, 36, 3), 8, 16), images(4, 64, 16))),
    "unet": ("width 8, 4 images of 64", _unet),
    "mlp8": ("256 rows of 32", lambda: _mlp(8)),
    "mlp32": ("256 rows of 32", lambda: _mlp(32)),
    "gpt2-4": ("width 32, 4 x 64 tokens of 128", lambda: _language("gpt2", 4, 128)),
    "gpt2-4-50k": ("width 32, 4 x 64 tokens of 1024", lambda: _language("gpt2", 4, 1024)),
    "gpt2-12": ("width 32, 4 x 64 tokens of 128", lambda: _language("gpt2", 12, 128)),
    "gpt2-12-50k": ("width 32, 4 x 64 tokens of 1024", lambda: _language("gpt2", 12, 1024)),
    "gpt2-24": ("width 32, 4 x 64 tokens of 128", lambda: _language("gpt2", 24, 128)),
    "gpt2-48": ("width 32, 4 x 64 tokens of 128", lambda: _language("gpt2", 48, 128)),
    "llama-8": ("width 32, 4 x 64 tokens of 512", lambda: _language("llama", 8, 512)),
}
"""By the name of the model in `sized`: in words, and how it is made."""


def twin(name: str) -> tuple[str, nn.Module, dict[str, Tensor]]:
    """A twin in words, and itself in float64 and training mode, with a batch."""
    torch.manual_seed(0)
    words, make = TWINS[name]
    model, batch = make()
    return words, model.double().train(), {n: x.double() if x.is_floating_point() else x for n, x in batch.items()}
