"""Reading and writing elements by index tensors.

Dims that are indexed are whole: which rank holds a row is known only when the index is. All other dims are free, and
so are the index's own. Where writes accumulate, positions of the index are contracted: each rank adds the rows it
has, and what is written into (usually zeros) is an addend.
"""

from __future__ import annotations

from paraplan.ir.model.graph import Op
from paraplan.ir.model.tensor import TensorSpec
from paraplan.rules.dims import WHOLE, DimNames, OpDims, Specs, dim_names, place_of_dim, register, replicated, sizes_of
from paraplan.rules.workspace import expert_workspace as workspace

Shape = tuple[int, ...]


def _broadcast_shape(shapes: list[Shape]) -> Shape:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True))


def _aligned(shape: Shape, wanted: Shape, names: DimNames) -> DimNames:
    """Dim names of a tensor that broadcasts to `wanted`."""
    lead = len(wanted) - len(shape)
    return tuple(
        name if size == full else WHOLE for name, size, full in zip(names[lead:], shape, wanted[lead:], strict=True)
    )


def _indexed(op: Op, source: TensorSpec, indices: Specs) -> tuple[DimNames, DimNames, list[DimNames], Shape] | None:
    """Dim names of x, of x[indices], of each index, and the shape of x[indices]; None for masks."""
    given = tuple(op.args[1])
    if any(spec.dtype in ("bool", "uint8") for spec in indices):
        return None
    rank = len(source.shape)
    at = [dim for dim, index in enumerate(given) if index is not None]
    shape = _broadcast_shape([spec.shape for spec in indices])
    own = dim_names(rank)
    positions = dim_names(len(shape), skip="".join(own))
    names = tuple(WHOLE if dim in at else name for dim, name in enumerate(own))
    start = at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    kept = [dim for dim in range(rank) if dim not in at]
    before, after = [dim for dim in kept if dim < start], [dim for dim in kept if dim >= start]
    out = (*(own[dim] for dim in before), *positions, *(own[dim] for dim in after))
    full = (*(source.shape[dim] for dim in before), *shape, *(source.shape[dim] for dim in after))
    return names, out, [_aligned(spec.shape, shape, positions) for spec in indices], full


@register("paraplan.index", workspace=workspace.index)
def index(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`_ b, i -> i b`: indexed dims are whole."""
    found = _indexed(op, inputs[0], inputs[1:])
    if found is None:
        return replicated(inputs, outputs)
    names, out, positions, shape = found
    return OpDims((names, *positions), (out,), sizes_of((out, shape)), {}, ((0,),))


@register("paraplan.index_put")
def index_put(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`_ b, i, i b -> _ b`; where it accumulates i is contracted and x an addend."""
    found = _indexed(op, inputs[0], inputs[1:-1])
    if found is None:
        return replicated(inputs, outputs)
    names, out, positions, shape = found
    values = _aligned(inputs[-1].shape, shape, out)
    indexed = set().union(*positions) - {WHOLE}
    last = len(inputs) - 1
    if len(op.args) > 3 and op.args[3]:
        return OpDims(
            (names, *positions, values),
            (names,),
            sizes_of((out, shape)),
            dict.fromkeys(sorted(indexed), "sum"),
            ((0, last),),
            (0,),
        )
    keep = [tuple(WHOLE if name in indexed else name for name in dims) for dims in (*positions, values)]
    sizes = {name: size for name, size in sizes_of((out, shape)).items() if name not in indexed}
    return OpDims((names, *keep), (names,), sizes, {}, ((0, last),))


@register("aten.index_select.default")
def index_select(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _ b, i -> a i b`."""
    shape = inputs[0].shape
    if not shape:
        return replicated(inputs, outputs)
    dim = place_of_dim(op.args[1], shape)
    own = dim_names(len(shape), skip="i")
    names = tuple(WHOLE if at == dim else name for at, name in enumerate(own))
    out = tuple("i" if at == dim else name for at, name in enumerate(own))
    return OpDims((names, ("i",)), (out,), sizes_of((out, outputs[0].shape)), {}, ((0,),))


@register("aten.index_add.default")
def index_add(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _ b, i, a i b -> a _ b`: i contracted, x an addend."""
    shape = inputs[0].shape
    if not shape:
        return replicated(inputs, outputs)
    dim = place_of_dim(op.args[1], shape)
    own = dim_names(len(shape), skip="i")
    names = tuple(WHOLE if at == dim else name for at, name in enumerate(own))
    source = tuple("i" if at == dim else name for at, name in enumerate(own))
    sizes = sizes_of((source, inputs[2].shape))
    return OpDims((names, ("i",), source), (names,), sizes, {"i": "sum"}, ((0, 2),), (0,))


def _alike(inputs: Specs, dim: int) -> DimNames:
    """A name for every dim but `dim` in which all inputs are of one size."""
    by_dim = [set(sizes) for sizes in zip(*(spec.shape for spec in inputs), strict=True)]
    names = dim_names(len(by_dim), skip="z")
    return tuple(WHOLE if at == dim or len(by_dim[at]) > 1 else name for at, name in enumerate(names))


@register("aten.scatter.src")
def scatter(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _, a _, a _ -> a _`."""
    names = _alike(inputs, place_of_dim(op.args[1], inputs[0].shape))
    return OpDims((names,) * 3, (names,), sizes_of((names, inputs[0].shape)), {}, ((0, 2),))


@register("aten.scatter.value")
def scatter_value(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _, a _ -> a _`, linear where zero is written."""
    names = _alike(inputs, place_of_dim(op.args[1], inputs[0].shape))
    return OpDims((names,) * 2, (names,), sizes_of((names, inputs[0].shape)), {}, ((0,),) if op.args[3] == 0 else ())


@register("aten.scatter_add.default")
def scatter_add(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a _, a z, a z -> a _`: z contracted, x an addend."""
    if not inputs[0].shape:
        return replicated(inputs, outputs)
    dim = place_of_dim(op.args[1], inputs[0].shape)
    names = _alike(inputs, dim)
    if inputs[1].shape[dim] != inputs[2].shape[dim]:
        return OpDims((names,) * 3, (names,), sizes_of((names, inputs[0].shape)), {}, ((0, 2),))
    rows = (*names[:dim], "z", *names[dim + 1 :])
    sizes = sizes_of((names, inputs[0].shape)) | {"z": inputs[1].shape[dim]}
    return OpDims((names, rows, rows), (names,), sizes, {"z": "sum"}, ((0, 2),), (0,))


@register("aten.histc.default", "aten.bincount.default")
def histogram(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`a b -> _`: counts add over shards; between bounds of the data's own they do not."""
    bounded = op.target == "aten.histc.default" and len(op.args) > 3 and op.args[2] != op.args[3]
    if not bounded:
        return replicated(inputs, outputs)
    names = dim_names(len(inputs[0].shape))
    return OpDims((names,), ((WHOLE,),), sizes_of((names, inputs[0].shape)), dict.fromkeys(names, "sum"))
