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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from paraplan.ir.execution import names as outer_names
from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import Block, BlockRole, Instr, InstrKind, LocalValue, StagedUpdate, StepKind
from paraplan.ir.machine.mesh import local_shape, parse_layout
from paraplan.ir.model.program import ParamSpec
from paraplan.ir.model.strides import contiguous_strides
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.optimizer import Optimizer
from paraplan.ir.param_layouts import ParamLayouts
from paraplan.lowering.blocks.finish import finish_block
from paraplan.lowering.steps.step_writer import Flight
from paraplan.lowering.transfers.flights import Flights, Stop
from paraplan.lowering.transfers.offloaded_states import StateCopies


@dataclass(frozen=True)
class Visitor:
    """A tensor of optimizer state on its way: `home` is the tier where it lives, `place` where it is updated."""

    local: str
    dtype: str
    shape: tuple[int, ...]
    home: str
    place: str

    def value(self, base: str, tier: str) -> LocalValue:
        """It, in a storage of its own."""
        return LocalValue(
            dtype=self.dtype,
            shape=self.shape,
            strides=contiguous_strides(self.shape),
            base=base,
            storage_bytes=TensorSpec(self.dtype, self.shape).nbytes,
            tier=tier,
        )

    @property
    def at_home(self) -> LocalValue:
        """Where it lives."""
        return self.value(self.local, self.home)

    @property
    def coming(self) -> LocalValue:
        """The copy that is updated, as it is issued."""
        return self.value(f"{self.local}^?", self.place)

    @property
    def up(self) -> LocalValue:
        """The copy that is updated."""
        return self.value(f"{self.local}^up", self.place)

    @property
    def leaving(self) -> LocalValue:
        """What is overwritten at home, on its way."""
        return msgspec.structs.replace(self.at_home, base=self.local, storage_bytes=0)


Make = tuple[str, Callable[[str, tuple[Visitor, ...], BlockRole], Block]]
"""The stem of a block's name, and what makes it."""


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

    states: StateCopies
    params: Mapping[str, ParamSpec]
    optimizer: Optimizer
    fused: frozenset[str]
    most_bytes: int
    _is_out: bool = False

    def __post_init__(self) -> None:
        self._coming, self._recalled, self._leaving = (Flights(self.states.writer) for _ in range(3))

    def set_out(self, names: Sequence[str]) -> None:
        """Bring the first run of the staged among some parameters, before `write` does."""
        makes = ("bring.", bring_block), ("came.", came_block)
        self._coming.line_up(
            Stop(run, self._flights(*makes, BlockRole.BRING, self._states(run))) for run in self._runs(names)
        )
        self._is_out = True

    def write(self, names: Sequence[str]) -> None:
        """All steps of the staged among some parameters."""
        runs = tuple(self._runs(names))
        if not self._is_out:
            self.set_out(names)
        makes = ("recall.", bring_block), ("recalled.", came_block)
        self._recalled.line_up(Stop(run, self._flights(*makes, BlockRole.RECALL, self._waiting(run))) for run in runs)
        for run in runs:
            self._coming.arrive()
            self._recalled.arrive()
            self._leaving.end()
            self._coming.advance()
            self._recalled.advance()
            self._update(run)
            self.states.restore(run, self.params)
            makes = ("store.", store_block), ("stored.", stored_block)
            for flight in self._flights(*makes, BlockRole.STORE, self._states(run)):
                self._leaving.send(flight)
        self._leaving.end()

    def _runs(self, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Parameters one after another with the same way to go, as many as have room."""
        run: list[str] = []
        filled = 0
        for name in names:
            visitors = (*self._visitors(name), *self._grads(name))
            layouts, nbytes = self.states.layouts[name], sum(each.at_home.nbytes for each in visitors)
            if not layouts.staged:
                continue
            if run and (filled + nbytes > self.most_bytes or _way(layouts) != _way(self.states.layouts[run[0]])):
                yield tuple(run)
                run, filled = [], 0
            run.append(name)
            filled += nbytes
        if run:
            yield tuple(run)

    def _visitors(self, name: str, number: int = 0) -> tuple[Visitor, ...]:
        """What of a parameter travels: the optimizer's copy, and its other states."""
        layouts, spec = self.states.layouts[name], self.states.specs[name]
        shape = local_shape(spec.shape, parse_layout(layouts.state), self.states.mesh_shape)
        way = _way(layouts)
        found = [Visitor(f"x{number}", spec.dtype, shape, *way)]
        if self.optimizer.state_slots:
            found.append(Visitor(f"s{number}", spec.dtype, (self.optimizer.state_slots, *shape), *way))
        return tuple(found)

    def _grads(self, name: str, number: int = 0) -> tuple[Visitor, ...]:
        """A parameter's gradient, where it comes too."""
        if not self.states.layouts[name].grad_tier:
            return ()
        copy = self._visitors(name)[0]
        return (Visitor(f"g{number}", copy.dtype, copy.shape, copy.home, copy.place),)

    def _update(self, run: tuple[str, ...]) -> None:
        sizes = [self._visitors(name)[0].at_home.nbytes for name in run]
        slots, scalars = self.optimizer.state_slots, self.optimizer.scalar_bytes * len(run)
        tier = _way(self.states.layouts[run[0]])[1]
        workspace = 0 if tier in self.fused else self.optimizer.workspace_bytes(sizes)
        staged = StagedUpdate(tier=tier, state_bytes=slots * sum(sizes) + scalars, workspace_bytes=workspace)
        recalled = tuple(outer_names.waiting(name).up for name in run if self._grads(name))
        args = tuple(map(self.states.updated, run))
        self.states.writer.add(StepKind.UPDATE, args=args, staged=staged, drops=recalled)

    def _waiting(self, run: tuple[str, ...]) -> dict[Visitor, Name]:
        """Of a run's parameters, the gradients that wait beside states."""
        return {
            each: outer_names.waiting(name) for number, name in enumerate(run) for each in self._grads(name, number)
        }

    def _states(self, run: tuple[str, ...]) -> dict[Visitor, Name]:
        """Of a run's parameters, the optimizer's copies and other states."""
        return {
            each: value
            for number, name in enumerate(run)
            for each, value in zip(
                self._visitors(name, number), (outer_names.state(name), outer_names.slots(name)), strict=False
            )
        }

    def _flights(
        self, issue: Make, wait: Make, role: BlockRole, visitors: Mapping[Visitor, Name]
    ) -> tuple[Flight, ...]:
        """The flight of visitors, of which these are the outer names; none without any."""
        if not visitors:
            return ()
        issues, waits = (
            self.states.writer.cache.get(stem, make, tuple(visitors), role) for stem, make in (issue, wait)
        )
        outer = {
            local: name
            for each, value in visitors.items()
            for local, name in (
                (each.local, value),
                (each.coming.base, value.coming()),
                (each.up.base, value.up),
                (f"{each.local}^!", value.leaving()),
            )
        }
        return (Flight((issues, waits), outer),)


def _way(layouts: ParamLayouts) -> tuple[str, str]:
    """Where states live, and where they are updated."""
    return layouts.state_tier, layouts.update_tier


def bring_block(name: str, visitors: tuple[Visitor, ...], role: BlockRole) -> Block:
    """Begins copies to where the update is.

    Args:
        name: of the block.
        visitors: states that come.
        role: of the block.
    """
    known = {value.base: value for each in visitors for value in (each.at_home, each.coming)}
    instrs = [
        Instr(
            kind=InstrKind.COPY,
            target="lift" if each.place else "bring",
            args=("%" + each.local, ":" + each.home),
            outs=(each.coming.base,),
        )
        for each in visitors
    ]
    given, made = tuple(each.local for each in visitors), tuple(each.coming.base for each in visitors)
    return finish_block(name, given, made, (), known, instrs, role)


def came_block(name: str, visitors: tuple[Visitor, ...], role: BlockRole) -> Block:
    """Waits for them.

    Args:
        name, visitors, role: as of `bring_block`.
    """
    known = {value.base: value for each in visitors for value in (each.coming, each.at_home)}
    known |= {each.up.base: msgspec.structs.replace(each.coming, storage_bytes=0) for each in visitors}
    instrs = [_wait(each.coming.base, each.local, each.up.base) for each in visitors]
    given = tuple(base for each in visitors for base in (each.coming.base, each.local))
    return finish_block(name, given, tuple(each.up.base for each in visitors), (), known, instrs, role)


def store_block(name: str, visitors: tuple[Visitor, ...], role: BlockRole) -> Block:
    """Begins copies to where the states live.

    Args:
        name, visitors, role: as of `bring_block`.
    """
    known = {value.base: value for each in visitors for value in (each.up, each.at_home)}
    known |= {f"{each.local}^!": each.leaving for each in visitors}
    instrs = [
        Instr(
            kind=InstrKind.COPY,
            target="store",
            args=("%" + each.up.base, ":" + each.home, "%" + each.local),
            outs=(f"{each.local}^!",),
        )
        for each in visitors
    ]
    given = tuple(base for each in visitors for base in (each.up.base, each.local))
    return finish_block(name, given, tuple(f"{each.local}^!" for each in visitors), (), known, instrs, role)


def stored_block(name: str, visitors: tuple[Visitor, ...], role: BlockRole) -> Block:
    """Waits for them.

    Args:
        name, visitors, role: as of `bring_block`.
    """
    known: dict[str, LocalValue] = {}
    for each in visitors:
        issued = each.value(f"{each.local}^!", each.home)
        known |= {each.up.base: each.up, issued.base: issued}
        known[f"{each.local}^."] = msgspec.structs.replace(issued, storage_bytes=0)
    instrs = [_wait(f"{each.local}^!", each.up.base, f"{each.local}^.") for each in visitors]
    given = tuple(base for each in visitors for base in (f"{each.local}^!", each.up.base))
    return finish_block(name, given, tuple(f"{each.local}^." for each in visitors), (), known, instrs, role)


def _wait(issued: str, held: str, out: str) -> Instr:
    return Instr(kind=InstrKind.WAIT, target="wait", args=("%" + issued, "%" + held), outs=(out,))
