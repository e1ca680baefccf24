"""torch.export of a fake model with its loss, as one flat functional fx graph over named inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from paraplan.ir.errors import CaptureError
from paraplan.ir.trace.hf import eager_masks
from paraplan.ir.trace.source import line_of_error
from paraplan.ir.trace.torch_private import FakeTensorMode, is_fake

LossFn = Callable[[object, dict[str, Tensor]], Tensor]
_PREFIX = "model."


class Exported(NamedTuple):
    """A functional graph.

    Attributes:
        graph: fx graph with one output, the loss.
        names: per placeholder: "param:<name>", "buffer:<name>", "batch:<name>" or "constant:<name>".
        constants: values of the small tensors the model wrote out.
    """

    graph: fx.Graph
    names: dict[fx.Node, str]
    constants: dict[str, Tensor]


class _WithLoss(nn.Module):
    """Calls the model on named tensors and returns the scalar loss."""

    def __init__(
        self,
        model: nn.Module,
        names: tuple[str, ...],
        positional: bool,
        others: dict[str, object],
        loss_fn: LossFn | None,
    ):
        super().__init__()
        self.model = model
        self._names, self._positional, self._others, self._loss_fn = names, positional, others, loss_fn

    def forward(self, *tensors: Tensor) -> Tensor:
        """The loss."""
        batch = dict(zip(self._names, tensors, strict=True))
        output = self.model(*tensors, **self._others) if self._positional else self.model(**batch, **self._others)
        loss = output if self._loss_fn is None else self._loss_fn(output, batch)
        return _scalar_loss(loss, self._loss_fn is not None)


def _scalar_loss(output: object, from_loss_fn: bool) -> Tensor:
    found = output
    if not isinstance(output, Tensor):
        found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if not isinstance(found, Tensor):
        raise CaptureError(
            f"no loss: the model returned {type(output).__name__} without one; pass labels among example_inputs, "
            "or loss_fn=lambda outputs, batch: ..."
        )
    if found.numel() != 1 or not found.is_floating_point():
        whose = "loss_fn" if from_loss_fn else "the model"
        raise CaptureError(
            f"no loss: {whose} returned a {str(found.dtype).removeprefix('torch.')} tensor of shape "
            f"{tuple(found.shape)}, not a scalar float; reduce it, or pass loss_fn=lambda outputs, batch: ..."
        )
    return found.reshape(())


def export_loss(
    model: nn.Module,
    batch: dict[str, Tensor],
    positional: bool,
    others: dict[str, object],
    loss_fn: LossFn | None,
    mode: FakeTensorMode,
) -> Exported:
    """Exports the loss of a fake model on a fake batch.

    Raises:
        CaptureError: the forward cannot be traced; names the user's line and the remedy.
    """
    wrapped = _WithLoss(model, tuple(batch), positional, others, loss_fn).train(model.training)
    with mode, eager_masks(batch):
        try:
            program = torch.export.export(wrapped, tuple(batch.values()), strict=False)
            _keep_no_grad(program.graph_module)
            program = program.run_decompositions({})
        except CaptureError:
            raise
        except Exception as fault:
            raise _explain(fault) from fault
    _reject_mutation(program)
    return _flatten(program, tuple(batch))


def _keep_no_grad(module: fx.GraphModule) -> None:
    """Detaches what no_grad regions return: inlining them would silently give it a gradient."""
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            inner = getattr(module, node.args[1].target)
            if node.args[0] is False:
                _detach_outputs(inner)
    for child in module.children():
        if isinstance(child, fx.GraphModule):
            _keep_no_grad(child)


def _detach_outputs(module: fx.GraphModule) -> None:
    output = module.graph.output_node()
    with module.graph.inserting_before(output):

        def detach(value: fx.Node) -> fx.Node:
            made = module.graph.call_function(torch.ops.aten.detach.default, (value,))
            made.meta = dict(value.meta)
            return made

        output.args = fx.map_arg(output.args, detach)
    module.recompile()


def _reject_mutation(program: ExportedProgram) -> None:
    for spec in program.graph_signature.output_specs:
        if spec.kind == OutputKind.BUFFER_MUTATION:
            name = str(spec.target).removeprefix(_PREFIX)
            raise CaptureError(
                f"the model writes its buffer {name!r} in forward (batch norm's running statistics, counters): not "
                "supported yet; use model.eval(), GroupNorm/LayerNorm, or BatchNorm(track_running_stats=False)"
            )
        if spec.kind in (OutputKind.USER_INPUT_MUTATION, OutputKind.PARAMETER_MUTATION):
            raise CaptureError(f"forward writes {spec.target!r} in place; work on a copy: x = x.clone()")


def _flatten(program: ExportedProgram, batch_names: tuple[str, ...]) -> Exported:
    graph = program.graph_module.graph
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    names: dict[fx.Node, str] = {}
    constants: dict[str, Tensor] = {}
    users = iter(batch_names)
    for spec in program.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        target = str(spec.target or "").removeprefix(_PREFIX)
        if spec.kind == InputKind.USER_INPUT:
            names[node] = f"batch:{next(users)}"
        elif spec.kind == InputKind.PARAMETER:
            names[node] = f"param:{target}"
        elif spec.kind == InputKind.BUFFER:
            names[node] = f"buffer:{target}"
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            names[node] = f"constant:{spec.target}"
            constants[str(spec.target)] = _constant_value(program.constants[str(spec.target)], str(spec.target))
        else:
            raise CaptureError(
                f"the model takes a {spec.kind.name} input, which has no meaning in a program; "
                "register tensors as buffers"
            )
    return Exported(graph, names, constants)


def _constant_value(value: object, name: str) -> Tensor:
    if isinstance(value, Tensor) and is_fake(value):
        value = getattr(value, "constant", None)
    if not isinstance(value, Tensor) or value.device.type == "meta":
        raise CaptureError(
            f"tensor constant {name!r} has no value while tracing; use register_buffer, or build it "
            "in forward with torch.full/arange"
        )
    return value.detach()


def _explain(fault: Exception) -> CaptureError:
    line = line_of_error(fault) or "unknown line"
    text = str(fault).strip().split("\n")[0]
    kind = type(fault).__name__
    if any(word in kind + str(fault) for word in ("DataDependent", "data-dependent", "unbacked", "DynamicOutputShape")):
        return CaptureError(
            f"{line}: control flow, a Python number or a shape depends on tensor data; use torch.where or "
            f"torch.cond instead of `if`, keep values as tensors instead of .item(), masks instead of boolean "
            f"indexing ({kind})"
        )
    return CaptureError(f"{line}: tracing the forward failed: {kind}: {text}")
