"""Sums as torch runs them, whatever they hold inside (`rules.device_kernels.cuda_sums`)."""

from __future__ import annotations

import torch

aten_sum_dim_IntList = torch.ops.aten.sum.dim_IntList
