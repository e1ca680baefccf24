"""Optimizer states that live on a tier: gradients on their way there, updated parameters on their way back.

A class whose layouts have a `state_tier` keeps the optimizer's copy and its states there, and is updated there, or is
brought elsewhere for it (`streamed_update.py`). Where the host updates (Ren et al. 2021, ZeRO-Offload; Rajbhandari et
al. 2021, ZeRO-Infinity), gradients go there: once such a parameter's gradient is in the optimizer's
layout it is copied to the tier. The copy is waited for, and the gradient's memory given back, when the backward has
passed the next segment, or at the end: so a copy has that segment's time. After the update the optimizer's copies come
back one ahead of the parameter that is being written (and gathered) into its stored copy. States that live on the
device are updated first.

Limits: the way back carries the optimizer's dtype, which under bf16 and fp16 is float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paraplan.ir.execution import names as outer_names
from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import BlockRole, LocalValue
from paraplan.ir.machine.mesh import local_shape, parse_layout
from paraplan.ir.model.program import ParamSpec
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.param_layouts import ParamLayouts
from paraplan.lowering.blocks.small_blocks import restore_block
from paraplan.lowering.steps.step_writer import StepWriter, Transfer
from paraplan.lowering.transfers.copies import Copy, CopyWay, copy_transfer, issue_block, local_value, wait_block
from paraplan.lowering.transfers.offloaded_grads import measured_block
from paraplan.lowering.transfers.transfer_queue import TransferQueue, consumers

Dims = tuple[int, ...]
_OFFLOAD = CopyWay(Copy.offload, "leave.", "left.", BlockRole.OFFLOAD)


@dataclass
class OffloadedStates:
    """Writes the steps that copy gradients and updated parameters.

    Attributes:
        layouts: of every parameter.
        specs: of every gradient, which has the dtype of the optimizer's copy.
        mesh_shape: of the stage.
        writer: of the rank.
    """

    layouts: Mapping[str, ParamLayouts]
    specs: Mapping[str, TensorSpec]
    mesh_shape: Dims
    writer: StepWriter

    def __post_init__(self) -> None:
        self.grads, self._updated = TransferQueue(self.writer), TransferQueue(self.writer)

    def tier(self, name: str) -> str:
        """Where a parameter is updated, and its gradient goes unless it waits elsewhere."""
        return self.layouts[name].update_tier

    def offloads_grad(self, name: str) -> bool:
        """Whether a parameter's gradient leaves the device."""
        return bool(self.tier(name) or self.layouts[name].grad_tier)

    def on(self, tier: str, names: Sequence[str]) -> tuple[str, ...]:
        """Those of some parameters that live where they are updated, on a tier."""
        return tuple(name for name in names if self.tier(name) == tier and not self.layouts[name].staged)

    def offload_grad(self, name: str, grad: Name, strides: Dims | None = None) -> Name:
        """Begin to copy a reduced gradient to where its parameter is updated, or where it waits for that; returns its
        outer name there.

        Args:
            name: of the parameter.
            grad: outer name of its gradient in the optimizer's layout.
            strides: as it lies; contiguous where left out.
        """
        value, tier = self.local(name, "x", strides), self.tier(name)
        if self.layouts[name].grad_tier:
            return self._keep(name, grad, value)
        self.grads.issue(copy_transfer(self.writer.cache, _OFFLOAD, {_OFFLOAD.make(value, tier): grad}))
        return grad.on(tier)

    def _keep(self, name: str, grad: Name, value: LocalValue) -> Name:
        """As `offload_grad`, to where states are stored."""
        home, spec, layouts = outer_names.waiting(name), self.specs[name], self.layouts[name]
        copy = Copy.keep(value, self.local(name, "home", tier=layouts.grad_tier))
        layout = parse_layout(layouts.state)
        issues = self.writer.cache.get("keep.", measured_block, copy, spec, layout, self.mesh_shape)
        waits = self.writer.cache.get("kept.", wait_block, (copy,), BlockRole.STORE)
        names = {"x": grad, "home": home, "home^!": home.leaving(), "magnitude": outer_names.magnitude(name)}
        self.grads.issue(Transfer((issues, waits), names))
        return home

    def restore(self, names: Sequence[str], params: Mapping[str, ParamSpec]) -> None:
        """Write updated parameters into their stored copies, those that come from a tier one ahead."""
        order = [name for name in names if self._differs(name, params[name])]
        coming = [name for name in order if self.tier(name)]
        self._updated.prefetch(consumers(coming, [self._prefetch(name) for name in coming]))
        for name in order:
            self._updated.reach(name)
            self._restore(name, params[name])

    def _differs(self, name: str, param: ParamSpec) -> bool:
        layouts = self.layouts[name]
        if layouts.stored_tier:
            return False
        return bool(layouts.state_tier) or layouts.resting != layouts.state or self._dtype(name) != param.spec.dtype

    def _dtype(self, name: str) -> str:
        return self.specs[name].dtype

    def _prefetch(self, name: str) -> Transfer:
        """The copy of an updated parameter to the device, for which its restoration waits."""
        copy = self._copy(name)
        block = self.writer.cache.get("fetch.", issue_block, (copy,), BlockRole.PREFETCH)
        return Transfer((block, None), self._copy_names(name, copy))

    def _copy(self, name: str) -> Copy:
        """The copy to the device of the optimizer's copy of a parameter, from the tier where it is updated."""
        return Copy.prefetch(self.local(name, "state"), self.tier(name))

    def _copy_names(self, name: str, copy: Copy) -> dict[str, Name]:
        issued = outer_names.state(name).coming(copy.tier)
        return {copy.source.base: self.updated(name), copy.issued.base: issued}

    def updated(self, name: str) -> Name:
        """The outer name of the optimizer's copy of a parameter where it is updated."""
        state = outer_names.state(name)
        return state.up if self.layouts[name].staged else state

    def _restore(self, name: str, param: ParamSpec) -> None:
        layouts, dtype = self.layouts[name], self._dtype(name)
        copy = self._copy(name) if self.tier(name) else None
        stored, state = parse_layout(layouts.resting), parse_layout(layouts.state)
        block = self.writer.cache.get(
            "restore.", restore_block, param.spec, dtype, stored, state, self.mesh_shape, copy, layouts.staged
        )
        sources = {"stored": outer_names.param(name), "state": self.updated(name)}
        if copy is not None:
            sources |= self._copy_names(name, copy)
        self.writer.call(block, tuple(sources[local] for local in block.inputs), ())

    def local(self, name: str, local: str, strides: Dims | None = None, tier: str = "") -> LocalValue:
        """A rank's part of the optimizer's copy of a parameter, or of its gradient in that layout.

        Args:
            name: of the parameter.
            local: what a block calls it.
            strides: of it; None for row-major.
            tier: where it is stored; "" for the device.
        """
        spec = self.specs[name]
        shape = local_shape(spec.shape, parse_layout(self.layouts[name].state), self.mesh_shape)
        return local_value(local, spec.dtype, shape, strides, tier)
