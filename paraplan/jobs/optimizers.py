"""The torch classes behind the optimizers that plans name."""

from __future__ import annotations

from typing import Any

import torch

_DECAY = {"weight_decay": 0.01}

OPTIMIZER_CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "sgd+decay": (torch.optim.SGD, _DECAY),
    "momentum+decay": (torch.optim.SGD, {"momentum": 0.9, **_DECAY}),
    "nesterov+decay": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, **_DECAY}),
    "adam+decay": (torch.optim.Adam, _DECAY),
}
