"""Capture's tests are quiet: torch and transformers warn of what their models do, whatever is captured of them."""

from __future__ import annotations

import warnings

warnings.filterwarnings("ignore")
