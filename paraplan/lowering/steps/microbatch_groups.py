"""Microbatches whose gradients are added up before they are reduced (`Plan.reduce_every`).

Where a gradient accumulates in another layout than it is made in (ZeRO-2 and ZeRO-3 accumulate shards), every
microbatch's is reduced over ranks. Added up as they are made first, and reduced once for several microbatches of a
stage, they take so many times less communication, and for as long the room of a whole gradient: what FSDP's users
choose between with `no_sync`. With as many as a pipeline has ranks, an interleaved schedule passes them one after
another, so few stages' are whole at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.name import Name
from paraplan.ir.execution.names import grouped
from paraplan.ir.execution.rank_program import LocalValue, StepKind
from paraplan.ir.execution.schedule import Action, ActionKind
from paraplan.ir.machine.reshard import Move
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.rank_group import RankGroup
from paraplan.lowering.rewrites.accumulators import Accumulators
from paraplan.lowering.steps.step_writer import StepWriter
from paraplan.lowering.transfers.bundled_transfers import BundledValue


class Groups:
    """The groups of a rank's actions.

    Args:
        rank, writer: whose steps are written.
        accumulators: of the rank.
        send: takes a parameter's gradient that is brought to its accumulator.
        actions: of the rank, in order.

    Attributes:
        every: microbatches of a group; those left over are one.
    """

    def __init__(
        self,
        rank: RankGroup,
        writer: StepWriter,
        accumulators: Accumulators,
        send: Callable[[str, BundledValue], None],
        actions: Sequence[Action],
    ) -> None:
        self._rank, self._writer, self._accumulators, self._send = rank, writer, accumulators, send
        every = self.every = rank.plan.group
        order = _order(actions, ActionKind.W)
        if every > 1 and order != _order(actions, ActionKind.I):
            raise InvalidPlanError(
                f"reduce_every is {every}, and a stage's microbatches are in another order in the second halves of "
                "backwards than in the first ones; take 1, or a schedule with one order"
            )
        self._of: dict[tuple[int, int], tuple[int, bool]] = {}
        for stage, found in order.items():
            for at, m in enumerate(found):
                ends = at % every == every - 1 or at == len(found) - 1
                self._of[stage, m] = found[at - at % every], ends
        self._begun: set[Name] = set()
        self._paths: dict[tuple[int, str], list[tuple[Move, ...]]] = {}
        self._last: dict[tuple[int, str, tuple[Move, ...]], int] = {}

    def add_up(self, name: str, out: Name, value: LocalValue, m: int, index: int, path: tuple[Move, ...]) -> None:
        """Add a gradient to its group's, and send what that adds up to once nothing more comes.

        Args:
            name, out, value: the parameter; its gradient's outer name, as it was made.
            m, index: of which microbatch and segment.
            path: the moves to where it accumulates.
        """
        stage = next(at for at, each in enumerate(self._rank.plan.stages) if each.first <= index < each.stop)
        first, ends = self._of[stage, m]
        paths = self._paths.setdefault((stage, name), [])
        if path not in paths:  # one that two segments make in two layouts adds up apart
            paths.append(path)
        total, dtype = grouped(name, stage, paths.index(path), first), self._accumulators.dtypes[name]
        if total not in self._begun:
            self._begun.add(total)
            out, value = self._accumulators.laid_out(name, out, value, dtype, m, index)
        self._writer.add(StepKind.ACCUMULATE, args=(total, out), microbatch=m, segment=index)
        if ends and index == self._last_of((stage, name, path), m):
            sums = any(move.reduction for move in path)
            wire = self._rank.plan.wire_dtype if sums and self._rank.plan.wire_dtype else dtype
            sent = TensorSpec(wire, self._rank.program.params[name].spec.shape)
            arrives = self._accumulators.dtype_on_arrival(name, path)
            self._send(name, BundledValue(total, total.moved, sent, path, arrives, dtype))

    def _last_of(self, key: tuple[int, str, tuple[Move, ...]], m: int) -> int:
        """The last segment of a stage's backward whose gradient of a parameter has to move so."""
        if key not in self._last:
            stage, name, path = key
            at, backwards = self._rank.plan.stages[stage], self._rank.parts(m).backwards
            segments = self._rank.program.segments
            self._last[key] = next(
                index
                for index in range(at.first, at.stop)
                for param, moves in zip(segments[index].params, backwards[index].partial, strict=True)
                if param == name and moves == path
            )
        return self._last[key]


def _order(actions: Sequence[Action], half: ActionKind) -> dict[int, list[int]]:
    """Per stage, its microbatches in the order of their backwards, or of halves of them."""
    found: dict[int, list[int]] = {}
    for action in actions:
        if action.kind in (ActionKind.B, half):
            found.setdefault(action.stage, []).append(action.microbatch)
    return found
