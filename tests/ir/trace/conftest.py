"""Makes the shared models importable under one name, whatever directory pytest runs from."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path

import torch

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
_spec = importlib.util.spec_from_file_location("ir_trace_models", Path(__file__).with_name("models.py"))
assert _spec is not None and _spec.loader is not None
sys.modules["ir_trace_models"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["ir_trace_models"])
