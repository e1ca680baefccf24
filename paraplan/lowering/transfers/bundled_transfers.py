"""Parcels: values of the outer namespace that change their layout between blocks, small ones together.

What a collective of few bytes takes is mostly latency, so small values wait for others that move alike (see `bundle`)
until there are enough of them (`bundle.is_full`); a large one sets out alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import BlockRole
from paraplan.ir.machine.mesh import local_shape
from paraplan.ir.machine.reshard import Move
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.bundle import BUNDLE_BYTES, Key, bundle_key, is_full, is_small, move_together
from paraplan.lowering.blocks.emit import BlockEmitter
from paraplan.lowering.steps.step_writer import BlockCache, Flight, Parted
from paraplan.lowering.transfers.flights import Flights

Dims = tuple[int, ...]
Way = tuple[TensorSpec, tuple[Move, ...], str, str]
"""What the blocks of a parcel depend on: its spec, path, dtype and given dtype."""

IN_FLIGHT = 2
"""Collectives under way that hold their input until they are done."""


@dataclass(frozen=True)
class Parcel:
    """A value and how it moves.

    Attributes:
        source, result: its outer names before and after.
        spec: of the whole value, as it travels.
        path: the moves.
        dtype: what it is cast to on arrival; "" leaves it.
        given: the dtype it is cast from before; "" where it has that it travels in.
    """

    source: Name
    result: Name
    spec: TensorSpec
    path: tuple[Move, ...]
    dtype: str = ""
    given: str = ""


@dataclass
class ParcelBlocks:
    """The blocks that move parcels.

    Attributes:
        blocks: of the rank.
        stem, role: of their names, and what they do.
        mesh_shape: extended.
        overwrites: whether a collective that can may work in its input.
    """

    blocks: BlockCache
    stem: str
    role: BlockRole
    mesh_shape: Dims
    overwrites: bool = True

    def flight(self, parcels: Sequence[Parcel]) -> Flight:
        """The flight of parcels that move alike."""
        ways = tuple((parcel.spec, parcel.path, parcel.dtype, parcel.given) for parcel in parcels)
        names = {f"x{index}": parcel.source for index, parcel in enumerate(parcels)}
        return Flight(self.blocks.get(self.stem, self._parted, ways), names, tuple(each.result for each in parcels))

    def _parted(self, name: str, ways: Sequence[Way]) -> Parted:
        """Issue and wait of one change of layout; inputs `x<i>`."""
        emitter = BlockEmitter(name, self.mesh_shape, self.role, overwrites=self.overwrites)
        names = [_put_in(emitter, f"x{index}", way) for index, way in enumerate(ways)]
        paths = [path for _, path, *_ in ways]
        if len(ways) == 1:
            results = [emitter.get(names[0], paths[0][-1].after)]
        else:
            locals_ = [emitter.get(local, path[0].before) for local, path in zip(names, paths, strict=True)]
            results = move_together(emitter, "moved", locals_, paths)
        for index, (local, (*_, dtype, _)) in enumerate(zip(results, ways, strict=True)):
            if dtype not in ("", emitter.values[local].dtype):
                results[index] = emitter.cast(local, dtype, f"{local}^{dtype}")
        return emitter.parted(results)


@dataclass
class Parcels:
    """Sends parcels.

    Attributes:
        blocks: that move them.
        flights: that they take.
        arrived: told of every parcel once its result exists.
        all_hold: count every flight among those of which few are under way.
        widest_bytes: the most that one segment sends.
        most_bytes: from how many bytes on parcels set out in any case.
    """

    blocks: ParcelBlocks
    flights: Flights
    arrived: Callable[[Parcel], None]
    all_hold: bool = False
    widest_bytes: int = BUNDLE_BYTES
    most_bytes: int = BUNDLE_BYTES
    _waiting: dict[Key, list[Parcel]] = field(default_factory=dict)

    def send(self, parcel: Parcel) -> None:
        """Take a parcel; it sets out once it is alone in its way or enough others go with it."""
        key = travels_with(parcel.spec, parcel.path, self.blocks.mesh_shape)
        if key is None:
            self._fly((parcel,))
            return
        group = self._waiting.setdefault(key, [])
        group.append(parcel)
        if is_full(self._bytes(group), self.widest_bytes, self.most_bytes):
            self._fly(self._waiting.pop(key))

    def rest(self) -> None:
        """Begin the rest."""
        for group in self._waiting.values():
            self._fly(group)
        self._waiting.clear()

    def end(self) -> None:
        """Begin the rest, and wait for all."""
        self.rest()
        self.flights.end()

    def _fly(self, parcels: Sequence[Parcel]) -> None:
        holds = self.all_hold or any(not move.in_place for move in parcels[0].path)

        def arrived() -> None:
            for parcel in parcels:
                self.arrived(parcel)

        held = self._bytes(parcels) if holds else 0
        self.flights.send(replace(self.blocks.flight(parcels), holds_bytes=held, arrived=arrived))

    def _bytes(self, parcels: Sequence[Parcel]) -> int:
        return sum(local_bytes(each.spec, each.path[0].before, self.blocks.mesh_shape) for each in parcels)


def _put_in(emitter: BlockEmitter, local: str, way: Way) -> str:
    """The name of an input as it travels."""
    spec, path, _, given = way
    layout = path[0].before
    emitter.give(local, TensorSpec(given or spec.dtype, spec.shape), layout)
    if given in ("", spec.dtype):
        return local
    cast = emitter.cast(emitter.get(local, layout), spec.dtype, f"{local}^{spec.dtype}")
    emitter.define(cast, spec, layout)
    return cast


def travels_with(spec: TensorSpec, path: Sequence[Move], mesh_shape: Dims) -> Key | None:
    """What a value must share with others to travel with them; None where it goes alone.

    Args:
        spec: of the value, global.
        path: moves it makes.
        mesh_shape: size of every axis.
    """
    key = bundle_key(spec.dtype, path)
    if key is None or not is_small(spec, path[0], mesh_shape):
        return None
    return key


def local_bytes(spec: TensorSpec, layout: tuple[object, ...], mesh_shape: Dims) -> int:
    """Bytes of a rank's part of a value.

    Args:
        spec: of the value, global.
        layout: a placement per axis.
        mesh_shape: size of every axis.
    """
    return TensorSpec(spec.dtype, local_shape(spec.shape, layout, mesh_shape)).nbytes  # type: ignore[arg-type]
