"""A ResNet, a VGG and U-Nets of our own; ViT and ConvNeXt from transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.zoo.small import Small
from examples.models import resnet, unet, vgg

Factory = Callable[..., tuple[torch.nn.Module, dict[str, torch.Tensor]]]
SIZE, CLASSES = 8, 6
WITHOUT_DROPOUT = frozenset({"resnet", "unet", "unet_bilinear", "convnext"})
HF: dict[str, dict[str, object]] = {
    "vit": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "image_size": SIZE,
        "patch_size": 4,
        "num_labels": CLASSES,
    },
    "convnext": {
        "num_channels": 3,
        "patch_size": 2,
        "num_stages": 2,
        "hidden_sizes": [8, 16],
        "depths": [2, 2],
        "image_size": SIZE,
        "num_labels": CLASSES,
        "drop_path_rate": 0.0,
    },
}


def lifted(name: str, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Small:
    """In float64 and training mode."""
    doubled = {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}
    return Small(name, model.double().train(), doubled)


def made(name: str, factory: Factory, options: dict[str, object], dropout: float) -> Small:
    """A model of ours; dropout where it has any."""
    torch.manual_seed(0)
    chosen = {**options, "dropout": dropout} if name == "vgg" else options
    return lifted(name, *factory(**chosen))


def transformer(name: str, dropout: float) -> Small:
    """Pixels and class numbers."""
    from transformers import AutoConfig, AutoModelForImageClassification  # noqa: PLC0415  (optional extra)

    torch.manual_seed(0)
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout} if name == "vit" else {}
    config = AutoConfig.for_model(name, **HF[name], **drops)
    batch = resnet.images(8, SIZE, CLASSES)
    given = {"pixel_values": batch["pixels"], "labels": batch["labels"]}
    return lifted(name, AutoModelForImageClassification.from_config(config), given)


MODELS: dict[str, Callable[[float], Small]] = {
    "resnet": partial(made, "resnet", resnet.factory, {"size": 16, "blocks": (2, 1), "width": 4}),
    "vgg": partial(made, "vgg", vgg.factory, {"size": 8}),
    "unet": partial(made, "unet", unet.factory, {"size": 8}),
    "unet_bilinear": partial(made, "unet_bilinear", unet.factory, {"size": 8, "depth": 1, "bilinear": True}),
    **{name: partial(transformer, name) for name in HF},
}
