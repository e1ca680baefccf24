"""One line over named dims says how an op may be sharded.

`a b k, n k -> a b n` (a linear layer): each name is a dim of the op; a named dim may be sharded along any mesh
axis, wherever it stands. A dim that an output lacks is contracted: sharded, it leaves that output
partial. A dim without a name (written `_`) must be whole. Everything else about an op's legal strategies
follows mechanically (`rules.strategies`).

Multi-factor dims: where a tensor's dim is several named dims merged, (b s), sharding the leading one shards the
tensor's dim, and the named dim's `size` is what must divide.

A dim that does not divide may be sharded where its op says so (`uneven`): the last blocks are then padded, with
anything. Where the dim is in every output the op computes padding from padding, and nobody minds. Where it is
contracted the op must not see it: lowering zeroes the padding of the inputs that carry the dim, which is neutral
in products and sums, and only there.

Source: the idea is einsum-like annotations as in nnScaler's `dimops` and Tofu; partial sums as DTensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from paraplan.ir.machine.mesh import Layout
from paraplan.ir.model.graph import Arg, Graph, Op
from paraplan.ir.model.tensor import TensorSpec

WHOLE = "_"
DimNames = tuple[str, ...]
Specs = tuple[TensorSpec, ...]


RING, STRIPES, ROUTING = "ring", "stripes", "route"
"""Keys of what attention does over ranks that share a sequence, and experts over those that share tokens, in several
instructions."""


@dataclass(frozen=True)
class Ring:
    """What a strategy of several instructions shards along an axis: a ring's work on pairs of blocks, where one block
    of each pair is passed round; an exchange of tokens with the ranks of their experts.

    Attributes:
        inputs: per tensor input, the dim sharded; "" where the input must be whole.
        outputs: per output, the dim sharded; "" where it is a partial sum; None for an absent one.
        turns: the dim whose blocks are passed round (or whose ranks are visited); no other axis may shard it, for
            inputs that stay are held in whole rows of it.
        keys: what such strategies are called.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]
    turns: str
    keys: tuple[str, ...] = (RING,)


@dataclass(frozen=True)
class OpDims:
    """The named dims of one op.

    Attributes:
        inputs: per tensor input (in argument order), a name or `_` per dim.
        outputs: likewise per output; None for an absent output.
        sizes: what the number of shards of a dim must divide.
        contracted: dim -> "sum" or "max": how shards of it are reduced in outputs that lack it.
        linear: sets of inputs that may be partial sums together, making every output a partial sum.
        addends: inputs added once (a bias): where a contracted dim is sharded they must be partial sums,
            so that one rank alone adds them.
        ring: what a ring shards, for an op that has an expansion (`OpDef.expand`); None: no ring.
        uneven: dims whose shards may be padded; each is a whole dim of a tensor wherever it stands.
        fills: dim -> (input, value) pairs: what padding must be set to before the op, where that is not zero in
            every input that carries a contracted dim, and nothing for the other dims.
        apart: microbatches are told apart: what over ranks would be a partial maximum is each one's own, whole.
    """

    inputs: tuple[DimNames, ...]
    outputs: tuple[DimNames | None, ...]
    sizes: dict[str, int]
    contracted: dict[str, str] = field(default_factory=dict)
    linear: tuple[tuple[int, ...], ...] = ()
    addends: tuple[int, ...] = ()
    ring: Ring | None = None
    uneven: frozenset[str] = frozenset()
    fills: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    apart: bool = False

    def fills_of(self, dim: str) -> tuple[tuple[int, float], ...]:
        """What the padding of an uneven dim is set to before the op: (input, value) pairs."""
        if dim in self.fills:
            return self.fills[dim]
        if all(names is None or dim in names for names in self.outputs):
            return ()
        return tuple((index, 0) for index, names in enumerate(self.inputs) if dim in names)


@dataclass(frozen=True)
class LocalContext:
    """What localising an op's arguments may look at.

    Attributes:
        inputs, outputs: global specs.
        in_layouts, out_layouts: layouts on the (extended) mesh the op runs on; outputs as computed.
        mesh_shape: its axis sizes.
        local_inputs, local_outputs: local shapes.
        offset: (spec, layout, dim) -> the "#..." text of a rank's first index along a sharded dim.
        key: of what the op does along the axis it is expanded on; "" where it is one instruction.
    """

    inputs: Specs
    outputs: tuple[TensorSpec | None, ...]
    in_layouts: tuple[Layout, ...]
    out_layouts: tuple[Layout | None, ...]
    mesh_shape: tuple[int, ...]
    local_inputs: tuple[tuple[int, ...], ...]
    local_outputs: tuple[tuple[int, ...], ...]
    offset: Callable[[TensorSpec, Layout, int], str]
    key: str = ""


@dataclass(frozen=True)
class OpDef:
    """All that the program needs to know of an op.

    Attributes:
        dims: (op, input specs, output specs) -> its named dims.
        localise: (args, context) -> arguments with local sizes; None keeps them.
        strides: how fresh outputs lie: "contiguous", "elementwise", "elementwise_reversed" (the last input
            decides first), "elementwise_second" (the second does), "joined" (channels last if all inputs are),
            "attention"; "view" for views.
        workspace: (input local specs, output local specs, args) -> bytes allocated and dropped inside.
        expand: (op, context, axis of the extended mesh) -> the local ops and collectives (`ir.machine.collectives`)
        that
            its strategy of several instructions along that axis consists of, as a graph of local shapes: its inputs are
            the op's tensors in order (`ring_inputs`), its outputs the op's outputs.
    """

    dims: Callable[[Op, Specs, tuple[TensorSpec | None, ...]], OpDims]
    localise: Callable[[tuple[Arg, ...], LocalContext], tuple[Arg, ...]] | None = None
    strides: str = "contiguous"
    workspace: Callable[[Any, Any, tuple[Arg, ...]], int] | None = None
    expand: Callable[[Op, LocalContext, int], Graph] | None = None


_REGISTRY: dict[str, OpDef] = {}


def register(*targets: str, **fields: Any) -> Callable[[Callable[..., OpDims]], Callable[..., OpDims]]:
    """Decorator: the function gives the dims of these targets; `fields` are the rest of `OpDef`."""

    def wrap(dims: Callable[..., OpDims]) -> Callable[..., OpDims]:
        for target in targets:
            assert target not in _REGISTRY, target
            _REGISTRY[target] = OpDef(dims=dims, **fields)
        return dims

    return wrap


def op_def(target: str) -> OpDef | None:
    """The definition of an op, or None: it is then replicated, and the plan says so."""
    return _REGISTRY.get(target)


def known_targets() -> tuple[str, ...]:
    """Every op with a rule, sorted."""
    return tuple(sorted(_REGISTRY))


def replicated(inputs: Specs, outputs: tuple[TensorSpec | None, ...]) -> OpDims:
    """Dims of an op nothing is known of: all whole."""
    return OpDims(
        inputs=tuple((WHOLE,) * len(spec.shape) for spec in inputs),
        outputs=tuple(None if spec is None else (WHOLE,) * len(spec.shape) for spec in outputs),
        sizes={},
    )


def place_of_dim(dim: Any, shape: tuple[int, ...]) -> int:
    """A dim counted from the front; 0 of a scalar, which torch lets have one."""
    return int(dim) % max(len(shape), 1)


def dim_names(count: int, skip: str = "") -> DimNames:
    """Names for `count` dims: the first letters of the alphabet that are not in `skip`."""
    free = [chr(code) for code in range(ord("a"), ord("z") + 1) if chr(code) not in skip]
    return tuple(free[:count])


def sizes_of(*pairs: tuple[DimNames, tuple[int, ...]]) -> dict[str, int]:
    """Sizes of named dims from (names, shape) pairs; a dim seen twice keeps its first size."""
    found: dict[str, int] = {}
    for names, shape in pairs:
        for name, size in zip(names, shape, strict=True):
            if name != WHOLE:
                found.setdefault(name, size)
    return found


def uneven(dims: OpDims, *but: str) -> OpDims:
    """The same dims, all but some of which may be padded."""
    return replace(dims, uneven=frozenset(dims.sizes) - {*but})
