"""fp64: every float of the captured forward becomes float64, every complex number complex128.

The model is exported in float32, so no cast up to float32 exists in it; then the inputs, every float dtype written
in the graph and the default dtype become float64 and all results are computed anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, fx

from paraplan.capture.rewriting.rewrite import Rewriter
from paraplan.capture.source_lines import DATA_DEPENDENT, depends_on_data, line_of_stack
from paraplan.ir.errors import CaptureError
from paraplan.ir.model.program import HALVES
from paraplan.kernels.torch_private import FakeTensorMode

WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
"""What becomes of narrower floats and complex numbers."""

_ALSO = {"float16": ("half",)}
"""How torch's messages call a dtype besides."""


def brought_by(precision: str, text: str) -> str:
    """Where a failure tells of a half dtype: what `precision` has to do with it, and the ways out; "" elsewhere."""
    half = HALVES.get(precision, "")
    if precision == "fp32" and any(name in text.lower() for name in HALVES.values()):
        return (
            ". Under precision='fp32' parameters are float32, those of a model in half precision too: leave out casts "
            "to halves that forward makes (x.to(weight.dtype) does nothing then), or choose precision='bf16'"
        )
    if not half or not any(name in text.lower() for name in (half, *_ALSO.get(half, ()))):
        return ""
    return (
        f". Under precision={precision!r} parameters and float inputs are {half}, which meets another dtype here: cast "
        "what forward makes in that one (a table of torch.arange, torch.ones), as in table.to(x.dtype), or choose "
        "precision='fp32'"
    )


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype under fp64."""
    return WIDE.get(dtype, dtype)


def lift_to_float64(graph: fx.Graph, rewriter: Rewriter, constants: dict[str, Tensor]) -> dict[str, Tensor]:
    """Lifts a graph in place.

    Args:
        graph: forward graph, before canonical ops are put in.
        rewriter: evaluates nodes.
        constants: tensors the model wrote out.
    Returns:
        The constants, lifted.
    Raises:
        CaptureError: some float value is still narrower.
    """
    with default_dtype(torch.float64):
        for node in list(graph.nodes):
            if node.op == "placeholder":
                node.meta["val"] = _lift_tensor(node.meta["val"], rewriter)
            elif node.op == "call_function":
                node.args, node.kwargs = _lift_literals(node.args), _lift_literals(node.kwargs)
                _evaluate(node, rewriter)
                _pin_dtype(node, rewriter)
                _check(node)
    return {name: value.to(widened(value.dtype)) for name, value in constants.items()}


def _evaluate(node: fx.Node, rewriter: Rewriter) -> None:
    try:
        node.meta["val"] = rewriter.evaluate(node)
    except Exception as fault:
        if depends_on_data(fault):
            raise CaptureError(f"{_line(node)}: {DATA_DEPENDENT} ({node.target})") from fault
        raise CaptureError(
            f"{_line(node)}: {node.target} does not take float64 ({str(fault).splitlines()[0]}); use precision='fp32'"
        ) from fault


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within it, numbers and factories are of this dtype."""
    saved = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(saved)


def pin_dtypes(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Has what a backward makes of integers say its dtype, as `lift_to_float64` does in the forward."""
    rewriter = Rewriter(graph, mode)
    for node in list(graph.nodes):
        if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor):
            _pin_dtype(node, rewriter)


def _pin_dtype(node: fx.Node, rewriter: Rewriter) -> None:
    """Has a float made of nothing (linspace) or of integers alone (a count's inverse) say that it is one: else the
    default dtype where the program runs, which need not be float64, would decide."""
    made, sources = node.meta["val"], node.all_input_nodes
    values = [source.meta["val"] for source in sources]
    if not (isinstance(made, Tensor) and made.is_floating_point()) or node.kwargs.get("dtype") is not None:
        return
    if any(not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() for x in values):
        return
    before = node.args, node.kwargs
    if not sources:
        node.kwargs = {**node.kwargs, "dtype": made.dtype}
    for source in sources:
        cast = rewriter.call(node, torch.ops.aten._to_copy.default, source, dtype=made.dtype)
        node.replace_input_with(source, cast)
    try:
        node.meta["val"] = rewriter.evaluate(node)
    except Exception:  # noqa: BLE001  (it takes integers only: a condition, an index; or no dtype)
        node.args, node.kwargs = before


def _line(node: fx.Node) -> str:
    return line_of_stack(node.meta.get("stack_trace")) or "unknown line"


def _lift_tensor(value: Tensor, rewriter: Rewriter) -> Tensor:
    if value.dtype not in WIDE:
        return value
    with rewriter.mode:
        return torch.empty(value.shape, dtype=widened(value.dtype), device="cpu")


def _lift_literals(arg: object) -> object:  # type: ignore[no-untyped-def]
    if isinstance(arg, torch.dtype):
        return widened(arg)
    if isinstance(arg, (tuple, list)):
        return type(arg)(_lift_literals(item) for item in arg)
    if isinstance(arg, dict):
        return {key: _lift_literals(item) for key, item in arg.items()}
    return arg


def _check(node: fx.Node) -> None:
    values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
    for value in values:
        if isinstance(value, Tensor) and value.dtype in WIDE:
            raise CaptureError(
                f"{_line(node)}: {node.target} stays {value.dtype} under precision='fp64'; use precision='fp32'"
            )
