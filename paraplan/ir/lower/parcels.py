"""Parcels: values of the outer namespace that change their layout between blocks, small ones together.

What a collective of few bytes takes is mostly latency, so small values wait for others that move alike (see `bundle`)
until there are enough of them (`bundle.is_full`); a large one sets out alone. Every change of layout is issued by one
step and waited for by a later one. What holds its input until it is done is allowed `IN_FLIGHT` at a time, or so many
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paraplan.ir.lower.bundle import BUNDLE_BYTES, Key, bundle_key, is_full, is_small, move_together
from paraplan.ir.lower.emit import BlockEmitter
from paraplan.ir.lower.parted import Parted, PartedCalls
from paraplan.ir.mesh import local_shape
from paraplan.ir.names import Name
from paraplan.ir.rank_program import BlockRole
from paraplan.ir.reshard import Move
from paraplan.ir.tensor import TensorSpec

Dims = tuple[int, ...]

IN_FLIGHT = 2


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


@dataclass(eq=False)
class _Flight:
    """A change of layout under way: what ends it, and the bytes of input it holds until then."""

    end: Callable[[], None]
    holds_bytes: int


@dataclass
class Parcels:
    """Writes the steps that move parcels.

    Attributes:
        stem, role: of blocks, for their names and what they do.
        mesh_shape: extended.
        calls: writes parted calls.
        arrived: told of every parcel once its result exists.
        overwrites: whether a collective that can may work in its input.
        all_hold: count every flight among those of which few are under way.
        widest_bytes: the most that one segment sends.
        most_bytes: from how many bytes on parcels set out in any case.
        holding_bytes: what may be held by those under way, where that allows more than `IN_FLIGHT`.
    """

    stem: str
    role: BlockRole
    mesh_shape: Dims
    calls: PartedCalls
    arrived: Callable[[Parcel], None] | None = None
    overwrites: bool = True
    all_hold: bool = False
    widest_bytes: int = BUNDLE_BYTES
    most_bytes: int = BUNDLE_BYTES
    holding_bytes: int = 0
    _waiting: dict[Key, list[Parcel]] = field(default_factory=dict)
    _flying: list[_Flight] = field(default_factory=list)
    _made: dict[object, Parted] = field(default_factory=dict)

    def send(self, parcel: Parcel) -> None:
        """Take a parcel; it sets out once it is alone in its way or enough others go with it."""
        key = travels_with(parcel.spec, parcel.path, self.mesh_shape)
        if key is None:
            self._fly((parcel,))
            return
        group = self._waiting.setdefault(key, [])
        group.append(parcel)
        nbytes = sum(local_bytes(each.spec, each.path[0].before, self.mesh_shape) for each in group)
        if is_full(nbytes, self.widest_bytes, self.most_bytes):
            self._fly(tuple(self._waiting.pop(key)))

    def rest(self) -> None:
        """Begin the rest."""
        for group in self._waiting.values():
            self._fly(tuple(group))
        self._waiting.clear()

    def end(self) -> None:
        """Begin the rest, and wait for all."""
        self.rest()
        while self._flying:
            self._flying.pop(0).end()

    def begin(self, parcels: Sequence[Parcel]) -> Callable[[], None]:
        """Write what issues parcels that move alike; returns what writes their wait."""
        key = tuple((parcel.spec, parcel.path, parcel.dtype, parcel.given) for parcel in parcels)
        if key not in self._made:
            self._made[key] = self._blocks(f"{self.stem}.{len(self._made)}", parcels)
        given = {f"x{index}": parcel.source for index, parcel in enumerate(parcels)}
        return self.calls.begin(self._made[key], given, tuple(parcel.result for parcel in parcels))

    def _fly(self, parcels: tuple[Parcel, ...]) -> None:
        wait = self.begin(parcels)

        def end() -> None:
            wait()
            if self.arrived is not None:
                for parcel in parcels:
                    self.arrived(parcel)

        holds = self.all_hold or any(not move.in_place for move in parcels[0].path)
        held = sum(local_bytes(each.spec, each.path[0].before, self.mesh_shape) for each in parcels) if holds else 0
        self._flying.append(_Flight(end, held))
        flying = [flight for flight in self._flying if flight.holds_bytes]
        while len(flying) > IN_FLIGHT and sum(flight.holds_bytes for flight in flying) > self.holding_bytes:
            self._flying.remove(flying[0])
            flying.pop(0).end()

    def _blocks(self, name: str, parcels: Sequence[Parcel]) -> Parted:
        """Issue and wait of one change of layout; inputs `x<i>`."""
        emitter = BlockEmitter(name, self.mesh_shape, self.role, overwrites=self.overwrites)
        given = [f"x{index}" for index in range(len(parcels))]
        names = [_put_in(emitter, local, parcel) for local, parcel in zip(given, parcels, strict=True)]
        if len(parcels) == 1:
            results = [emitter.get(names[0], parcels[0].path[-1].after)]
        else:
            locals_ = [emitter.get(local, parcel.path[0].before) for local, parcel in zip(names, parcels, strict=True)]
            results = move_together(emitter, "moved", locals_, [parcel.path for parcel in parcels])
        for index, (local, parcel) in enumerate(zip(results, parcels, strict=True)):
            value = emitter.values[local]
            if parcel.dtype and parcel.dtype != value.dtype:
                results[index] = emitter.cast(local, parcel.dtype, f"{local}^{parcel.dtype}")
        return emitter.parted(results)


def _put_in(emitter: BlockEmitter, local: str, parcel: Parcel) -> str:
    """The name of an input as it travels."""
    layout, spec = parcel.path[0].before, parcel.spec
    emitter.give(local, TensorSpec(parcel.given or spec.dtype, spec.shape), layout)
    if parcel.given in ("", spec.dtype):
        return local
    cast = emitter.cast(emitter.get(local, layout), spec.dtype, f"{local}^{spec.dtype}")
    emitter.define(cast, spec, layout)
    return cast


def travels_with(spec: TensorSpec, path: Sequence[Move], mesh_shape: Dims) -> Key | None:
    """What a value must share with others to travel with them; None where it goes alone."""
    key = bundle_key(spec.dtype, path)
    if key is None or not is_small(spec, path[0], mesh_shape):
        return None
    return key


def local_bytes(spec: TensorSpec, layout: tuple[object, ...], mesh_shape: Dims) -> int:
    """Bytes of a rank's part of a value."""
    return TensorSpec(spec.dtype, local_shape(spec.shape, layout, mesh_shape)).nbytes  # type: ignore[arg-type]
