"""Options of parameters, boundary gradients and batch inputs, and which storages the backward keeps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from paraplan.ir.machine.mesh import Layout, P, Placement, R, S, is_shardable, is_view_of, layout_text
from paraplan.ir.machine.reshard import only_gathers
from paraplan.ir.machine.tier_placement import HERE, TierPlacement
from paraplan.ir.model.graph import Phase
from paraplan.ir.model.program import BatchInput, SegmentKind, master_dtype
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.param_layouts import ParamLayouts
from paraplan.planner.decision_classes import ParamClass
from paraplan.rules.storage_roots import storage_roots

Dims = tuple[int, ...]


@dataclass(frozen=True)
class ParamOption:
    """Where a parameter class lives: see `ir.param_layouts.ParamLayouts`.

    `eager`: the stored copy could rest as the state lies and be gathered ahead, and does not; for pins alone.
    """

    stored: Layout
    grad: Layout
    state: Layout
    state_dtype: str
    place: TierPlacement = HERE
    ahead: bool = False
    eager: bool = False

    @property
    def resting(self) -> Layout:
        """The layout of the stored copy between steps."""
        return self.state if self.ahead else self.stored

    def needs_restore(self, dtype: str) -> bool:
        """Whether the update is followed by a write into the stored copy."""
        if self.place.params:  # the state's storage
            return False
        return bool(self.place.states) or self.resting != self.state or dtype != self.state_dtype

    def owns_state(self, spec: TensorSpec, mesh_shape: Dims) -> bool:
        """Whether the optimizer's tensor is a storage of its own, not a slice of the stored copy."""
        alike = spec.dtype == self.state_dtype and is_view_of(spec.shape, self.resting, self.state, mesh_shape)
        return bool(self.place.states) or not alike

    def layouts(self) -> ParamLayouts:
        """As a plan writes it."""
        stored, grad, state = (layout_text(each) for each in (self.stored, self.grad, self.state))
        return ParamLayouts(stored=stored, grad=grad, state=state).placed(self.place, self.ahead)


def _axis_options(ndim: int) -> list[tuple[Placement, Placement, Placement]]:
    """Per axis (stored, grad, state): data parallel, its eager form, ZeRO-1, ZeRO-2, ZeRO-3 or tensor parallel."""
    found: list[tuple[Placement, Placement, Placement]] = [(R, P, R), (R, R, R)]
    for dim in range(ndim):
        found += [(R, P, S(dim)), (R, S(dim), S(dim)), (S(dim), S(dim), S(dim))]
    return found


def param_options(
    precision: str, cls: ParamClass, mesh_shape: Dims, places: Sequence[TierPlacement] = (HERE,)
) -> tuple[ParamOption, ...]:
    """Every combination of per-axis options that divides or may be padded; a frozen parameter is only stored.

    A stored copy that can be gathered ahead of the step's first use is, where the state is on the device; not so for
    pins (`ParamOption.eager`).

    Args:
        precision: of the program.
        cls: parameters that lie alike.
        mesh_shape: of the stage.
        places: where optimizer states, and stored copies that can be their states' storages, may be.
    """
    dtype = master_dtype(precision, cls.spec.dtype)
    found: dict[ParamOption, None] = {}
    for combo in itertools.product(_axis_options(len(cls.spec.shape)), repeat=len(mesh_shape)):
        stored, grad, state = (tuple(axis[i] for axis in combo) for i in range(3))
        if not cls.trained:
            grad = state = stored
        if all(is_shardable(cls.spec.shape, layout, mesh_shape) for layout in (stored, grad, state)):
            ahead = stored != state and only_gathers(cls.spec.shape, state, stored, mesh_shape)
            for place in places if cls.trained else dict.fromkeys(each.frozen for each in places):
                if place == HERE and ahead:
                    found[ParamOption(stored, grad, state, dtype, ahead=True)] = None
                    found[ParamOption(stored, grad, state, dtype, eager=True)] = None
                elif not place.params or stored == state:
                    found[ParamOption(stored, grad, state, dtype, place)] = None
    return tuple(found)


def grad_options(spec: TensorSpec, extended: Dims, first: Placement) -> tuple[Layout, ...]:
    """Layouts a boundary gradient may be handed over in: anything that divides or may be padded, partial sums too.

    Args:
        spec: of the gradient.
        extended: mesh shape with the microbatch axis in front.
        first: where it lies along that axis.
    """
    per_axis: list[Placement] = [R, P, *(S(dim) for dim in range(len(spec.shape)))]
    layouts = itertools.product(per_axis, repeat=len(extended) - 1)
    return tuple(layout for layout in layouts if is_shardable(spec.shape, (first, *layout), extended, frozen=1))


def batch_options(entry: BatchInput, extended: Dims, first: Placement) -> tuple[Layout, ...]:
    """Layouts of a batch input: whole, or cut along any dim.

    Args:
        entry: the input.
        extended: shape of the mesh, the microbatch axis first.
        first: its placement along the microbatch axis.
    """
    per_axis: list[Placement] = [R, *(S(dim) for dim in range(len(entry.spec.shape)))]
    layouts = itertools.product(per_axis, repeat=len(extended) - 1)
    return tuple(layout for layout in layouts if is_shardable(entry.spec.shape, (first, *layout), extended, frozen=1))


def saved_roots(kind: SegmentKind, read_later: frozenset[str]) -> tuple[str, ...]:
    """Forward values whose storages the backward reads, views resolved to what they view, sources left out.

    Args:
        kind: whose values.
        read_later: outputs that the backward of another segment reads.
    """
    base = storage_roots(kind)
    forward = {out for op in kind.graph.ops if op.phase is Phase.FORWARD for out in op.outs if out is not None}
    read = backward_reads(kind) | read_later
    roots = dict.fromkeys(base[name] for name in base if name in read and name in forward)
    return tuple(root for root in roots if root in forward)


def backward_reads(kind: SegmentKind) -> frozenset[str]:
    """Every value the kind's backward ops read."""
    return frozenset(name for op in kind.graph.ops if op.phase is Phase.BACKWARD for name in op.tensors)
