"""Stored parameters that live on a tier: copied to the device a segment ahead, and given up after it.

A class with a `stored_tier` has its parameters in the host's memory alone (Pudipeddi et al. 2020, L2L; Rajbhandari et
al. 2021, ZeRO-Infinity). Before a segment's block is called in either phase, the copies of what it reads are waited for
and those of the next segment in line are begun; so they have this segment's time, and at most two segments' parameters
are on the device. What is sharded is copied as it is stored and gathered by the block. As the optimizer's copy lies in
the same storage (the verifier sees to it), an update is seen by the next step's copies without more. Where that storage
has the optimizer's dtype and ops read another (bf16), what has come is cast, and what came given up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from paraplan.ir.lower.away import AwayValue, Call, away_value, back_block
from paraplan.ir.lower.finish import finish_block
from paraplan.ir.mesh import local_shape, parse_layout
from paraplan.ir.names import fetched, param
from paraplan.ir.plan import ParamLayouts
from paraplan.ir.program import ParamSpec
from paraplan.ir.rank_program import Block, BlockRole, Instr, InstrKind, LocalValue
from paraplan.ir.strides import contiguous_strides
from paraplan.ir.tensor import TensorSpec

Dims = tuple[int, ...]


@dataclass(frozen=True)
class FetchVisit:
    """A segment about to be run, in some microbatch, and the parameters on tiers it reads, by slot."""

    segment: int
    microbatch: int
    params: tuple[tuple[int, str], ...]


@dataclass
class Fetches:
    """Writes the steps that copy parameters to the device.

    Attributes:
        params, layouts: of every parameter.
        masters: of every trained parameter as the optimizer has it.
        mesh_shape: of the stage.
        call: writes one step.
    """

    params: Mapping[str, ParamSpec]
    layouts: Mapping[str, ParamLayouts]
    masters: Mapping[str, TensorSpec]
    mesh_shape: Dims
    call: Call
    _ahead: list[FetchVisit] = field(default_factory=list)
    _action: str = ""
    _blocks: dict[tuple[str, tuple[AwayValue, ...], tuple[str, ...]], Block] = field(default_factory=dict)

    def is_away(self, name: str) -> bool:
        """Whether a parameter is not on the device."""
        return bool(self.layouts[name].stored_tier)

    def start(self, visits: Sequence[FetchVisit], action: str) -> None:
        """An action begins that runs these segments."""
        self._ahead, self._action = list(visits), action
        for first in self._ahead[:1]:
            self._begin(first)

    def reach(self) -> None:
        """The next segment is run: what it reads has come, and what the one after it reads is under way."""
        if not self._ahead:
            return
        self._end(self._ahead.pop(0))
        for following in self._ahead[:1]:
            self._begin(following)

    def _begin(self, visit: FetchVisit) -> None:
        if visit.params:
            block = self._block("fetch", visit)
            args = tuple(param(name) for _, name in visit.params)
            outs = tuple(fetched(visit.segment, slot, self._action).coming() for slot, _ in visit.params)
            self.call(block, args, outs, visit.microbatch, visit.segment)

    def _end(self, visit: FetchVisit) -> None:
        if visit.params:
            block = self._block("came", visit)
            here = tuple(fetched(visit.segment, slot, self._action) for slot, _ in visit.params)
            given = [(come.coming(), param(name)) for come, (_, name) in zip(here, visit.params, strict=True)]
            args = tuple(name for pair in given for name in pair)
            self.call(block, args, here, visit.microbatch, visit.segment)

    def _block(self, stem: str, visit: FetchVisit) -> Block:
        values = tuple(self._value(position, name) for position, (_, name) in enumerate(visit.params))
        read = tuple(self.params[name].spec.dtype for _, name in visit.params)
        key = (stem, values, read)
        if key not in self._blocks:
            name = f"{stem}.p{sum(other == stem for other, *_ in self._blocks)}"
            if stem == "fetch":
                self._blocks[key] = back_block(name, values, BlockRole.FETCH)
            else:
                self._blocks[key] = came_block(name, values, read, BlockRole.FETCH)
        return self._blocks[key]

    def _value(self, position: int, name: str) -> AwayValue:
        spec, layouts = self.masters.get(name, self.params[name].spec), self.layouts[name]
        shape = local_shape(spec.shape, parse_layout(layouts.stored), self.mesh_shape)
        local = f"p{position}"
        value = LocalValue(
            dtype=spec.dtype, shape=shape, strides=contiguous_strides(shape), base=local,
            storage_bytes=TensorSpec(spec.dtype, shape).nbytes,
        )  # fmt: skip
        return AwayValue(local, value.strides, away_value(local, value, layouts.stored_tier))


def came_block(
    name: str, values: tuple[AwayValue, ...], read: tuple[str, ...] = (), role: BlockRole = BlockRole.PREFETCH
) -> Block:
    """Waits for copies to the device, and casts those that are `read` in another dtype."""
    known: dict[str, LocalValue] = {}
    instrs, made = [], []
    for value, dtype in zip(values, read or [value.issued.dtype for value in values], strict=True):
        issued, held = value.back, value.there
        known[issued.base], known[held.base] = issued, held
        known[value.local] = msgspec.structs.replace(issued, storage_bytes=0)
        instrs.append(
            Instr(kind=InstrKind.WAIT, target="wait", args=("%" + issued.base, "%" + held.base), outs=(value.local,))
        )
        made.append(value.local)
        if dtype != issued.dtype:
            cast = f"{value.local}^{dtype}"
            nbytes = TensorSpec(dtype, issued.shape).nbytes
            known[cast] = msgspec.structs.replace(issued, dtype=dtype, base=cast, storage_bytes=nbytes)
            instrs.append(
                Instr(
                    target="aten._to_copy.default", args=("%" + value.local,), kwargs={"dtype": ":" + dtype},
                    outs=(cast,),
                )
            )  # fmt: skip
            made[-1] = cast
    given = tuple(base for value in values for base in (value.back.base, value.there.base))
    return finish_block(name, given, tuple(made), (), known, instrs, role)
