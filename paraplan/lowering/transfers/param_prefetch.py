"""Stored parameters that live on a tier: copied to the device a segment ahead, and given up after it.

A class with a `stored_tier` has its parameters in the host's memory alone (Pudipeddi et al. 2020, L2L; Rajbhandari et
al. 2021, ZeRO-Infinity). Before a segment's block is called in either phase, the copies of what it reads are waited for
and those of the next segment in line are begun; so they have this segment's time, and at most two segments' parameters
are on the device. What is sharded is copied as it is stored and gathered by the block. As the optimizer's copy lies in
the same storage (the verifier sees to it), an update is seen by the next step's copies without more. Where that storage
has the optimizer's dtype and ops read another (bf16), what has come is cast, and what came given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from paraplan.ir.execution.names import fetched, param
from paraplan.ir.execution.rank_program import Block, BlockRole, Instr, InstrKind, LocalValue
from paraplan.ir.machine.mesh import local_shape, parse_layout
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.finish import finish_block
from paraplan.lowering.rank_group import RankGroup
from paraplan.lowering.steps.step_writer import BlockCache, Flight
from paraplan.lowering.transfers.activation_offload import AwayValue, back_block, leaving

Dims = tuple[int, ...]


@dataclass
class Fetches:
    """The copies of parameters to the device.

    Attributes:
        rank: that they are of.
        cache: its blocks.
    """

    rank: RankGroup
    cache: BlockCache

    def is_away(self, name: str) -> bool:
        """Whether a parameter is not on the device."""
        return bool(self.rank.holding.params[name].stored_tier)

    def flight(self, read: Sequence[tuple[int, str]], segment: int, m: int, action: str) -> Flight | None:
        """The copies of the parameters on tiers that a segment's block reads, by slot.

        Args:
            read: (slot, parameter) of those on tiers that the block reads.
            segment, m: whose block, and the microbatch.
            action: that it belongs to.
        """
        if not read:
            return None
        values = tuple(self._value(position, name) for position, (_, name) in enumerate(read))
        dtypes = tuple(self.rank.program.params[name].spec.dtype for _, name in read)
        role = BlockRole.FETCH
        issues = self.cache.get("fetch.p", back_block, values, role)
        waits = self.cache.get("came.p", came_block, values, dtypes, role)
        here = tuple(fetched(segment, slot, action) for slot, _ in read)
        names = {value.there.base: param(name) for value, (_, name) in zip(values, read, strict=True)}
        names |= {value.back.base: name.coming() for value, name in zip(values, here, strict=True)}
        return Flight((issues, waits), names, here, m, segment)

    def _value(self, position: int, name: str) -> AwayValue:
        layouts, is_trained = self.rank.holding.params[name], name in self.rank.trained
        spec = self.rank.grad_spec(name) if is_trained else self.rank.program.params[name].spec
        shape = local_shape(spec.shape, parse_layout(layouts.stored), self.rank.holding.mesh.shape)
        return leaving(f"p{position}", TensorSpec(spec.dtype, shape), layouts.stored_tier)


def came_block(
    name: str, values: tuple[AwayValue, ...], read: tuple[str, ...] = (), role: BlockRole = BlockRole.PREFETCH
) -> Block:
    """Waits for copies to the device, and casts those that are `read` in another dtype.

    Args:
        name: of the block.
        values: that are copied.
        read: of every value, the dtype that readers want; left out, that it is stored in.
        role: of the block.
    """
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
                    target="aten._to_copy.default",
                    args=("%" + value.local,),
                    kwargs={"dtype": ":" + dtype},
                    outs=(cast,),
                )
            )
            made[-1] = cast
    given = tuple(base for value in values for base in (value.back.base, value.there.base))
    return finish_block(name, given, tuple(made), (), known, instrs, role)
