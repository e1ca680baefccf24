"""What pinned degrees leave of the option space.

A data-parallel axis runs every op the way the microbatch axis does: the same analysis that finds the batch dim
of every value in time finds it in space. On a tensor-parallel axis no op touches the batch and every linear
layer splits its weight, but for those inside an attention that mix heads or act on each; with sequence
parallelism the norms between them split the sequence. On a context-parallel axis every op splits the sequence (see
`sequence`), on an expert-parallel one the batch, but for those of the experts (see `experts`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.mesh import Layout, P, Partial, Placement, R, Shard, layout_text, pads_little
from paraplan.ir.machine.tier_placement import TierPlacement
from paraplan.ir.model.graph import Op
from paraplan.ir.model.program import Program, SegmentKind
from paraplan.lowering.blocks.bundle import SMALL_BYTES
from paraplan.lowering.rewrites.float8_casts import CAST, SCALE
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import check_param_names
from paraplan.planner.decision_classes import ParamClass
from paraplan.planner.options.param_pins import parse_param_pin
from paraplan.planner.sharding.expert_pins import EXPERT_AXES, ExpertAxis, expert_axis
from paraplan.planner.sharding.layout_options import ParamOption
from paraplan.planner.sharding.sequence import Keys, batch_placement, sequence_keys, sequence_length
from paraplan.rules.choices import axis_part, axis_texts
from paraplan.rules.strategies import AxisChoice, AxisKeys, Strategy, dims_of, mesh_choices
from paraplan.rules.time_axis import ProgramMicro, program_micro, smallest_divisor

LINEAR = tuple(
    f"paraplan.{name}{what}" for name in ("linear", "float8_linear") for what in ("", "_grad_input", "_grad_weight")
)
NORMS = tuple(f"paraplan.{name}_norm{what}" for name in ("layer", "rms") for what in ("", "_grad"))


@dataclass(frozen=True)
class Pins:
    """Predicates over options; an axis is named by its number, -1 where there is none.

    Attributes:
        program: whose options.
        constraints: what is pinned.
        dp, tp, cp: axis numbers.
        ep: those of the axes that share the experts.
        shape: of the mesh.
        along: what every op does along a batch axis (for dp, ep and tp).
        sequence: what every op of a kind may do along the cp axis.
        experts: what the experts' ops may do along an ep axis.
        samples: what every op does along a batch axis, where all that carries samples is to be divided along the first
            axis, however else; None where it need not be.
    """

    program: Program
    constraints: Constraints
    dp: int
    tp: int
    cp: int
    ep: tuple[int, ...]
    shape: tuple[int, ...]
    along: ProgramMicro | None
    sequence: tuple[tuple[Keys, ...], ...]
    experts: ExpertAxis | None
    samples: ProgramMicro | None = None

    def keys(self, kind: SegmentKind, position: int) -> AxisKeys:
        """What an op may do along each axis; partial inputs only where all of them that are no indices or masks are
        partial together."""
        op = kind.graph.ops[position]
        sums = (index for index, name in enumerate(op.tensors) if kind.graph.values[name].is_float)
        together = "+" + ".".join(map(str, sums))
        tame = [c.key for c in mesh_choices(dims_of(op, kind.graph.values)) if c.key[:1] != "+" or c.key == together]
        found = [frozenset(tame)] * len(self.shape)
        if self.cp >= 0:
            index = next(i for i, each in enumerate(self.program.kinds) if each is kind)
            found[self.cp] &= self.sequence[index][position] or found[self.cp]
        if self.dp >= 0:
            # A batch axis runs every op as microbatches do, whatever of its inputs is a sum there.
            along = frozenset({axis_part(self._along(kind)[position]).does})
            found[self.dp] = along | (frozenset(tame) if _casts_param(kind, position) else frozenset())
        for axis in self.ep:
            found[axis] |= {axis_part(self._along(kind)[position]).does}
        return tuple(found)

    def op(self, kind: SegmentKind, position: int, strategy: Strategy) -> bool:
        """Whether one of the strategies that `keys` make is left over.

        Args:
            kind, position: the op: its kind, and its place in the joint graph.
            strategy: in question.
        """
        if self.samples is not None:
            batch_axis = self.samples.segments[self._first(kind)].choices[position]
            if not divides_samples(strategy, batch_axis):
                return False
        if self.along is None:
            return True
        parts, batch = axis_texts(strategy.key), self._along(kind)[position]
        free = _casts_param(kind, position)
        if self.dp >= 0 and parts[self.dp] != batch and not free:
            return False
        index = next(i for i, each in enumerate(self.program.kinds) if each is kind)
        if self.experts is not None and not free:
            if not all(self.experts.allows(index, position, parts[axis], batch) for axis in self.ep):
                return False
        return self.tp < 0 or self._tensor(kind, position, strategy, parts[self.tp], batch)

    def _along(self, kind: SegmentKind) -> tuple[str, ...]:
        assert self.along is not None
        return tuple(map(_reduced, self.along.segments[self._first(kind)].choices))

    def _first(self, kind: SegmentKind) -> int:
        """The first segment of a kind."""
        return next(i for i, s in enumerate(self.program.segments) if self.program.kinds[s.kind] is kind)

    def _tensor(self, kind: SegmentKind, position: int, strategy: Strategy, part: str, batch: str) -> bool:
        op = kind.graph.ops[position]
        key, rows = axis_part(part).does, axis_part(batch)
        if not rows.is_whole and not rows.is_sum and key == rows.does:
            return False
        if op.target in LINEAR and key not in ("k", "n") and not self._is_within(kind, op):
            return False
        batch_first = (self.program.batch_size, sequence_length(self.program))
        for name, layout in zip(op.outs, strategy.outputs, strict=True):
            if name is None or layout is None:
                continue
            shape = kind.graph.values[name].shape
            on_seq = len(shape) in (2, 3) and shape[:2] in (batch_first, batch_first[::-1])
            split = layout[self.tp] == Shard(dim=int(shape[:2] == batch_first))
            if on_seq and split and not self.constraints.sp:
                return False
            if self.constraints.sp and on_seq and not split and (shape[2:] == (1,) or op.target in NORMS):
                return False
        return True

    def _is_within(self, kind: SegmentKind, op: Op) -> bool:
        """Whether an op acts on more dims than anything that segments pass on has: on heads, or on scores."""
        passed = (len(x.graph.values[name].shape) for x in self.program.kinds for name in (*x.inputs, *x.outputs))
        return len(kind.graph.values[op.tensors[0]].shape) > max(passed)

    @property
    def _batch_axes(self) -> tuple[int, ...]:
        """The axes that share the batch."""
        return (*((self.dp,) if self.dp >= 0 else ()), *self.ep)

    @cached_property
    def _places(self) -> tuple[frozenset[TierPlacement], frozenset[TierPlacement]]:
        """Where parameters may be that are not pinned by name: those that are not trained, and those that are."""
        places = self.constraints.places
        return frozenset(place.frozen for place in places), frozenset(places)

    def param(self, cls: ParamClass, option: ParamOption) -> bool:
        """Whether a parameter class' option is left over."""
        pinned = {self.constraints.params[name] for name in cls.params if name in self.constraints.params}
        if pinned:
            text = (layout_text(option.stored), layout_text(option.grad), layout_text(option.state), option.place)
            return (*text, option.ahead) == parse_param_pin(cls.params[0], sorted(pinned)[0])
        if option.eager:
            return False
        if option.place not in self._places[cls.trained]:
            return False
        if self.tp >= 0:
            on_tp = (option.stored[self.tp], option.state[self.tp])
            if isinstance(on_tp[1], Shard) and not isinstance(on_tp[0], Shard):
                return False
        stack = self.experts is not None and bool(self.experts.slots.intersection(cls.slots))
        layouts = (option.stored, option.grad, option.state)
        if stack and any(layout[axis] != Shard(dim=0) for layout in layouts for axis in self.ep):
            return False
        axes = [axis for axis in self._batch_axes if not (stack and axis in self.ep)]
        if self.constraints.zero is None or not cls.trained:
            return True
        return all(self._zero(cls, option, axis) for axis in axes)

    def _zero(self, cls: ParamClass, option: ParamOption, axis: int) -> bool:
        """ZeRO's stages, as layouts on a batch axis; a parameter no dim of which can be sharded stays whole."""
        triple = (option.stored[axis], option.grad[axis], option.state[axis])
        return triple in zero_triples(self.constraints.zero or 0, cls, self.shape[axis])

    def batch(self, name: str, layout: Layout) -> bool:
        """Whether a batch input's layout is left over."""
        dim = self.program.batch[name].batch_dim
        if dim is not None and any(layout[axis] != Shard(dim=dim) for axis in self._batch_axes):
            return False
        if self.cp >= 0 and layout[self.cp] != batch_placement(self.program, name):
            return False
        return self.tp < 0 or layout[self.tp] == R


def divides_samples(strategy: Strategy, along: AxisChoice, axis: int = 0) -> bool:
    """Whether an op divides, along an axis, all that it reads and makes that carries samples.

    Args:
        strategy: on a mesh.
        along: what the op does along a batch axis.
        axis: which: 1 is the first of an extended mesh.
    """
    pairs = *zip(along.inputs, strategy.inputs, strict=True), *zip(along.outputs, strategy.computed, strict=True)
    return all(isinstance(layout[axis], Shard) for batch, layout in pairs if isinstance(batch, Shard) and layout)


def _casts_param(kind: SegmentKind, position: int) -> bool:
    """Whether an op casts a weight, which it may do in shards: what is gathered is then a byte an element."""
    op = kind.graph.ops[position]
    return op.target in (SCALE, CAST) and op.tensors[0] in kind.params


def _reduced(choice: AxisChoice) -> str:
    """What a strategy's key says of a choice along a batch axis: partial maxima are reduced at once."""
    return choice.key + (">R" if Partial(op="max") in choice.outputs else "")


def zero_triples(stage: int, cls: ParamClass, size: int) -> list[tuple[Placement, Placement, Placement]]:
    """(stored, grad, state) on a data-parallel axis of that size at a ZeRO stage.

    A parameter no dim of which can be sharded is whole; a small one no dim of which divides may be, for what is padded
    is gathered by itself, and latency would cost more than the memory is worth.
    """
    found: list[tuple[Placement, Placement, Placement]] = []
    for dim, extent in enumerate(cls.spec.shape):
        if not pads_little(extent, size):
            continue
        cut = Shard(dim=dim)
        found.append({0: (R, P, R), 1: (R, P, cut), 2: (R, cut, cut), 3: (cut, cut, cut)}[stage])
    small = cls.spec.nbytes <= SMALL_BYTES and all(extent % size for extent in cls.spec.shape)
    return found if found and not small else [*found, (R, P, R)]


def make_pins(
    program: Program,
    constraints: Constraints,
    axes: tuple[str, ...],
    shape: tuple[int, ...],
    m: int,
    divides_samples: bool = False,
) -> Pins:
    """The predicates of some constraints on a mesh.

    Args:
        program: that is planned.
        constraints: what is pinned.
        axes, shape: of the mesh.
        m: number of microbatches.
        divides_samples: whether all that carries samples is to be divided along the first axis.
    Raises:
        ConstraintError: the batch does not divide, or a named parameter does not exist.
    """
    check_param_names(constraints, program.params)
    dp, tp, cp = (axes.index(name) if name in axes else -1 for name in ("dp", "tp", "cp"))
    ep = tuple(axes.index(name) for name in EXPERT_AXES if name in axes)
    split = math.prod(shape[axis] for axis in (dp, *ep) if axis >= 0)
    along = None
    if dp >= 0 or ep:
        m = program.shares(m)
        if program.batch_size % (m * split):
            less = program.batch_size - program.batch_size % (m * split)
            sizes = " or ".join(str(size) for size in (less, less + m * split) if size)
            raise ConstraintError(
                f"a batch of {program.batch_size} does not divide over {split} data-parallel ranks in "
                f"{m} microbatch{'es' if m > 1 else ''}, of which each takes as many rows as the others; use "
                f"a multiple of {m * split} rows (a batch of {sizes}), fewer ranks or fewer microbatches"
            )
        along = program_micro(program, m * split, in_space=True)
    elif tp >= 0:
        along = program_micro(program, smallest_divisor(program.batch_size), in_space=True)
    sequence = sequence_keys(program, shape[cp], constraints.cp_mode) if cp >= 0 else ()
    experts = expert_axis(program, math.prod(shape[axis] for axis in ep)) if ep else None
    samples = program_micro(program, smallest_divisor(program.batch_size), in_space=True) if divides_samples else None
    return Pins(program, constraints, dp, tp, cp, ep, shape, along, sequence, experts, samples)
