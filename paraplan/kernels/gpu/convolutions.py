"""Convolutions that torch's library runs channels last, whatever it is given: the reference kernels themselves."""

from __future__ import annotations

from paraplan.kernels.vision_kernels import conv, conv_grad_input, conv_grad_weight

__all__ = ["conv", "conv_grad_input", "conv_grad_weight"]
