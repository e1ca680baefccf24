"""ResNet with bottleneck blocks and batch norm (He et al. 2016): ResNet-50 by default, smaller by its arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """1x1, 3x3 (strided) and 1x1 convolutions, each with batch norm, around a shortcut."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide = width * self.expansion
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != wide:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, height, width] to [batch, 4 · width, height / stride, width / stride]."""
        y = torch.relu(self.norm1(self.conv1(x)))
        y = torch.relu(self.norm2(self.conv2(y)))
        return torch.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """An image classifier that returns its loss.

    Args:
        blocks: bottlenecks of each stage; (3, 4, 6, 3) is ResNet-50.
        width: channels of the stem and of the first stage's narrow convolutions; doubled by each stage.
        classes: of the head.
        channels: of the image.
    """

    def __init__(
        self, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000, channels: int = 3
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        stages, given = [], width
        for stage, count in enumerate(blocks):
            narrow = width * 2**stage
            for index in range(count):
                stages.append(Bottleneck(given, narrow, 2 if stage and index == 0 else 1))
                given = narrow * Bottleneck.expansion
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(given, classes)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of [batch, channels, height, width] pixels against [batch] class numbers."""
        features = self.pool(self.stages(self.stem(pixels))).flatten(1)
        return nn.functional.cross_entropy(self.head(features), labels)


def images(batch: int, size: int, classes: int, channels: int = 3) -> dict[str, Tensor]:
    """Random pixels and class numbers."""
    draw = torch.Generator().manual_seed(0)
    return {
        "pixels": torch.randn(batch, channels, size, size, generator=draw),
        "labels": torch.randint(0, classes, (batch,), generator=draw),
    }


def factory(
    batch: int = 8, size: int = 32, blocks: Sequence[int] = (2, 2), width: int = 8, classes: int = 16
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model and one global batch."""
    return ResNet(blocks, width, classes), images(batch, size, classes)


def resnet50() -> tuple[nn.Module, dict[str, Tensor]]:
    """ResNet-50 on 64 images of 224 x 224."""
    return ResNet(), images(64, 224, 1000)
