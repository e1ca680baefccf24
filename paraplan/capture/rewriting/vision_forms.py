"""Normal forms of recorded convolutions, poolings, resizings, group and batch norms (see `normal_forms`).

An op with several gradients is split where each shards in its own way: a convolution's backward becomes one op for
the input, one for the weight and a plain sum for the bias. Batch norm is written as sums over samples, so that
statistics are those of the whole batch however it is cut; its running statistics are values like any other, and the
program says which buffer each one replaces (`Program.buffer_updates`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from paraplan.capture.convert import Names, OpCollector, spec_of
from paraplan.capture.cutting.flow import aten_name
from paraplan.capture.rewriting.normal_forms import view_to
from paraplan.capture.substituting.substitute import arguments
from paraplan.ir.model.graph import Arg, encode_number
from paraplan.ir.model.tensor import TensorSpec

Found = dict[str, object]


def _given(node: fx.Node, position: int) -> TensorSpec:
    source = node.args[position]
    assert isinstance(source, fx.Node)
    return spec_of(source.meta["val"])


def _one(writer: OpCollector, target: str, args: Sequence[object], spec: TensorSpec) -> str:
    return writer.one(f"paraplan.{target}", tuple(writer.arg(arg) for arg in args), spec)


def _own(writer: OpCollector, target: str, args: Sequence[Arg], spec: TensorSpec) -> str:
    """An op over arguments that are the program's already ("%name")."""
    return writer.one(f"paraplan.{target}", tuple(args), spec)


def _out(node: fx.Node, index: int | None = None) -> TensorSpec:
    value = node.meta["val"]
    return spec_of(value if index is None else value[index])


def _each(value: object, count: int) -> tuple[int, ...]:
    """One number per spatial dim; a single one stands for all."""
    values = tuple(int(v) for v in value) if isinstance(value, (tuple, list)) else (int(value),)  # type: ignore[call-overload]
    return values * count if len(values) == 1 else values


def _conv_rest(found: Found, count: int) -> tuple[object, ...]:
    spaced = (_each(found[name], count) for name in ("stride", "padding", "dilation"))
    return (*spaced, bool(found["transposed"]), _each(found["output_padding"], count), found["groups"])


def convolution(writer: OpCollector, node: fx.Node) -> Names:
    """`paraplan.conv`."""
    found = arguments(node)
    rest = _conv_rest(found, len(_out(node).shape) - 2)
    return _one(writer, "conv", (found["input"], found["weight"], found["bias"], *rest), _out(node))


def convolution_backward(writer: OpCollector, node: fx.Node) -> Names:
    """One op per gradient that is wanted."""
    found, g = arguments(node), _given(node, 0)
    x, w = _given(node, 1), _given(node, 2)
    rest = _conv_rest(found, len(g.shape) - 2)
    dx, dw, db = found["output_mask"]  # type: ignore[misc]
    made: list[str | None] = [None, None, None]
    if dx:
        made[0] = _one(writer, "conv_grad_input", (node.args[0], node.args[2], x.shape[2:], *rest), x)
    if dw:
        made[1] = _one(writer, "conv_grad_weight", (node.args[0], node.args[1], w.shape[2:], *rest), w)
    if db:
        dims = tuple(dim for dim in range(len(g.shape)) if dim != 1)
        made[2] = writer.one(
            "aten.sum.dim_IntList", (writer.ref(node.args[0]), dims, False), TensorSpec(g.dtype, g.shape[1:2])
        )
    return tuple(made)


def _pool_window(node: fx.Node, found: Found) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    count = 3 if "3d" in aten_name(node.target) else 2
    window = _each(found["kernel_size"], count)
    stride = _each(found["stride"], count) if found["stride"] else window
    return window, stride, _each(found["padding"], count)


def max_pool(writer: OpCollector, node: fx.Node) -> Names:
    """`paraplan.max_pool`: values and indices."""
    found = arguments(node)
    window, stride, padding = _pool_window(node, found)
    rest = (window, stride, padding, _each(found["dilation"], len(window)), bool(found["ceil_mode"]))
    return writer.emit("paraplan.max_pool", (writer.ref(node.args[0]), *rest), (_out(node, 0), _out(node, 1)))


def adaptive_max_pool(writer: OpCollector, node: fx.Node) -> Names:
    """`paraplan.adaptive_max_pool`: values and indices."""
    size = tuple(node.args[1])  # type: ignore[arg-type]
    return writer.emit("paraplan.adaptive_max_pool", (writer.ref(node.args[0]), size), (_out(node, 0), _out(node, 1)))


def max_pool_backward(writer: OpCollector, node: fx.Node) -> Names:
    """`paraplan.max_pool_grad` needs the indices and a size, not the input."""
    found, spec = arguments(node), _out(node)
    count = 3 if "3d" in aten_name(node.target) else 2
    return _one(writer, "max_pool_grad", (node.args[0], found["indices"], spec.shape[-count:]), spec)


def avg_pool(writer: OpCollector, node: fx.Node) -> Names:
    """`paraplan.avg_pool`."""
    return _one(writer, "avg_pool", (node.args[0], *_avg_rest(node)), _out(node))


def avg_pool_backward(writer: OpCollector, node: fx.Node) -> Names:
    """`paraplan.avg_pool_grad`."""
    rest = _avg_rest(node)
    size = _out(node).shape[-len(rest[0]) :]  # type: ignore[arg-type]
    return _one(writer, "avg_pool_grad", (node.args[0], size, *rest), _out(node))


def _avg_rest(node: fx.Node) -> tuple[object, ...]:
    found = arguments(node)
    window, stride, padding = _pool_window(node, found)
    flags = (bool(found["ceil_mode"]), bool(found["count_include_pad"]), found["divisor_override"])
    return (window, stride, padding, *flags)


def adaptive_avg_pool(writer: OpCollector, node: fx.Node) -> Names:
    """`paraplan.adaptive_avg_pool`."""
    return _one(writer, "adaptive_avg_pool", (node.args[0], tuple(node.args[1])), _out(node))  # type: ignore[arg-type]


def adaptive_avg_pool_backward(writer: OpCollector, node: fx.Node) -> Names:
    """`paraplan.adaptive_avg_pool_grad`."""
    count = 3 if "3d" in aten_name(node.target) else 2
    return _one(writer, "adaptive_avg_pool_grad", (node.args[0], _out(node).shape[-count:]), _out(node))


def upsample(writer: OpCollector, node: fx.Node) -> Names:
    """`paraplan.upsample`; sizes given as scales are spelled out."""
    spec, name = _out(node), aten_name(node.target)
    rest = _resize_rest(node)
    return _one(writer, "upsample", (node.args[0], name, spec.shape[2:], rest), spec)


def upsample_backward(writer: OpCollector, node: fx.Node) -> Names:
    """`paraplan.upsample_grad`."""
    spec, g, name = _out(node), _given(node, 0), aten_name(node.target).removesuffix("_backward")
    return _one(writer, "upsample_grad", (node.args[0], name, g.shape[2:], spec.shape[2:], _resize_rest(node)), spec)


def _resize_rest(node: fx.Node) -> tuple[object, ...]:
    """align_corners where there is one, then a scale (or None) per spatial dim."""
    found = arguments(node)
    scales: object = found.get("scale_factors")
    if "scale_factors" in found:
        count = len(_out(node).shape) - 2
        each = tuple(scales) if isinstance(scales, (tuple, list)) else (None,) * count
    else:
        each = tuple(value for key, value in found.items() if key.startswith("scales"))
    return (*([bool(found["align_corners"])] if "align_corners" in found else []), *each)


class _Batch:
    """What batch norm forms share: the channels' spec in the statistics' dtype, and the count of samples."""

    def __init__(self, x: TensorSpec) -> None:
        dtype = x.dtype if x.dtype == "float64" else "float32"
        self.x, self.spec = x, TensorSpec(dtype, x.shape[1:2])
        self.count = math.prod(x.shape) // max(x.shape[1], 1)
        self.dims = tuple(dim for dim in range(len(x.shape)) if dim != 1)


def _ref(writer: OpCollector, value: object) -> Arg:
    return None if value is None else writer.ref(value)


def batch_norm(writer: OpCollector, node: fx.Node) -> Names:
    """Result, mean, reciprocal deviation and, where they are kept, running mean and variance after this step."""
    found, own = arguments(node), _Batch(_given(node, 0))
    x, eps = writer.ref(node.args[0]), float(found["eps"])  # type: ignore[arg-type]
    running = tuple(_ref(writer, found.get(name)) for name in ("running_mean", "running_var"))
    affine = tuple(_ref(writer, found[name]) for name in ("weight", "bias"))
    if not found.get("training", False):
        rstd = _own(writer, "bn_rstd", (running[1], 1, encode_number(eps)), own.spec)
        out = _own(writer, "bn_apply", (x, running[0], "%" + rstd, *affine), own.x)
        return (out, str(running[0])[1:], rstd)
    kwargs: dict[str, Arg] = {} if own.spec.dtype == own.x.dtype else {"dtype": ":" + own.spec.dtype}
    total = writer.one("aten.sum.dim_IntList", (x, own.dims, False), own.spec, kwargs)
    mean = writer.one("aten.mul.Tensor", ("%" + total, 1.0 / own.count), own.spec)
    squares = _own(writer, "bn_squares", (x, "%" + mean), own.spec)
    rstd = _own(writer, "bn_rstd", ("%" + squares, own.count, encode_number(eps)), own.spec)
    out = _own(writer, "bn_apply", (x, "%" + mean, "%" + rstd, *affine), own.x)
    if running[0] is None:
        return (out, mean, rstd)
    momentum = float(found["momentum"])  # type: ignore[arg-type]
    after = []
    for old, value, scale in ((running[0], total, own.count), (running[1], squares, max(own.count - 1, 1))):
        spec = writer.values[str(old)[1:]]
        after.append(_own(writer, "bn_running", (old, "%" + value, momentum, 1.0 / scale), spec))
    return (out, mean, rstd, *after)


def batch_norm_backward(writer: OpCollector, node: fx.Node) -> Names:
    """Sums over samples first (they are the gradients of weight and bias), then the input's gradient from them."""
    found, own = arguments(node), _Batch(_given(node, 1))
    dx, dw, db = found["output_mask"]  # type: ignore[misc]
    g, x = writer.ref(node.args[0]), writer.ref(node.args[1])
    mean, rstd = writer.ref(found["save_mean"]), writer.ref(found["save_invstd"])
    weight = _ref(writer, found["weight"])
    sums = writer.emit("paraplan.bn_grad_affine", (g, x, mean, rstd), (own.spec, own.spec))
    made: list[str | None] = [None, None, None]
    for index, want in ((1, dw), (2, db)):
        if want:
            made[index] = _cast(writer, str(sums[index - 1]), _out(node, index))
    if dx and found["train"]:
        args = (g, x, mean, rstd, weight, f"%{sums[0]}", f"%{sums[1]}", own.count)
        made[0] = _own(writer, "bn_grad_input", args, own.x)
    elif dx:
        made[0] = _own(writer, "bn_apply", (g, None, rstd, weight, None), own.x)
    return tuple(made)


def _cast(writer: OpCollector, name: str, spec: TensorSpec) -> str:
    if writer.values[name].dtype == spec.dtype:
        return name
    return writer.one("aten._to_copy.default", ("%" + name,), spec, {"dtype": ":" + spec.dtype})


def stack(writer: OpCollector, node: fx.Node) -> Names:
    """A concatenation along the new dim: concatenation alone has to know memory orders."""
    spec, parts = _out(node), node.args[0]
    dim = int(arguments(node)["dim"]) % len(spec.shape)  # type: ignore[call-overload]
    shape = (*spec.shape[:dim], 1, *spec.shape[dim + 1 :])
    views = tuple("%" + view_to(writer, str(writer.ref(part))[1:], shape) for part in parts)  # type: ignore[union-attr]
    return views[0][1:] if len(views) == 1 else writer.one("aten.cat.default", (views, dim), spec)


def roll(writer: OpCollector, node: fx.Node) -> Names:
    """Without dims all are rolled as one."""
    found, spec = arguments(node), _out(node)
    if found["dims"]:
        return None
    flat = TensorSpec(spec.dtype, (math.prod(spec.shape),))
    source = view_to(writer, str(writer.ref(node.args[0]))[1:], flat.shape)
    rolled = writer.one("aten.roll.default", ("%" + source, writer.arg(found["shifts"]), (0,)), flat)
    return view_to(writer, rolled, spec.shape)


_RESIZES = (
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)

VISION_FORMS = {
    "stack": stack,
    "roll": roll,
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    **{f"max_pool{n}d_with_indices": max_pool for n in (2, 3)},
    **{f"max_pool{n}d_with_indices_backward": max_pool_backward for n in (2, 3)},
    **{f"adaptive_max_pool{n}d": adaptive_max_pool for n in (2, 3)},
    **{f"adaptive_max_pool{n}d_backward": max_pool_backward for n in (2, 3)},
    **{f"avg_pool{n}d": avg_pool for n in (2, 3)},
    **{f"avg_pool{n}d_backward": avg_pool_backward for n in (2, 3)},
    **{f"_adaptive_avg_pool{n}d": adaptive_avg_pool for n in (2, 3)},
    **{f"_adaptive_avg_pool{n}d_backward": adaptive_avg_pool_backward for n in (2, 3)},
    **dict.fromkeys(_RESIZES, upsample),
    **{f"{name}_backward": upsample_backward for name in _RESIZES},
    **dict.fromkeys(
        (
            "native_batch_norm",
            "_native_batch_norm_legit",
            "_native_batch_norm_legit_functional",
            "_native_batch_norm_legit_no_training",
        ),
        batch_norm,
    ),
    "native_batch_norm_backward": batch_norm_backward,
}
