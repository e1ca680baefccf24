"""The option space of a sharding problem: who decides, what is moved, what is kept.

Deciders each take one of their options: every op of every kind (a strategy), every parameter class (where it
is stored, how its gradient accumulates, where it is updated), every class of boundary gradients (the layout it
is handed over in) and every batch input. A `WantedValue` is a value that readers want in layouts of their own: it
is moved once per distinct layout wanted, in each phase. `Kept` is memory that a decider's option holds.

Equal segments take equal options here, and op strategies with partial inputs are offered only where all
inputs but indices and masks are partial together: both belong to the certificate's scope.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from paraplan.ir.machine.mesh import Layout
from paraplan.ir.model.graph import Phase
from paraplan.ir.model.tensor import TensorSpec
from paraplan.planner.decision_classes import ParamClass
from paraplan.planner.sharding.layout_options import ParamOption
from paraplan.planner.sharding.prices import Floats, MeshPrices, Price
from paraplan.rules.strategies import Strategy
from paraplan.rules.time_axis import ProgramMicro


@dataclass(frozen=True)
class End:
    """One end of a transfer: a decider, and the layout (on the extended mesh) each of its options means there."""

    decider: int
    layouts: tuple[Layout, ...]


@dataclass(frozen=True)
class WantedValue:
    """A value some readers want.

    Attributes:
        spec: of the value, global.
        source: where it comes from.
        readers: who wants it.
        count: how often a step does this (instances times microbatches).
        what: for people.
        name: of the value in its kind.
        kind, phase: where.
        bundled: whether small ones share a collective with others (parameters and their gradients).
        wire: what they are cast to before they are summed over ranks; "" for nothing.
        saved: of what a forward makes and hands to the backward, who decides in which layout it is saved; -1: nobody.
        lean: whether only that it may be saved there is said: as it was made, or in a layout of no more bytes; free.
    """

    spec: TensorSpec
    source: End
    readers: tuple[End, ...]
    count: int
    what: str
    name: str
    kind: int
    phase: Phase
    bundled: bool
    wire: str = ""
    saved: int = -1
    lean: bool = False

    def prices(self, prices: MeshPrices, have: tuple[Layout, ...], want: tuple[Layout, ...]) -> Floats:
        """[have, want, stream] of each move, once; infinite where there is no way.

        Args:
            prices: on the mesh.
            have, want: layouts on the extended mesh.
        """
        found = prices.transfers(self.spec, have, want, self.bundled, self.wire)
        if self.lean:
            may = np.array([[saved_as(prices, self.spec, h, w) for w in want] for h in have])[..., None]
            return np.where(may & np.isfinite(found), 0.0, np.inf)
        return found


def saved_as(prices: MeshPrices, spec: TensorSpec, made: Layout, read: Layout) -> bool:
    """Whether lowering may save what it makes in one layout in another one, to which the forward brings it.

    Args:
        prices: on the mesh.
        spec: of the value, global.
        made, read: layouts on the extended mesh.
    """
    return made == read or prices.nbytes(spec, read) <= prices.nbytes(spec, made)


@dataclass(frozen=True)
class Decider:
    """One decision: its name, the number of options, and per option the price of a whole step."""

    name: str
    prices: tuple[Price, ...]


@dataclass(frozen=True, eq=False)
class Alike:
    """The options of an op.

    Attributes:
        options: on the mesh.
        inputs, outputs: per slot, the layout on the extended mesh under each option.
        prices: [option, stream] of running it once.
    """

    options: tuple[Strategy, ...]
    inputs: tuple[tuple[Layout, ...], ...]
    outputs: tuple[tuple[Layout | None, ...], ...]
    prices: Floats

    def only(self, kept: list[int]) -> Alike:
        """With some of the options."""
        options = tuple(self.options[number] for number in kept)
        inputs = tuple(tuple(layouts[number] for number in kept) for layouts in self.inputs)
        outputs = tuple(tuple(layouts[number] for number in kept) for layouts in self.outputs)
        return Alike(options, inputs, outputs, self.prices[kept])


@dataclass
class Space:
    """A sharding problem.

    Attributes:
        prices: of the mesh.
        deciders, transfers: see the module's head.
        at_loss, at_update: bytes each decider's options hold at these two instants: (decider, bytes per option).
        saved_less: the entries of `at_loss` that may turn out smaller, as a value may be saved in the smaller layout it
            is read in: (entry, bytes per option at least).
        update_workspace: bytes needed while one parameter updates: (decider, bytes per option).
        away, away_workspace: per tier in use, states and their gradients there at the update, and what the update of
            one parameter needs besides: (decider, bytes per option).
        kept: per parameter class, what is alive all through the step: (decider, bytes per option).
        comes: per parameter class, bytes of one parameter on the device where a segment reads it though it is stored
            elsewhere, and whose: (decider, bytes per option, class).
        grads: per parameter class, bytes of one parameter's gradient per option, and whose: (decider, bytes, class).
        saved: per (kind, value), bytes one microbatch of one instance keeps for the backward: (decider, bytes).
        made: (kind, value) -> the op that makes it, and the layout it has under each option.
        lies: (kind, op) -> per tensor read, the layout wanted under each option.
        alike: what ops that differ in names only have in common.
        op_decider: (kind, op) -> decider; likewise for parameter classes, gradient classes and batch inputs.
        strategies: per (kind, op), the options on the mesh.
    """

    prices: MeshPrices
    micro: ProgramMicro
    deciders: list[Decider] = field(default_factory=list)
    transfers: list[WantedValue] = field(default_factory=list)
    at_loss: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    at_update: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    saved_less: dict[int, tuple[int, ...]] = field(default_factory=dict)
    update_workspace: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    away: dict[str, list[tuple[int, tuple[int, ...]]]] = field(default_factory=dict)
    away_workspace: dict[str, list[tuple[int, tuple[int, ...]]]] = field(default_factory=dict)
    kept: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    comes: list[tuple[int, tuple[int, ...], ParamClass]] = field(default_factory=list)
    grads: list[tuple[int, tuple[int, ...], ParamClass]] = field(default_factory=list)
    saved: dict[tuple[int, str], tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    made: dict[tuple[int, str], End] = field(default_factory=dict)
    lies: dict[tuple[int, int], tuple[tuple[Layout, ...], ...]] = field(default_factory=dict)
    alike: dict[object, Alike] = field(default_factory=dict, repr=False)
    op_decider: dict[tuple[int, int], int] = field(default_factory=dict)
    strategies: dict[tuple[int, int], tuple[Strategy, ...]] = field(default_factory=dict)
    param_decider: list[int] = field(default_factory=list)
    param_options: list[tuple[ParamOption, ...]] = field(default_factory=list)
    grad_decider: list[int] = field(default_factory=list)
    grad_options: list[tuple[Layout, ...]] = field(default_factory=list)
    batch_decider: dict[str, int] = field(default_factory=dict)
    batch_options: dict[str, tuple[Layout, ...]] = field(default_factory=dict)

    def decide(self, name: str, prices: tuple[Price, ...]) -> int:
        self.deciders.append(Decider(name, prices))
        return len(self.deciders) - 1
