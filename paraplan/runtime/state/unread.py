"""What a model's state dict has and no rank computes with or changes, so that a state dict of a plan is whole.

Parameters that forward never reads, or in evaluation alone, and persistent buffers that it does not write. They are as
they were in the model the trainer was made of, in its dtypes, on the CPU of every rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from paraplan.ir.errors import PlanMismatchError
from paraplan.ir.model.program import Program
from paraplan.runtime.state.params import Values


class UnreadState:
    """Those tensors of one model.

    Args:
        program: of the plan.
        read: parameters that a rank of the plan has.
        model: with values, or on meta.
        values: of the program's parameters and buffers.

    Attributes:
        tensors: by the program's names.
        transient: buffers that the model writes and keeps out of its state dicts.
    """

    def __init__(self, program: Program, read: Collection[str], model: nn.Module, values: Values) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._same = buffer_names(model)
        self._same |= {name: (name, *param.aliases) for name, param in program.params.items()}
        self.transient = frozenset(name for name in program.buffer_updates if not self._same.get(name, (name,)))
        own = {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}
        for name in program.params:
            if name not in read and name in own:
                self._take(f"param:{name}", name, own[name], values)
        for name in program.buffers:
            if name not in program.buffer_updates and self._same.get(name):
                self._take(f"buffer:{name}", name, own[name], values)

    def _take(self, key: str, name: str, own: Tensor, values: Values) -> None:
        try:
            whole = values.shard(key, (), (), ())
        except PlanMismatchError as fault:
            warnings.warn(f"no training step reads {name}, and state dicts leave it out: {fault}", stacklevel=5)
            return
        self.tensors[name] = torch.empty(whole.shape, dtype=own.dtype).copy_(whole.detach())

    def full(self) -> dict[str, Tensor]:
        """Copies of them, under each of their names."""
        return {each: kept for name, x in self.tensors.items() for kept in (x.clone(),) for each in self._same[name]}

    def load(self, full: Mapping[str, Tensor]) -> None:
        """Overwrite those that are given, of their shapes."""
        with torch.no_grad():
            for name, x in self.tensors.items():
                if name in full:
                    x.copy_(full[name])


def buffer_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """First name of every buffer -> the names a state dict has it under; none where it is not persistent."""
    first: dict[int, str] = {}
    found: dict[str, tuple[str, ...]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for key, x in module._buffers.items():
            if x is not None:
                name = f"{path}.{key}" if path else key
                at = first.setdefault(id(x), name)
                found.setdefault(at, ())
                found[at] += () if key in module._non_persistent_buffers_set else (name,)
    return found
