"""A U-Net with group norm (Ronneberger et al. 2015): an encoder, a decoder, and skips from one to the other."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions with group norm and SiLU around a shortcut.

    Args:
        given, channels: channels in and out.
        groups: of the norms.
    """

    def __init__(self, given: int, channels: int, groups: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(given, channels, 3, padding=1), nn.GroupNorm(groups, channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(groups, channels)
        self.shortcut = nn.Identity() if given == channels else nn.Conv2d(given, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, given, height, width] to [batch, channels, height, width]."""
        y = nn.functional.silu(self.norm1(self.conv1(x)))
        return nn.functional.silu(self.norm2(self.conv2(y)) + self.shortcut(x))


class UNet(nn.Module):
    """Predicts a plane per class and returns its loss.

    Args:
        width: channels at full resolution; doubled at each of `depth` halvings.
        depth: halvings.
        blocks: blocks at each resolution, on each side.
        groups: of the norms.
        classes: planes predicted.
        channels: of the image.
        bilinear: whether the decoder resizes and convolves, or uses transposed convolutions.
    """

    def __init__(
        self,
        width: int = 64,
        depth: int = 4,
        blocks: int = 2,
        groups: int = 8,
        classes: int = 2,
        channels: int = 3,
        bilinear: bool = False,
    ) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(depth + 1)]
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.down, self.reduce, self.enlarge, self.up = (nn.ModuleList() for _ in range(4))
        for fine, coarse in itertools.pairwise(sizes):
            self.down.append(nn.Sequential(*(Block(fine, fine, groups) for _ in range(blocks))))
            self.reduce.append(nn.Conv2d(fine, coarse, 3, 2, 1))
            resized = nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(coarse, fine, 3, padding=1))
            self.enlarge.append(resized if bilinear else nn.ConvTranspose2d(coarse, fine, 2, 2))
            widths = [2 * fine] + [fine] * blocks
            self.up.append(nn.Sequential(*(Block(a, fine, groups) for a in widths[:-1])))
        self.middle = nn.Sequential(*(Block(sizes[-1], sizes[-1], groups) for _ in range(blocks)))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of pixels [batch, channels, height, width] against class numbers [batch, height,
        width]."""
        x = self.stem(pixels)
        skips = []
        for blocks, reduce in zip(self.down, self.reduce, strict=True):
            x = blocks(x)
            skips.append(x)
            x = reduce(x)
        x = self.middle(x)
        for level in reversed(range(len(skips))):
            x = self.up[level](torch.cat([skips[level], self.enlarge[level](x)], 1))
        return nn.functional.cross_entropy(self.head(x), labels)


def factory(
    batch: int = 8,
    size: int = 16,
    width: int = 8,
    depth: int = 2,
    blocks: int = 1,
    groups: int = 4,
    bilinear: bool = False,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model and one global batch."""
    draw = torch.Generator().manual_seed(0)
    inputs = {
        "pixels": torch.randn(batch, 3, size, size, generator=draw),
        "labels": torch.randint(0, 2, (batch, size, size), generator=draw),
    }
    return UNet(width, depth, blocks, groups, bilinear=bilinear), inputs
