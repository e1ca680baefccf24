"""The export of a model for its program: what forward reads noted, what it carries from step to step refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from torch import Tensor, fx, nn

from paraplan.capture.exporting.export import Asked, Exported, export_loss
from paraplan.capture.exporting.fake import fake_batch, fake_copy, traced_precision
from paraplan.capture.exporting.shared_memory import refuse_shared_memory
from paraplan.capture.python_state.aliases import names_of
from paraplan.capture.python_state.carried_attributes import Changed, refuse_carried
from paraplan.capture.python_state.dynamic import Attribute
from paraplan.capture.python_state.reading import Reading, Reads, values_set
from paraplan.capture.python_state.values import text_of
from paraplan.ir.errors import CaptureError
from paraplan.kernels.torch_private import FakeTensorMode, OpOverload

T = TypeVar("T")


class Traced(NamedTuple):
    """An export.

    Attributes:
        copied: the fake copy that was exported.
        batch: its fake batch, attributes that are inputs included.
        exported: the graph.
        reads: what forward and loss function read of Python.
    """

    copied: nn.Module
    batch: dict[str, Tensor]
    exported: Exported
    reads: Reads


class _Once(NamedTuple):
    copied: nn.Module
    exported: Exported
    reading: Reading

    @property
    def outcome(self) -> tuple[str, Sequence[Changed]]:
        """The graph as text, and what forward changed."""
        return _text(self.exported), self.reading.changes


def _text(exported: Exported) -> str:
    """What an export computes, whatever its nodes are called; what no output needs is left out."""
    graph = exported.graph
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in live or node.op in ("placeholder", "output") or node.is_impure():
            live |= {node, *node.all_input_nodes}
    numbers = {node: number for number, node in enumerate(node for node in graph.nodes if node in live)}
    lines = [f"{exported.losses} {exported.outputs}"]
    for node, number in numbers.items():
        given = fx.map_arg((node.args, node.kwargs), lambda each: f"%{numbers[each]}")
        lines.append(f"%{number} = {_called(node, exported)} {given}")
    return "\n".join(lines)


def _called(node: fx.Node, exported: Exported) -> str:
    if node.op == "placeholder":
        name = exported.names[node]
        constant = exported.constants.get(name.removeprefix("constant:")) if name.startswith("constant:") else None
        return name if constant is None else f"constant {text_of(constant)}"
    return str(node.target) if isinstance(node.target, str | OpOverload) else node.target.__name__


def trace_model(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    mode: FakeTensorMode,
    asked: Asked,
    attributes: Sequence[Attribute],
) -> Traced:
    """Exports a fake copy of a model with its loss.

    Args:
        model: is not modified.
        tensors: of the batch, by name.
        mode, asked: as for `export_loss`.
        attributes: those of the model that are inputs.
    Raises:
        CaptureError: forward cannot be traced, or carries something from step to step outside of the graph.
    """
    precision = traced_precision(model, asked.precision)
    asked = asked._replace(precision=precision)
    batch = fake_batch(dict(tensors) | {each.name: each.value for each in attributes}, precision, mode)

    def once(changes: Sequence[Changed] = (), values: Mapping[int, object] = MappingProxyType({})) -> _Once:
        memo: dict[int, object] = {}
        copied = fake_copy(model, precision, mode, memo)
        with values_set(memo, changes, values):
            reading = Reading(copied, asked.loss_fn, memo, model, attributes)
            exported = export_loss(copied, batch, mode, asked, reading)
        return _Once(copied, exported, reading)

    found = once()
    read = found.reading.recorder.reads(names_of(model))
    refuse_shared_memory(model, read, found.exported.updates)
    changes = found.reading.changes
    refuse_carried(changes, found.outcome[0], lambda values: once(changes, values).outcome)
    return Traced(found.copied, batch, found.exported, found.reading.reads(asked.loss_fn, asked.others, asked.choice))


def blaming_attributes(captured: Callable[[tuple[Attribute, ...]], T], attributes: tuple[Attribute, ...]) -> T:
    """What is captured; where it fails only because an attribute is declared dynamic, the error says which."""
    try:
        return captured(attributes)
    except CaptureError as fault:
        for each in attributes:
            try:
                captured(tuple(other for other in attributes if other is not each))
            except CaptureError:
                continue
            raise CaptureError(
                f"self.{each.path} is declared dynamic, so it is a tensor in forward, and its number is needed: "
                f"{fault}. Use it in tensor arithmetic only, or leave it out of dynamic and plan one bucket per value: "
                f"Buckets.compile(model, cluster, [{{'attributes': {{{each.path!r}: value}}}}, ...])"
            ) from None
        raise
