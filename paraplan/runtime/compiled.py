"""Compiling blocks with torch.compile, phase by phase, and only where the result is eager's.

Compilers have miscompiled graphs with collectives without an error (a fused kernel read a buffer before its
all-reduce), so a compiled block is run beside the eager one the first time it is called; where they differ, or
compiling fails, on any rank of the mesh, the eager block is used from then on, by every rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from paraplan.ir.rank_program import is_compiled
from paraplan.runtime.distributed import DistributedTransport
from paraplan.runtime.executor import Executor

Boxed = Callable[[list[Any]], Sequence[Tensor | None]]
Backend = str | Callable[..., Any]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class CheckedBlock:
    """A block that becomes compiled code if its first run shows no difference.

    Args:
        name: for the warning.
        eager: the emitted module.
        transport: by which ranks agree.
        backend: torch.compile's.

    Attributes:
        chosen: what runs; None before the first call.
        reason: why that is the eager module, where it is.
    """

    def __init__(
        self, name: str, eager: fx.GraphModule, transport: DistributedTransport, backend: Backend = "inductor"
    ) -> None:
        self.name, self.eager, self.transport, self.backend = name, eager, transport, backend
        self.chosen: Boxed | None = None
        self.reason = ""

    def __call__(self, boxed: list[Any]) -> Sequence[Tensor | None]:
        """Run it, deciding on the first call."""
        if self.chosen is not None:
            return self.chosen(boxed)
        again = list(boxed)
        wanted = self.eager(boxed)
        compiled = torch.compile(_unboxed(self.eager), fullgraph=True, backend=self.backend)
        reason = ""
        try:
            found = compiled(*again)
            reason = _difference(found, wanted)
        except Exception as fault:  # noqa: BLE001  (whatever the compiler raises, eager is right)
            reason = f"{type(fault).__name__}: {str(fault)[:200]}"
        if self._any_rank(bool(reason)):
            self.reason = reason or "another rank found a difference"
            warnings.warn(f"block {self.name} stays eager: {self.reason}", stacklevel=2)
            self.chosen = self.eager
        else:
            self.chosen = _boxed(compiled)
        return wanted

    def _any_rank(self, bad: bool) -> bool:
        flag = torch.tensor(float(bad), device=self.transport.device)
        for axis in range(len(self.transport.mesh.shape)):
            flag = self.transport.reduce(flag, axis, "max")
        return bool(flag)


def _unboxed(module: fx.GraphModule) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return module(list(args))

    return run


def _boxed(function: Callable[..., Any]) -> Boxed:
    def run(boxed: list[Any]) -> Any:
        args = tuple(boxed)
        boxed.clear()
        return function(*args)

    return run


def _difference(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> str:
    for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if a is None or b is None:
            continue
        if a.stride() != b.stride():
            return f"result {index} has strides {a.stride()}, eager's are {b.stride()}"
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return f"result {index} differs"
            continue
        scale = max(float(b.abs().max()) if b.numel() else 0.0, 1e-30)
        error = float((a - b).abs().max()) / scale if b.numel() else 0.0
        if not error <= TOLERANCE.get(b.dtype, 1e-4):
            return f"result {index} differs by {error:.1e} of its largest element"
    return ""


def compile_phases(
    executor: Executor, transport: DistributedTransport, phases: Sequence[str], backend: Backend = "inductor"
) -> None:
    """Compile the blocks of the given phases ("F", "B") of a rank that can be; recordings stay eager."""
    for name, module in list(executor.modules.items()):
        chosen = name.rsplit(".", 1)[-1] in phases and is_compiled(executor.program.blocks[name])
        if chosen and isinstance(module, fx.GraphModule):
            executor.modules[name] = CheckedBlock(name, module, transport, backend)


def compiled_blocks(executor: Executor) -> dict[str, str | None]:
    """Blocks that were to be compiled: "" where they run compiled, why they stay eager, None before their first run."""
    found = {name: block for name, block in executor.modules.items() if isinstance(block, CheckedBlock)}
    return {name: None if block.chosen is None else block.reason for name, block in found.items()}
