"""Normal forms of recorded ops: few op kinds, explicit sizes, so that few sharding rules are needed.

A form returns the name(s) of the op's result, or None to have the op written as it was recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import fx

from paraplan.capture.convert import Names, OpCollector, spec_of
from paraplan.ir.model.graph import Arg, encode_number
from paraplan.ir.model.tensor import TensorSpec
from paraplan.kernels.torch_private import OpOverload

Form = Callable[[OpCollector, fx.Node], Names]


def _spec(node: object) -> TensorSpec:
    assert isinstance(node, fx.Node)
    return spec_of(node.meta["val"])


def _arguments(node: fx.Node) -> dict[str, object]:
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    found = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    found |= {argument.name: value for argument, value in zip(schema, node.args, strict=False)}
    return found | dict(node.kwargs)


def _name(writer: OpCollector, node: object) -> str:
    return str(writer.ref(node))[1:]


def _same(writer: OpCollector, node: fx.Node) -> Names:
    """The value itself."""
    return _name(writer, node.args[0])


def view_to(writer: OpCollector, name: str, shape: Sequence[int]) -> str:
    """A view of a value; views of views collapse, idle ones vanish.

    Args:
        writer: collects the op, if one is needed.
        name: of the value.
        shape: of the view, all sizes given.
    Returns:
        The name of the value that has this shape.
    """
    spec = writer.values[name]
    maker = writer.maker(name)
    while maker is not None and maker.target == "aten.view.default":
        name = maker.args[0][1:]
        maker = writer.maker(name)
    if writer.values[name].shape == tuple(shape):
        return name
    return writer.one("aten.view.default", ("%" + name, tuple(shape)), TensorSpec(dtype=spec.dtype, shape=tuple(shape)))


def _view(writer: OpCollector, node: fx.Node) -> Names:
    return view_to(writer, _name(writer, node.args[0]), _spec(node).shape)


def _permuted(writer: OpCollector, name: str, order: Sequence[int]) -> str:
    maker = writer.maker(name)
    if maker is not None and maker.target == "aten.permute.default":
        name, order = maker.args[0][1:], [maker.args[1][dim] for dim in order]
    if list(order) == sorted(order):
        return name
    spec = writer.values[name]
    shape = tuple(spec.shape[dim] for dim in order)
    return writer.one("aten.permute.default", ("%" + name, tuple(order)), TensorSpec(dtype=spec.dtype, shape=shape))


def _permute(writer: OpCollector, node: fx.Node) -> Names:
    name = _name(writer, node.args[0])
    rank = len(writer.values[name].shape)
    return _permuted(writer, name, [int(dim) % rank for dim in node.args[1]])  # type: ignore[union-attr]


def _transpose(writer: OpCollector, node: fx.Node) -> Names:
    name = _name(writer, node.args[0])
    rank = len(writer.values[name].shape)
    if rank < 2:
        return name
    a, b = (int(dim) % rank for dim in node.args[1:3]) if len(node.args) > 1 else (0, 1)
    order = list(range(rank))
    order[a], order[b] = b, a
    return _permuted(writer, name, order)


def _expand(writer: OpCollector, node: fx.Node) -> Names:
    name, spec = _name(writer, node.args[0]), _spec(node)
    if writer.values[name].shape == spec.shape:
        return name
    return writer.one("aten.expand.default", ("%" + name, spec.shape), spec)


def _cast(writer: OpCollector, node: fx.Node) -> Names:
    name, spec = _name(writer, node.args[0]), _spec(node)
    if writer.values[name].dtype == spec.dtype:
        return name
    return writer.one("aten._to_copy.default", ("%" + name,), spec, {"dtype": ":" + spec.dtype})


def _number(value: object) -> Arg:
    return encode_number(value) if isinstance(value, (float, complex)) else value


def _full(pick: Callable[[fx.Node], object]) -> Form:
    def form(writer: OpCollector, node: fx.Node) -> Names:
        spec = _spec(node)
        value = pick(node)
        if isinstance(value, fx.Node):
            return None
        return writer.one("aten.full.default", (spec.shape, _number(value)), spec, {"dtype": ":" + spec.dtype})

    return form


def _arange(writer: OpCollector, node: fx.Node) -> Names:
    found, spec = _arguments(node), _spec(node)
    args = (_number(found.get("start", 0)), _number(found["end"]), _number(found.get("step", 1)))
    return writer.one("aten.arange.start_step", args, spec, {"dtype": ":" + spec.dtype})


def _dims(node: fx.Node, value: object) -> tuple[int, ...]:
    rank = len(_spec(node.args[0]).shape)
    if value is None or value == []:
        return tuple(range(rank))
    return tuple(int(dim) % rank for dim in (value if isinstance(value, (tuple, list)) else (value,))) if rank else ()


def _summed(writer: OpCollector, node: fx.Node, dims: tuple[int, ...], keep: bool) -> str:
    spec = _spec(node)
    source = writer.ref(node.args[0])
    given = writer.values[str(source)[1:]]
    if not given.shape:
        return _as_dtype(writer, str(source)[1:], spec)
    wanted = (
        spec.dtype
        if given.dtype != spec.dtype and given.dtype in ("float32", "float64", "bfloat16", "float16")
        else None
    )
    return writer.one("aten.sum.dim_IntList", (source, dims, keep), spec, {"dtype": ":" + wanted} if wanted else {})


def _as_dtype(writer: OpCollector, name: str, spec: TensorSpec) -> str:
    if writer.values[name].dtype == spec.dtype:
        return name
    return writer.one("aten._to_copy.default", ("%" + name,), spec, {"dtype": ":" + spec.dtype})


def _sum(writer: OpCollector, node: fx.Node) -> Names:
    found = _arguments(node)
    return _summed(writer, node, _dims(node, found.get("dim")), bool(found.get("keepdim", False)))


def _mean(writer: OpCollector, node: fx.Node) -> Names:
    found = _arguments(node)
    dims = _dims(node, found.get("dim"))
    count = math.prod(_spec(node.args[0]).shape[dim] for dim in dims)
    total = _summed(writer, node, dims, bool(found.get("keepdim", False)))
    return writer.one("aten.mul.Tensor", ("%" + total, 1.0 / max(count, 1)), _spec(node))


def _with_number(target: str) -> Form:
    """add.Scalar(x, c) -> add.Tensor(x, c): one rule serves both."""

    def form(writer: OpCollector, node: fx.Node) -> Names:
        kwargs = {key: writer.arg(value) for key, value in node.kwargs.items()}
        args = [writer.arg(value) for value in node.args]
        if len(args) > 2:
            kwargs["alpha"] = args.pop()
        return writer.one(target, args, _spec(node), {key: value for key, value in kwargs.items() if value != 1})

    return form


def _unless_idle(form: Form, idle: float) -> Form:
    """x + 0 and x · 1 are x."""

    def checked(writer: OpCollector, node: fx.Node) -> Names:
        second = node.args[1]
        plain = isinstance(second, (int, float)) and not isinstance(second, bool) and second == idle
        if plain and isinstance(node.args[0], fx.Node) and _spec(node.args[0]) == _spec(node):
            return _name(writer, node.args[0])
        return form(writer, node)

    return checked


def _as_recorded(writer: OpCollector, node: fx.Node) -> Names:
    return None


def _copy(writer: OpCollector, node: fx.Node) -> Names:
    """copy(x, y) is y in x's shape and dtype."""
    spec = _spec(node)
    return _broadcast(
        writer,
        _as_dtype(writer, _name(writer, node.args[1]), TensorSpec(dtype=spec.dtype, shape=_spec(node.args[1]).shape)),
        spec,
    )


def _broadcast(writer: OpCollector, name: str, spec: TensorSpec) -> str:
    if writer.values[name].shape == spec.shape:
        return name
    return writer.one("aten.expand.default", ("%" + name, spec.shape), spec)


def _fill(writer: OpCollector, node: fx.Node) -> Names:
    spec, value = _spec(node), node.args[1]
    if isinstance(value, fx.Node):
        return _copy(writer, node)
    return writer.one("aten.full.default", (spec.shape, _number(value)), spec, {"dtype": ":" + spec.dtype})


def _replaced(writer: OpCollector, node: fx.Node, middle: str, dim: int, start: int, end: int) -> str:
    """The first argument with [start, end) along dim taken from `middle`: before, middle and after in one cat."""
    spec = _spec(node)
    parts = []
    for first, last, own in ((0, start, True), (start, end, False), (end, spec.shape[dim], True)):
        if first == last:
            continue
        shape = (*spec.shape[:dim], last - first, *spec.shape[dim + 1 :])
        piece = TensorSpec(dtype=spec.dtype, shape=shape)
        name = (
            writer.one("aten.slice.Tensor", (writer.ref(node.args[0]), dim, first, last, 1), piece) if own else middle
        )
        parts.append("%" + name)
    return parts[0][1:] if len(parts) == 1 else writer.one("aten.cat.default", (tuple(parts), dim), spec)


def _slice_scatter(writer: OpCollector, node: fx.Node) -> Names:
    found, spec = _arguments(node), _spec(node)
    dim = int(found["dim"]) % len(spec.shape)  # type: ignore[call-overload]
    start, end = _bounds(found["start"], found["end"], spec.shape[dim])
    return None if found["step"] != 1 else _replaced(writer, node, _name(writer, node.args[1]), dim, start, end)


def _select_scatter(writer: OpCollector, node: fx.Node) -> Names:
    spec = _spec(node)
    dim = int(node.args[2]) % len(spec.shape)  # type: ignore[arg-type]
    index = int(node.args[3]) % spec.shape[dim]  # type: ignore[arg-type]
    middle = view_to(writer, _name(writer, node.args[1]), (*spec.shape[:dim], 1, *spec.shape[dim + 1 :]))
    return _replaced(writer, node, middle, dim, index, index + 1)


def _divided(writer: OpCollector, node: fx.Node) -> Names:
    """x / c -> x · (1/c) for floats."""
    divisor = node.args[1]
    if not isinstance(divisor, (int, float, complex)) or node.kwargs or not divisor or not _spec(node.args[0]).is_float:
        return None
    return writer.one("aten.mul.Tensor", (writer.ref(node.args[0]), _number(1.0 / divisor)), _spec(node))


def _slice(writer: OpCollector, node: fx.Node) -> Names:
    found, given = _arguments(node), _spec(node.args[0])
    dim = int(found["dim"]) % len(given.shape)  # type: ignore[call-overload]
    start, end = _bounds(found["start"], found["end"], given.shape[dim])
    step = int(found["step"])  # type: ignore[call-overload]
    if (start, end, step) == (0, given.shape[dim], 1):
        return _name(writer, node.args[0])
    return writer.one("aten.slice.Tensor", (writer.ref(node.args[0]), dim, start, end, step), _spec(node))


def _bounds(start: object, end: object, size: int) -> tuple[int, int]:
    first = 0 if start is None else int(start)  # type: ignore[call-overload]
    last = size if end is None else int(end)  # type: ignore[call-overload]
    first, last = (first + size if first < 0 else first), (last + size if last < 0 else last)
    first = min(max(first, 0), size)
    return first, min(max(last, first), size)


def _slice_backward(writer: OpCollector, node: fx.Node) -> Names:
    g, sizes, dim, start, end, step = node.args
    dim = int(dim) % len(sizes)
    first, last = _bounds(start, end, int(sizes[dim]))
    return writer.one(
        "aten.slice_backward.default", (writer.ref(g), writer.arg(sizes), dim, first, last, int(step)), _spec(node)
    )


def _select(writer: OpCollector, node: fx.Node) -> Names:
    shape = _spec(node.args[0]).shape
    dim = int(node.args[1]) % len(shape)  # type: ignore[arg-type]
    return writer.one("aten.select.int", (writer.ref(node.args[0]), dim, int(node.args[2]) % shape[dim]), _spec(node))  # type: ignore[arg-type]


def _select_backward(writer: OpCollector, node: fx.Node) -> Names:
    g, sizes, dim, index = node.args
    dim = int(dim) % len(sizes)
    return writer.one(
        "aten.select_backward.default", (writer.ref(g), writer.arg(sizes), dim, int(index) % sizes[dim]), _spec(node)
    )


def _split(writer: OpCollector, node: fx.Node) -> Names:
    """One slice per piece."""
    given = _spec(node.args[0])
    dim = int(_arguments(node)["dim"]) % len(given.shape)  # type: ignore[call-overload]
    start, names = 0, []
    for piece in node.meta["val"]:
        end = start + piece.shape[dim]
        names.append(writer.one("aten.slice.Tensor", (writer.ref(node.args[0]), dim, start, end, 1), spec_of(piece)))
        start = end
    return tuple(names)


def _unbind(writer: OpCollector, node: fx.Node) -> Names:
    given = _spec(node.args[0])
    dim = int(_arguments(node)["dim"]) % len(given.shape)  # type: ignore[call-overload]
    return tuple(
        writer.one("aten.select.int", (writer.ref(node.args[0]), dim, index), spec_of(piece))
        for index, piece in enumerate(node.meta["val"])
    )


def _cat(writer: OpCollector, node: fx.Node) -> Names:
    rank = len(_spec(node).shape)
    parts = [x for x in node.args[0] if math.prod(_spec(x).shape)] or list(node.args[0])  # type: ignore[union-attr]
    if len(parts) == 1:
        return _name(writer, parts[0])
    dim = int(_arguments(node)["dim"]) % rank  # type: ignore[call-overload]
    return writer.one("aten.cat.default", (tuple(writer.ref(x) for x in parts), dim), _spec(node))


def _softmax(writer: OpCollector, node: fx.Node) -> Names:
    """dim counted from the front."""
    rank = max(len(_spec(node).shape), 1)
    assert isinstance(node.target, OpOverload)
    name = node.target._schema.name.replace("::", ".") + ".default"
    dim = int(node.args[1]) % rank  # type: ignore[arg-type]
    return writer.one(name, (writer.ref(node.args[0]), dim, bool(node.args[2])), _spec(node))


def _zeros(node: fx.Node) -> object:
    return False if _spec(node).dtype == "bool" else (0.0 if _spec(node).is_float else 0)


def _ones(node: fx.Node) -> object:
    return True if _spec(node).dtype == "bool" else (1.0 if _spec(node).is_float else 1)


FORMS: dict[str, Form] = {
    **dict.fromkeys(("detach", "alias", "clone", "contiguous", "lift_fresh_copy", "lift_fresh"), _same),
    **dict.fromkeys(
        ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "_reshape_alias", "flatten", "view_copy"), _view
    ),
    "permute": _permute,
    "t": _transpose,
    "transpose": _transpose,
    "expand": _expand,
    "_to_copy": _cast,
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty"), _full(_zeros)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _full(_ones)),
    **dict.fromkeys(("full", "full_like"), _full(lambda node: node.args[1])),
    "new_full": _full(lambda node: node.args[2]),
    "scalar_tensor": _full(lambda node: node.args[0]),
    "arange": _arange,
    "sum": _sum,
    "mean": _mean,
    "add": _unless_idle(_with_number("aten.add.Tensor"), 0),
    "sub": _unless_idle(_with_number("aten.sub.Tensor"), 0),
    "mul": _unless_idle(_with_number("aten.mul.Tensor"), 1),
    "pow": _unless_idle(_as_recorded, 1),
    "copy": _copy,
    "fill": _fill,
    "slice_scatter": _slice_scatter,
    "select_scatter": _select_scatter,
    "div": _divided,
    "slice": _slice,
    "slice_backward": _slice_backward,
    "select": _select,
    "select_backward": _select_backward,
    **dict.fromkeys(
        ("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"), _split
    ),
    "unbind": _unbind,
    "cat": _cat,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
}
