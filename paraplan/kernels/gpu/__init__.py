"""Kernels for CUDA devices: Triton's, and torch's own that take what the canonical ops compute.

`kernel` gives the function behind an instruction's target and the name of the kernel it was lowered to
(`ir.machine.kernel_choice`). Triton is imported when the first of its kernels is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from paraplan.ir.errors import CodegenError
from paraplan.ir.model.graph import target_parts
from paraplan.ir.process.memo import SESSION

_MODULES = {
    ("aten.sum.dim_IntList", "in_blocks"): "sums",
    ("paraplan.dropout", "triton"): "random",
    ("paraplan.uniform", "triton"): "random",
    ("paraplan.constant", "kept"): "constant_tensors",
    ("paraplan.embedding", "aten"): "rows.lookup",
    ("paraplan.embedding_grad", "aten"): "rows.lookup",
    **{
        (f"paraplan.{name}", "channels_last"): "convolutions"
        for name in ("conv", "conv_grad_input", "conv_grad_weight")
    },
    ("paraplan.experts", "grouped"): "rows.experts",
    ("paraplan.experts_grad", "grouped"): "rows.experts",
    ("paraplan.linear_grad_weight", "wide"): "products",
    ("paraplan.rms_norm", "fused"): "rms_norm",
    ("paraplan.rms_norm_grad", "fused"): "rms_norm",
    **{
        (f"paraplan.attention{of}", name): f"attention.{name}"
        for of in ("", "_grad")
        for name in ("flash", "efficient", "cudnn")
    },
    **{(f"paraplan.attention{of}", "triton"): "attention.tiled" for of in ("", "_grad")},
    **{(f"paraplan.{name}", "triton"): "elementwise" for name in ("rotary", "gated", "gated_grad")},
    **{
        (f"paraplan.bn_{name}", "triton"): "batch_norm"
        for name in ("squares", "rstd", "running", "apply", "grad_affine", "grad_input")
    },
    **{(f"paraplan.bn_whole{name}", "triton"): "whole_batch_norm" for name in ("", "_grad")},
    **{
        (f"paraplan.embedding{name}", "triton"): "rows.split_lookup"
        for name in ("", "_grad", "_tables", "_tables_grad")
    },
    **{(f"paraplan.float8_{name}", "triton"): "float8" for name in ("scale", "cast", "cast_both")},
    **{(f"paraplan.ce_{name}", "triton"): "cross_entropy" for name in ("max", "sumexp", "target", "loss", "grad")},
}


@SESSION.cached()
def kernel(target: str, name: str) -> Callable[..., Any]:
    """The function that runs an op as the kernel of that name.

    Raises:
        CodegenError: there is none, or Triton is not installed.
    """
    module, parts = _MODULES.get((target, name)), target_parts(target)
    if module is None:
        raise CodegenError(f"{target} has no kernel called {name!r}")
    try:
        found = import_module(f"{__name__}.{module}")
    except ModuleNotFoundError as missing:
        raise CodegenError(
            f"{target} runs as a Triton kernel here, and {missing.name} is not installed (torch for CUDA brings it): "
            "pip install triton"
        ) from missing
    return getattr(found, parts.name if parts.is_canonical else "_".join(parts))  # type: ignore[no-any-return]
