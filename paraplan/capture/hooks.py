"""What of a model no captured step runs, and is refused: hooks on gradients, hooks of all modules, torch.jit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paraplan.capture.torch_private import global_hook
from paraplan.ir.errors import CaptureError

HOOKED = "write what the hook does to the gradient as a torch.autograd.Function; a hook is no part of a captured graph"
"""What is said of a hook on a gradient."""


def hook_of(param: Tensor) -> str:
    """What a hook on a parameter's gradient was registered with; "" where there is none."""
    if getattr(param, "_backward_hooks", None):
        return "register_hook"
    return "register_post_accumulate_grad_hook" if getattr(param, "_post_accumulate_grad_hooks", None) else ""


def global_hook_fault() -> str:
    """What to say of a hook of all modules; "" where there is none."""
    if name := global_hook():
        return (
            f"a hook of all modules is registered (torch.nn.modules.module.{name}), which no captured step runs; "
            "remove it (forward hooks of the model's own modules, registered before, are captured)"
        )
    return ""


def refuse_hooks(model: nn.Module) -> None:
    """Hooks that change gradients of parameters or modules, and hooks of all modules there are.

    Raises:
        CaptureError: there is one.
    """
    if fault := global_hook_fault():
        raise CaptureError(fault)
    for name, param in model.named_parameters():
        if hook := hook_of(param):
            raise CaptureError(f"parameter {name!r} has a hook on its gradient ({hook}): {HOOKED}")
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            where = f"module {name!r}" if name else "the model"
            raise CaptureError(f"{where} has a backward hook: {HOOKED}")


def refuse_scripts(model: nn.Module) -> None:
    """Modules of `torch.jit`, whose parameters are none of Python's.

    Raises:
        CaptureError: there is one.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"module {name!r}" if name else "the model"
            raise CaptureError(
                f"{where} is a {type(module).__name__} of torch.jit, which export cannot look into; keep the nn.Module "
                "it was made of"
            )
