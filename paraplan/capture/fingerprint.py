"""A digest of what a model computes: equal for its meta and its real instance, blind to the floats' dtype."""

from __future__ import annotations

import hashlib
import json
import re

from torch import nn

_VOLATILE = frozenset({"transformers_version", "_name_or_path", "name_or_path", "torch_dtype", "dtype", "_commit_hash"})


def _stable(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _stable(item) for key, item in value.items() if key not in _VOLATILE}
    return [_stable(item) for item in value] if isinstance(value, (list, tuple)) else value


_LISTED = re.compile(r"\[torch\.\S+ of size ([\dx]*)[^\]]*\]")
"""How torch writes a parameter of a list or a dict: with its dtype and its device, which are no part of a model."""


def fingerprint(model: nn.Module, precision: str) -> str:
    """sha256 of class, structure, configuration, parameters (shape, trainable, ties), buffers and modes.

    Args:
        model: on any device, meta included.
        precision: what the captured program computes in.
    """
    structure = _LISTED.sub(r"[of size \1]", repr(model))
    lines = [type(model).__qualname__, structure, f"precision {precision}"]
    config = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        lines.append(json.dumps(_stable(config.to_dict()), sort_keys=True, default=str))
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        tie = first.setdefault(id(param), name)
        lines.append(f"parameter {name} {tuple(param.shape)} {param.requires_grad} {tie}")
    for name, buffer in model.named_buffers(remove_duplicate=False):
        kind = "float" if buffer.is_floating_point() else str(buffer.dtype)
        lines.append(f"buffer {name} {tuple(buffer.shape)} {kind}")
    lines.append(f"training {model.training}")
    apart = [(name, part) for name, part in model.named_modules() if part.training != model.training]
    lines += [f"training {name} {part.training}" for name, part in apart]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
