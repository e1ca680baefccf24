"""Updates of states that live elsewhere: brought a bundle of parameters at a time, updated, and stored again.

A class whose states are on disk is updated in the host's memory, and one that is `fetched` on the device (Rajbhandari
et al. 2021, ZeRO-Infinity, whose states stream from disk through the host's memory around the update). Its states are
needed by the update only; so they come in runs of parameters, each of at most a bundle's bytes or one parameter:

    bring b+1   copies of the next run's states are begun,
    UPDATE b    the optimizer updates this run's copies in place,
    restore b   stored copies on the device are written from them,
    store b     copies to where the states live are begun,
    stored b    and waited for once the next run has come, before the one after it is begun.

Gradients that wait beside the states come with them ("recall", "recalled") and are given up with the UPDATE.
So two runs are there at most, and copies in, update and copies out overlap. The first run is brought when the last
segment's backward is called, where the plan says so (`Plan.states_ahead`): it then is there beside that backward. Its
gradients are not made then and come later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paraplan.ir.execution import names as outer_names
from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import BlockRole, LocalValue, StagedUpdate, StepKind
from paraplan.ir.model.program import ParamSpec
from paraplan.ir.optimizer import Optimizer
from paraplan.lowering.steps.step_writer import Transfer
from paraplan.lowering.transfers.copies import Copy, CopyWay, copy_transfer, local_value
from paraplan.lowering.transfers.offloaded_states import OffloadedStates
from paraplan.lowering.transfers.transfer_queue import TransferQueue, consumers

_BRING = CopyWay(Copy.bring, "bring.", "came.", BlockRole.BRING)
_RECALL = CopyWay(Copy.bring, "recall.", "recalled.", BlockRole.RECALL)
_STORE = CopyWay(Copy.store, "store.", "stored.", BlockRole.STORE)


@dataclass
class StagedUpdates:
    """Writes the updates of states that live elsewhere.

    Attributes:
        states: writes what every update has in common.
        params: of the program.
        optimizer: the plan's.
        fused: the places whose updates fused kernels make.
        most_bytes: of a run's states.
    """

    states: OffloadedStates
    params: Mapping[str, ParamSpec]
    optimizer: Optimizer
    fused: frozenset[str]
    most_bytes: int
    _has_begun: bool = False

    def __post_init__(self) -> None:
        self._brought, self._recalled, self._stored = (TransferQueue(self.states.writer) for _ in range(3))

    def prefetch(self, names: Sequence[str]) -> None:
        """Bring the first run of the staged among some parameters, before `write` does."""
        runs = tuple(self._runs(names))
        self._brought.prefetch(consumers(runs, [self._transfer(_BRING, run, self._states(run)) for run in runs]))
        self._has_begun = True

    def write(self, names: Sequence[str]) -> None:
        """All steps of the staged among some parameters."""
        if not self._has_begun:
            self.prefetch(names)
        runs = tuple(self._runs(names))
        recalls = [self._transfer(_RECALL, run, grads) if (grads := self._grads(run)) else None for run in runs]
        self._recalled.prefetch(consumers(runs, recalls))
        for run in runs:
            self._brought.wait()
            self._recalled.wait()
            self._stored.wait_all()
            self._brought.advance()
            self._recalled.advance()
            self._update(run)
            self.states.restore(run, self.params)
            self._stored.issue(self._transfer(_STORE, run, self._states(run)))
        self._stored.wait_all()

    def _runs(self, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Parameters one after another with the same way to go, as many as have room."""
        run: list[str] = []
        filled = 0
        for name in names:
            if not self.states.layouts[name].staged:
                continue
            nbytes = sum(value.nbytes for value in (*self._states((name,)), *self._grads((name,))))
            if run and (filled + nbytes > self.most_bytes or self._way(name) != self._way(run[0])):
                yield tuple(run)
                run, filled = [], 0
            run.append(name)
            filled += nbytes
        if run:
            yield tuple(run)

    def _way(self, name: str) -> tuple[str, str]:
        """Where a parameter's states are stored, and where they are updated."""
        layouts = self.states.layouts[name]
        return layouts.state_tier, layouts.update_tier

    def _update(self, run: tuple[str, ...]) -> None:
        sizes = [self.states.local(name, name).nbytes for name in run]
        slots, scalars = self.optimizer.state_slots, self.optimizer.scalar_bytes * len(run)
        tier = self.states.tier(run[0])
        workspace = 0 if tier in self.fused else self.optimizer.workspace_bytes(sizes)
        staged = StagedUpdate(tier=tier, state_bytes=slots * sum(sizes) + scalars, workspace_bytes=workspace)
        recalled = tuple(name.up for name in self._grads(run).values())
        args = tuple(map(self.states.updated, run))
        self.states.writer.add(StepKind.UPDATE, args=args, staged=staged, drops=recalled)

    def _states(self, run: tuple[str, ...]) -> dict[LocalValue, Name]:
        """Of a run's parameters, the optimizer's copies and its other states, where they are stored."""
        found, slots = {}, self.optimizer.state_slots
        for number, name in enumerate(run):
            copy = self.states.local(name, f"x{number}", tier=self._way(name)[0])
            found[copy] = outer_names.state(name)
            if slots:
                others = local_value(f"s{number}", copy.dtype, (slots, *copy.shape), tier=copy.tier)
                found[others] = outer_names.slots(name)
        return found

    def _grads(self, run: tuple[str, ...]) -> dict[LocalValue, Name]:
        """Of a run's parameters, the gradients that wait beside states."""
        return {
            self.states.local(name, f"g{number}", tier=self._way(name)[0]): outer_names.waiting(name)
            for number, name in enumerate(run)
            if self.states.layouts[name].grad_tier
        }

    def _transfer(self, way: CopyWay, run: tuple[str, ...], values: Mapping[LocalValue, Name]) -> Transfer:
        """The transfer of values to where a run is updated, or back."""
        copies = {way.make(value, self.states.tier(run[0])): name for value, name in values.items()}
        return copy_transfer(self.states.writer.cache, way, copies)
