"""The writer of a rank's steps, shared by the parts of lowering that write them.

A `Transfer` is issued by one step and waited for by a later one, with other work between: a collective, or copies
between tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypedDict, TypeVar, Unpack

from paraplan.ir.execution.name import Name
from paraplan.ir.execution.names import under_way
from paraplan.ir.execution.rank_program import Block, StagedUpdate, Step, StepKind

SplitBlock = tuple[Block | None, ...]
"""What issues, what issues the second collective where one follows another, and what waits; None where another block
does, or nothing has to."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class BlockCache:
    """The blocks of a rank that several steps call, named by a stem and a number."""

    _made: dict[str, dict[Hashable, Any]] = field(default_factory=dict)

    def get(self, stem: str, make: Callable[Concatenate[str, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What was made of this stem with these arguments; else it is made, under the stem's next name.

        Args:
            stem: that names begin with.
            make: a block of a name and these arguments.
            args, kwargs: that it is known by.
        """
        made = self._made.setdefault(stem, {})
        key = (args, tuple(kwargs.items()))
        if key not in made:
            made[key] = make(f"{stem}{len(made)}", *args, **kwargs)
        found: T = made[key]
        return found


@dataclass(frozen=True, eq=False)
class Transfer:
    """What is issued by one step and waited for by another.

    Attributes:
        blocks: that issue and wait, and between them one that issues the second of two collectives.
        names: the outer name of what they read and make; what is issued and has none here is numbered.
        results: outer names of what there is in the end, in order; None where `names` has them.
        microbatch, segment: of both steps.
        held_bytes: of its input until it is waited for.
        arrived: called then.
    """

    blocks: SplitBlock
    names: Mapping[str, Name]
    results: tuple[Name | None, ...] | None = None
    microbatch: int = -1
    segment: int = -1
    held_bytes: int = 0
    arrived: Callable[[], None] | None = None


class StepFields(TypedDict, total=False):
    """Fields of `Step` that its kind asks for."""

    block: str
    args: tuple[Name, ...]
    outs: tuple[Name | None, ...]
    drops: tuple[Name, ...]
    segment: int
    transfer: str
    staged: StagedUpdate | None
    late: bool


class StepWriter:
    """Writes the steps of a rank.

    Args:
        num_microbatches: of the plan; a step of the microbatch of this number is one of all of them.

    Attributes:
        action: the schedule's action that steps are written for.
        steps: written so far.
        blocks: called by them, by name.
        cache: the blocks that several steps call.
    """

    def __init__(self, num_microbatches: int) -> None:
        self.action = ""
        self.steps: list[Step] = []
        self.blocks: dict[str, Block] = {}
        self.cache = BlockCache()
        self._num_microbatches, self._num_issued = num_microbatches, 0

    def add(
        self,
        kind: StepKind,
        microbatch: int = -1,
        **fields: Unpack[StepFields],
    ) -> None:
        """Write a step: a `Step` of these fields.

        Args:
            kind: of the step.
            microbatch: that it is of; as many as there are for all of them, -1 for none.
            fields: the others of `Step`.
        """
        microbatch = -1 if microbatch == self._num_microbatches else microbatch
        self.steps.append(Step(kind=kind, action=self.action, microbatch=microbatch, **fields))

    def call(
        self,
        block: Block,
        args: tuple[Name, ...],
        outs: tuple[Name | None, ...],
        microbatch: int = -1,
        segment: int = -1,
    ) -> None:
        """Write a step that calls a block, for a segment in a microbatch where it belongs to one.

        Args:
            block: that is called.
            args, outs: outer names; None for an output that is absent.
            microbatch, segment: that the call is of; -1 for none.
        """
        self.blocks[block.name] = block
        self.add(StepKind.CALL, block=block.name, args=args, outs=outs, microbatch=microbatch, segment=segment)

    def issue(self, transfer: Transfer) -> PendingTransfer:
        """Write the step that issues a transfer; returns what writes those that follow."""
        first, *rest = transfer.blocks
        found = PendingTransfer(self, transfer, dict(transfer.names), rest)
        if first is not None:
            found.call(first)
        return found

    def number(self) -> Name:
        """A name for what is under way."""
        self._num_issued += 1
        return under_way(self._num_issued - 1)


@dataclass(eq=False)
class PendingTransfer:
    """A transfer that was issued.

    Attributes:
        writer: of its steps.
        transfer: which.
        names: the outer name of what its blocks read and made.
        rest: its blocks yet to be called, the last of which waits.
        num_passed: segments passed since, as its queue counts them.
    """

    writer: StepWriter
    transfer: Transfer
    names: dict[str, Name]
    rest: list[Block | None]
    num_passed: int = 0

    def issue_rest(self) -> None:
        """Issue what follows the collective that is under way, if something does."""
        while len(self.rest) > 1:
            block = self.rest.pop(0)
            assert block is not None
            self.call(block)

    def wait(self) -> None:
        """Wait for it."""
        self.issue_rest()
        if (block := self.rest.pop()) is not None:
            named = tuple(None if local is None else self.names.get(local) for local in block.outputs)
            self.call(block, named if self.transfer.results is None else self.transfer.results)
        if self.transfer.arrived is not None:
            self.transfer.arrived()

    def call(self, block: Block, results: tuple[Name | None, ...] | None = None) -> None:
        """Write the step that calls a block; results not given are named as its outputs, or numbered."""
        if results is None:
            for local in block.outputs:
                if local is not None and local not in self.names:
                    self.names[local] = self.writer.number()
            results = tuple(None if local is None else self.names[local] for local in block.outputs)
        args = tuple(self.names[local] for local in block.inputs)
        self.writer.call(block, args, results, self.transfer.microbatch, self.transfer.segment)
