"""How recorded norms are written: with statistics in float32 at least (see `norm_kernels`)."""

from __future__ import annotations

from torch import fx

from paraplan.capture.convert import Names, OpCollector, spec_of
from paraplan.capture.substituting.substitute import arguments
from paraplan.ir.model.tensor import DTYPE_BYTES, TensorSpec


def _out(node: fx.Node, index: int) -> TensorSpec:
    return spec_of(node.meta["val"][index])


def _statistic(node: fx.Node, index: int) -> TensorSpec:
    spec = _out(node, index)
    return spec if DTYPE_BYTES[spec.dtype] >= 4 else TensorSpec(dtype="float32", shape=spec.shape)


def layer_norm(writer: OpCollector, node: fx.Node) -> Names:
    """`paraplan.layer_norm`."""
    found = arguments(node)
    args = tuple(writer.arg(found[name]) for name in ("input", "normalized_shape", "weight", "bias", "eps"))
    return writer.emit("paraplan.layer_norm", args, (_out(node, 0), _statistic(node, 1), _statistic(node, 2)))


def layer_norm_backward(writer: OpCollector, node: fx.Node) -> Names:
    """`paraplan.layer_norm_grad`."""
    found = arguments(node)
    wanted = tuple(bool(want) for want in found["output_mask"])  # type: ignore[attr-defined]
    names = ("grad_out", "input", "normalized_shape", "mean", "rstd", "weight", "bias")
    args = tuple(writer.arg(found[name]) for name in names)
    specs = [_out(node, index) if want else None for index, want in enumerate(wanted)]
    return writer.emit("paraplan.layer_norm_grad", (*args, wanted), specs)


def group_norm(writer: OpCollector, node: fx.Node) -> Names:
    """`paraplan.group_norm`; numbers of samples and channels follow from the input."""
    found = arguments(node)
    args = (found["input"], found["weight"], found["bias"], found["group"], found["eps"])
    specs = (_out(node, 0), _out(node, 1), _out(node, 2))
    return writer.emit("paraplan.group_norm", tuple(writer.arg(arg) for arg in args), specs)


def group_norm_backward(writer: OpCollector, node: fx.Node) -> Names:
    """`paraplan.group_norm_grad`."""
    found = arguments(node)
    wanted = tuple(bool(want) for want in found["output_mask"])  # type: ignore[attr-defined]
    names = ("grad_out", "input", "mean", "rstd", "weight", "group")
    args = tuple(writer.arg(found[name]) for name in names)
    specs = [_out(node, index) if want else None for index, want in enumerate(wanted)]
    return writer.emit("paraplan.group_norm_grad", (*args, wanted), specs)


NORM_FORMS = {
    "native_layer_norm": layer_norm,
    "native_layer_norm_backward": layer_norm_backward,
    "native_group_norm": group_norm,
    "native_group_norm_backward": group_norm_backward,
}
