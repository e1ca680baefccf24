"""VGG with batch norm (Simonyan and Zisserman 2015): VGG-16 by default, smaller by its arguments."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from examples.models.resnet import images


class VGG(nn.Module):
    """An image classifier that returns its loss.

    Args:
        stages: convolutions of each stage, a max pooling after each; (2, 2, 3, 3, 3) is VGG-16.
        width: channels of the first stage; doubled by each, up to eight times as many.
        hidden: features of the two hidden layers of the classifier.
        classes: of the head.
        pooled: side of the plane the classifier reads.
        dropout: probability of dropping a hidden feature of the classifier.
    """

    def __init__(
        self,
        stages: Sequence[int] = (2, 2, 3, 3, 3),
        width: int = 64,
        hidden: int = 4096,
        classes: int = 1000,
        pooled: int = 7,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        given = 3
        for stage, count in enumerate(stages):
            channels = width * min(2**stage, 8)
            for _ in range(count):
                layers += [nn.Conv2d(given, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
                given = channels
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(pooled)
        self.classifier = nn.Sequential(
            nn.Linear(given * pooled**2, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of [batch, 3, height, width] pixels against [batch] class numbers."""
        planes = self.pool(self.features(pixels))
        return nn.functional.cross_entropy(self.classifier(planes.flatten(1)), labels)


def factory(
    batch: int = 8,
    size: int = 16,
    stages: Sequence[int] = (1, 2),
    width: int = 8,
    hidden: int = 32,
    classes: int = 16,
    dropout: float = 0.0,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model and one global batch."""
    return VGG(stages, width, hidden, classes, 2, dropout), images(batch, size, classes)
