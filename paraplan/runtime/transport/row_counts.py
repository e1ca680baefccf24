"""How many rows an exchange sends and receives, as the host must know: copied from the device once per exchange."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from paraplan.ir.process.memo import SESSION

_READ: MutableMapping[Tensor, list[list[int]]] = SESSION.owned("row_counts.read", WeakTensorKeyDictionary())


def row_counts(sent: Tensor, received: Tensor) -> list[list[int]]:
    """Rows sent to and received from each rank; the host waits for them once while `received` lives."""
    if received not in _READ:
        _READ[received] = torch.stack((sent, received)).tolist()
    return _READ[received]
