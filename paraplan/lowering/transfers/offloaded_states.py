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
from paraplan.ir.execution.rank_program import Block, BlockRole, Instr, InstrKind, LocalValue
from paraplan.ir.machine.mesh import local_shape, parse_layout
from paraplan.ir.model.program import ParamSpec
from paraplan.ir.model.strides import contiguous_strides
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.param_layouts import ParamLayouts
from paraplan.lowering.blocks.finish import finish_block
from paraplan.lowering.blocks.small_blocks import restore_block
from paraplan.lowering.steps.step_writer import Flight, StepWriter
from paraplan.lowering.transfers.activation_offload import AwayValue, away_block, away_value, back_block
from paraplan.lowering.transfers.flights import Flights, stops
from paraplan.lowering.transfers.offloaded_grads import keep_block, kept_block

Dims = tuple[int, ...]


@dataclass
class StateCopies:
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
        self.grads, self._updated = Flights(self.writer), Flights(self.writer)

    def tier(self, name: str) -> str:
        """Where a parameter is updated, and its gradient goes unless it waits elsewhere."""
        return self.layouts[name].update_tier

    def leaves(self, name: str) -> bool:
        """Whether a parameter's gradient leaves the device."""
        return bool(self.tier(name) or self.layouts[name].grad_tier)

    def on(self, tier: str, names: Sequence[str]) -> tuple[str, ...]:
        """Those of some parameters that live where they are updated, on a tier."""
        return tuple(name for name in names if self.tier(name) == tier and not self.layouts[name].staged)

    def leave(self, name: str, grad: Name, strides: Dims | None = None) -> Name:
        """Begin to copy a reduced gradient to where its parameter is updated, or where it waits for that; returns its
        outer name there.

        Args:
            name: of the parameter.
            grad: outer name of its gradient in the optimizer's layout.
            strides: as it lies; contiguous where left out.
        """
        value = self._local(name, "x", strides)
        if self.layouts[name].grad_tier:
            return self._keep(name, grad, value)
        away = AwayValue("x", value.strides, away_value("x", value, self.tier(name)))
        issues = self.writer.cache.get("leave.", leave_block, (away,))
        waits = self.writer.cache.get("left.", away_block, (away,))
        self.grads.send(Flight((issues, waits), away.names(grad)))
        return grad.on(self.tier(name))

    def _keep(self, name: str, grad: Name, value: LocalValue) -> Name:
        """As `leave`, to where states live."""
        tier, home, spec = self.layouts[name].grad_tier, outer_names.waiting(name), self.specs[name]
        layout = parse_layout(self.layouts[name].state)
        issues = self.writer.cache.get("keep.", keep_block, value, tier, spec, layout, self.mesh_shape)
        waits = self.writer.cache.get("kept.", kept_block, value, tier)
        names = {"x": grad, "home": home, "home^!": home.leaving(), "magnitude": outer_names.magnitude(name)}
        self.grads.send(Flight((issues, waits), names))
        return home

    def restore(self, names: Sequence[str], params: Mapping[str, ParamSpec]) -> None:
        """Write updated parameters into their stored copies, those that come from a tier one ahead."""
        order = [name for name in names if self._differs(name, params[name])]
        coming = [name for name in order if self.tier(name)]
        self._updated.line_up(stops(coming, [self._back(name) for name in coming]))
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

    def _back(self, name: str) -> Flight:
        """The copy of an updated parameter to the device, for which its restoration waits."""
        away = self._state(name)
        return Flight((self.writer.cache.get("fetch.", back_block, (away,)), None), self._state_names(name, away))

    def _state_names(self, name: str, away: AwayValue) -> dict[str, Name]:
        coming = outer_names.state(name).coming(self.tier(name))
        return {away.there.base: self.updated(name), away.back.base: coming}

    def updated(self, name: str) -> Name:
        """The outer name of the optimizer's copy of a parameter where it is updated."""
        state = outer_names.state(name)
        return state.up if self.layouts[name].staged else state

    def _restore(self, name: str, param: ParamSpec) -> None:
        layouts, dtype = self.layouts[name], self._dtype(name)
        away = self._state(name) if self.tier(name) else None
        stored, state = parse_layout(layouts.resting), parse_layout(layouts.state)
        block = self.writer.cache.get(
            "restore.", restore_block, param.spec, dtype, stored, state, self.mesh_shape, away, layouts.staged
        )
        sources = {"stored": outer_names.param(name), "state": self.updated(name)}
        if away is not None:
            sources |= self._state_names(name, away)
        self.writer.call(block, tuple(sources[local] for local in block.inputs), ())

    def _state(self, name: str) -> AwayValue:
        """The optimizer's copy of a parameter on the tier where it is updated."""
        value = self._local(name, "state", None)
        return AwayValue("state", value.strides, away_value("state", value, self.tier(name)))

    def _local(self, name: str, base: str, strides: Dims | None) -> LocalValue:
        """A gradient or the optimizer's copy of a parameter, as it would lie on the device."""
        spec = self.specs[name]
        shape = local_shape(spec.shape, parse_layout(self.layouts[name].state), self.mesh_shape)
        return LocalValue(
            dtype=spec.dtype,
            shape=shape,
            strides=strides or contiguous_strides(shape),
            base=base,
            storage_bytes=TensorSpec(spec.dtype, shape).nbytes,
        )


def leave_block(name: str, values: tuple[AwayValue, ...]) -> Block:
    """Begins copies away."""
    known: dict[str, LocalValue] = {}
    instrs = []
    for value in values:
        issued = value.issued
        known[value.local] = LocalValue(
            dtype=issued.dtype,
            shape=issued.shape,
            strides=value.strides,
            base=value.local,
            storage_bytes=issued.storage_bytes,
        )
        known[issued.base] = issued
        instrs.append(
            Instr(
                kind=InstrKind.COPY, target="offload", args=("%" + value.local, ":" + issued.tier), outs=(issued.base,)
            )
        )
    given, made = tuple(value.local for value in values), tuple(value.issued.base for value in values)
    return finish_block(name, given, made, (), known, instrs, BlockRole.OFFLOAD)
