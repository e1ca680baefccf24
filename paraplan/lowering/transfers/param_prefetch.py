"""Stored parameters that live on a tier: copied to the device a segment ahead, and given up after it.

A class with a `stored_tier` has its parameters in the host's memory alone (Pudipeddi et al. 2020, L2L; Rajbhandari et
al. 2021, ZeRO-Infinity). Before a segment's block is called in either phase, the copies of what it reads are waited for
and those of the next segment in line are begun; so they have this segment's time, and at most two segments' parameters
are on the device. What is sharded is copied as it is stored and gathered by the block. As the optimizer's copy lies in
the same storage (the verifier sees to it), an update is seen by the next step's copies without more. Where that storage
has the optimizer's dtype and ops read another (bf16), what has come is cast, and what came given up.
"""

from __future__ import annotations

from dataclasses import dataclass

from paraplan.ir.execution.names import fetched, param
from paraplan.ir.execution.rank_program import Block, BlockRole
from paraplan.ir.machine.mesh import local_shape, parse_layout
from paraplan.lowering.rank_group import RankGroup
from paraplan.lowering.steps.step_writer import BlockCache, Transfer
from paraplan.lowering.transfers.copies import Copy, issue_block, local_value, wait_block


@dataclass
class ParamPrefetch:
    """The copies of parameters to the device.

    Attributes:
        rank: that they are of.
        cache: its blocks.
    """

    rank: RankGroup
    cache: BlockCache

    def is_offloaded(self, name: str) -> bool:
        """Whether a parameter is not on the device."""
        return bool(self.rank.holding.params[name].stored_tier)

    def transfer(self, segment: int, m: int, block: Block, action: str) -> Transfer | None:
        """The copies of the parameters on tiers that a segment's block reads; None where it reads none.

        Args:
            segment, m: whose block, and the microbatch.
            block: that reads them.
            action: that it belongs to.
        """
        program = self.rank.program
        params, kind = program.segments[segment].params, program.kinds[program.segments[segment].kind]
        slots = [slot for slot, local in enumerate(kind.params) if local in block.inputs]
        slots = [slot for slot in slots if self.is_offloaded(params[slot])]
        if not slots:
            return None
        copies = tuple(self._copy(position, params[slot]) for position, slot in enumerate(slots))
        dtypes = tuple(program.params[params[slot]].spec.dtype for slot in slots)
        issues = self.cache.get("fetch.p", issue_block, copies, BlockRole.FETCH)
        waits = self.cache.get("came.p", wait_block, copies, BlockRole.FETCH, dtypes)
        here = tuple(fetched(segment, slot, action) for slot in slots)
        names = {copy.source.base: param(params[slot]) for copy, slot in zip(copies, slots, strict=True)}
        names |= {copy.issued.base: name.coming() for copy, name in zip(copies, here, strict=True)}
        return Transfer((issues, waits), names, here, m, segment)

    def _copy(self, position: int, name: str) -> Copy:
        layouts, is_trained = self.rank.holding.params[name], name in self.rank.trained
        spec = self.rank.grad_spec(name) if is_trained else self.rank.program.params[name].spec
        shape = local_shape(spec.shape, parse_layout(layouts.stored), self.rank.holding.mesh.shape)
        return Copy.prefetch(local_value(f"p{position}", spec.dtype, shape), layouts.stored_tier)
