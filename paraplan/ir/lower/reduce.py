"""Bringing gradients to where they accumulate and to the layout the optimizer updates in, while the backward goes on.

`Partials` takes the gradients that blocks leave as they are made (see `kind`), small and in need of a sum over ranks,
brings those of several segments to the accumulator's layout at once, and adds them up. `Reductions` follows: a gradient
is final when the last microbatch's backward has passed the first segment that uses its parameter, and everything has
been added. Its reduction is issued there and waited for after the backward; large ones are reduced in place, as nobody
else reads the accumulator any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from paraplan.ir.lower.flights import Flights, FlightWriter
from paraplan.ir.lower.parcels import IN_FLIGHT, Parcel, ParcelBlocks, Parcels, travels_with
from paraplan.ir.mesh import Layout, R, parse_layout
from paraplan.ir.names import Name, accumulator, grad
from paraplan.ir.plan import ParamLayouts
from paraplan.ir.rank_program import BlockRole
from paraplan.ir.reshard import Move, reshard_path
from paraplan.ir.tensor import TensorSpec

Dims = tuple[int, ...]


@dataclass
class Reductions:
    """The gradient reductions of a step.

    Attributes:
        layouts: of every parameter.
        specs: of every gradient as the optimizer reads it.
        accumulates: the dtype of every accumulator.
        mesh_shape: of the stage.
        writer: of the rank.
        most_bytes: the plan's bound on bundles.
        holding_bytes: the plan's bound on what those under way hold.
        wire_dtype: what sums over ranks are of, "" where of what accumulates.
        reduced: told of every parameter and its gradient, once that is in the optimizer's layout.
        grads: parameter -> outer name of its reduced gradient.
    """

    layouts: Mapping[str, ParamLayouts]
    specs: Mapping[str, TensorSpec]
    accumulates: Mapping[str, str]
    mesh_shape: Dims
    writer: FlightWriter
    most_bytes: int
    holding_bytes: int = 0
    wire_dtype: str = ""
    reduced: Callable[[str, Name], None] = lambda name, grad: None
    grads: dict[str, Name] = field(default_factory=dict)

    def __post_init__(self) -> None:
        blocks = ParcelBlocks(self.writer.blocks, "reduce.", BlockRole.REDUCE, self._extended)
        flights = Flights(self.writer, IN_FLIGHT, self.holding_bytes)
        self._parcels = Parcels(blocks, flights, self._arrived, most_bytes=self.most_bytes)
        self._names: dict[Name, str] = {}

    def final(self, names: Iterable[str]) -> None:
        """These parameters' gradients are complete: begin what can begin."""
        for name in names:
            path = self._path(name)
            added, reduced = accumulator(name), grad(name)
            self.grads[name] = reduced if path else added
            self._names[reduced] = name
            if path:
                dtypes = self.specs[name].dtype, self.accumulates[name]
                self._parcels.send(Parcel(added, reduced, self._sent(name), path, *dtypes))
            else:
                self.reduced(name, added)

    def takes(self, spec: TensorSpec, path: tuple[Move, ...]) -> bool:
        """Whether small gradients are reduced that something else can go with."""
        key = travels_with(spec, path, self._extended)
        return key is not None and any(
            path and travels_with(each, path, self._extended) == key
            for each, path in ((self._sent(name), self._path(name)) for name in self.specs)
        )

    def send(self, parcel: Parcel) -> None:
        """Take something else that goes with gradients."""
        self._parcels.send(parcel)

    def end(self) -> None:
        """Begin the rest, and wait for all."""
        self._parcels.end()

    def _arrived(self, parcel: Parcel) -> None:
        if parcel.result in self._names:
            self.reduced(self._names[parcel.result], parcel.result)

    def _path(self, name: str) -> tuple[Move, ...]:
        layouts = self.layouts[name]
        source, target = _extend(layouts.grad), _extend(layouts.state)
        return reshard_path(self.specs[name].shape, source, target, self._extended, frozen=1)

    def _sent(self, name: str) -> TensorSpec:
        """A gradient as it travels."""
        sums = any(move.reduction for move in self._path(name))
        dtype = self.wire_dtype if self.wire_dtype and sums else self.accumulates[name]
        return TensorSpec(dtype, self.specs[name].shape)

    @property
    def _extended(self) -> Dims:
        return (1, *self.mesh_shape)


class Partials:
    """Gradients on the way to their accumulators.

    Args:
        mesh_shape: extended.
        writer: of the rank.
        add: writes the step that adds a value to a parameter's gradient.
        final: told of parameters whose gradients are complete.
        most_bytes: the plan's bound on bundles.
        holding_bytes: the plan's bound on what those under way hold, where gradients of several microbatches go at
            once.
    """

    def __init__(
        self, mesh_shape: Dims, writer: FlightWriter, add: Callable[[str, Name], None],
        final: Callable[[Iterable[str]], None], most_bytes: int, holding_bytes: int = 0,
    ) -> None:  # fmt: skip
        blocks = ParcelBlocks(writer.blocks, "sums.", BlockRole.REDUCE, mesh_shape)
        flights = Flights(writer, IN_FLIGHT, holding_bytes)
        self._parcels = Parcels(blocks, flights, self._arrived, all_hold=True, most_bytes=most_bytes)
        self._add, self._final = add, final
        self._under_way: Counter[str] = Counter()
        self._passed: set[str] = set()
        self._params: dict[Name, str] = {}

    def start(self, widest_bytes: int) -> None:
        """A backward begins, no segment of which sends more than this."""
        self._parcels.widest_bytes = widest_bytes

    def send(self, param: str, parcel: Parcel) -> None:
        """Take a part of a parameter's gradient."""
        self._under_way[param] += 1
        self._params[parcel.result] = param
        self._parcels.send(parcel)

    def passed(self, params: Iterable[str]) -> None:
        """Nothing more will be sent for these parameters."""
        for name in params:
            if self._under_way[name]:
                self._passed.add(name)
            else:
                self._final((name,))

    def end(self) -> None:
        """Wait for all that is under way."""
        self._parcels.end()

    def rest(self) -> None:
        """Begin the rest, and leave it under way."""
        self._parcels.rest()

    def _arrived(self, parcel: Parcel) -> None:
        param = self._params.pop(parcel.result)
        self._add(param, parcel.result)
        self._under_way[param] -= 1
        if param in self._passed and not self._under_way[param]:
            self._passed.discard(param)
            self._final((param,))


def _extend(text: str) -> Layout:
    return (R, *parse_layout(text))
