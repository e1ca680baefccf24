"""How a step is done throughout: what a planner chooses for a whole plan, beside its stages and schedule.

The one place where such an option is declared. A `Plan` has these fields as its own, a planner's decisions carry them
as one record, and searches that compare plans of a job take them as one key; what reads an option is the part of
`lowering` that it is for, and what chooses it a pass or a search of `planner`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from paraplan.ir.struct import Value


class StepOptions(Value, frozen=True, kw_only=True):
    """Options of a whole step; the defaults are what files from before an option was there mean.

    Attributes:
        bundle_bytes: from how many bytes on small parameters and gradients of several segments set out together;
            0: nothing waits for another segment's.
        reducing_bytes: what gradients on their way to the optimizer's layout may hold until they are there, where a
            collective holds what it reads (a reduce-scatter does); two are under way in any case.
        reduce_every: of how many microbatches of a stage gradients are added up, as they are made, before they are
            brought to the layout they accumulate in (`lowering.steps.microbatch_groups`).
        hold_casts: whether weights are cast to float8 once a step and held, not in every forward and backward.
        delayed_update: after how many steps the host's updates of states that stay there are done beside the next
            step's work, and so are one step late (see `lowering.steps.delayed_update`); None: never.
        params_ahead: whether large sharded parameters are gathered beside the segment before the one that reads them,
            as small ones are (`lowering.transfers.param_allgather`), and not in the block that does.
        states_ahead: whether the first states that come to their update set out before the last segment's backward, and
            not after it (see `lowering.transfers.streamed_update`).
        parted_messages: whether, of what a stage sends, ranks that hold the same send a part each, which the next stage
            gathers where it is read (Narayanan et al. 2021, section 4.1); gradients added to whole ones go whole.
    """

    bundle_bytes: int = 8 << 20
    reducing_bytes: int = 0
    reduce_every: int = 1
    hold_casts: bool = False
    delayed_update: int | None = None
    params_ahead: bool = False
    states_ahead: bool = False
    parted_messages: bool = False

    def but(self, **changes: Any) -> StepOptions:
        """These options but for some."""
        return msgspec.structs.replace(self, **changes)

    @property
    def before_passes(self) -> StepOptions:
        """What is decided with the layouts; passes over a made plan choose the rest."""
        return StepOptions(bundle_bytes=self.bundle_bytes, params_ahead=self.params_ahead)

    @property
    def lean(self) -> StepOptions:
        """Those with which a step holds least of those decided with the layouts."""
        return self.but(bundle_bytes=0, params_ahead=False)


ROOMY = StepOptions(params_ahead=True)
"""What is decided where memory allows it."""
