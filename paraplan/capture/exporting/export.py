"""torch.export of a fake model with its loss, as one flat functional fx graph over named inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from paraplan.capture.cutting.outputs import LossChoice, choose_losses, named_tensors
from paraplan.capture.explained import explain
from paraplan.capture.exporting.decided import Decided
from paraplan.capture.exporting.fake import DOUBLE, arguments, as_computed
from paraplan.capture.exporting.functional import functional, keep_no_grad, relink
from paraplan.capture.exporting.hf import eager_masks
from paraplan.capture.exporting.switched import Switches
from paraplan.capture.exporting.user_functions import NoOutsideGradients, no_outside_numbers, recorded_functions
from paraplan.capture.following.followed import Followed
from paraplan.capture.following.known_values import KnownValues
from paraplan.capture.following.patched import followed_modules
from paraplan.capture.following.refusals import refusals_noted
from paraplan.capture.precision import default_dtype
from paraplan.capture.python_state.aliases import Aliases
from paraplan.capture.python_state.left_state import assignments_written
from paraplan.capture.python_state.model_writes import explicit, keep_written, refuse_hidden_writes
from paraplan.capture.python_state.reading import Reading
from paraplan.capture.recurrences.followed_loops import loops_followed
from paraplan.capture.recurrences.layers import recurrent_layers
from paraplan.capture.recurrences.loop_mode import looping
from paraplan.capture.recurrences.loop_runs import Loops
from paraplan.capture.recurrences.markers import NotALoop
from paraplan.capture.repeating.repeated_calls import Repeated
from paraplan.capture.rewriting.rewrite import Rewriter
from paraplan.capture.rewriting.strided import by_index
from paraplan.capture.source_lines import DATA_DEPENDENT, line_of_stack, stack_of
from paraplan.capture.torch_private import composites_known, is_region, lazy_modules
from paraplan.ir.errors import CaptureError
from paraplan.kernels.torch_private import FakeTensorMode, is_fake

LossFn = Callable[[object, dict[str, Tensor]], Tensor | dict[str, Tensor] | tuple[Tensor, ...]]
_PREFIX = "model."


class Exported(NamedTuple):
    """A functional graph.

    Attributes:
        graph: fx graph; its outputs are the losses, then the auxiliary outputs.
        names: per placeholder: "param:<name>", "buffer:<name>", "batch:<name>" or "constant:<name>".
        constants: values of the small tensors the model wrote out.
        updates: per buffer the model writes, the node of its new value (a detach); outputs of the graph too, after
            the others.
        losses: name and weight of each loss.
        outputs: names of the auxiliary outputs.
    """

    graph: fx.Graph
    names: dict[fx.Node, str]
    constants: dict[str, Tensor]
    updates: dict[str, fx.Node]
    losses: tuple[tuple[str, float], ...] = ()
    outputs: tuple[str, ...] = ()


class _Returned:
    """What a traced forward returned, by name, in the order of its results."""

    def __init__(self) -> None:
        self.losses: tuple[tuple[str, float], ...] = ()
        self.outputs: tuple[str, ...] = ()


class Asked(NamedTuple):
    """How a forward is called, and what of it is wanted.

    loss_fn: (model output, batch) -> loss, or several.
    choice: which of the scalars returned are trained on.
    precision: what the forward computes in, or `DOUBLE`; its float inputs are cast to a half one.
    positional: whether tensors are given in forward's order, and not by name.
    others: arguments that are no tensors.
    keep_outputs: whether what else the model returns is kept.
    rolled: whether loops over time are kept as loops.
    apart: places of loops in the user's code that are run step by step all the same, and why.
    """

    loss_fn: LossFn | None = None
    choice: LossChoice = None
    precision: str = "fp32"
    positional: bool = False
    others: Mapping[str, object] = {}
    keep_outputs: bool = True
    rolled: bool = True
    apart: Mapping[str, str] = MappingProxyType({})


class _WithLoss(nn.Module):
    """Calls the model on named tensors and returns its losses and, detached, what else it returned."""

    def __init__(
        self,
        model: nn.Module,
        names: tuple[str, ...],
        asked: Asked,
        choose: Callable[[object, _Returned, bool], list[Tensor]],
        reading: Reading,
        followed: Followed,
        loops: Loops,
    ):
        super().__init__()
        self.model = model
        self._names, self._positional, self._others = names, asked.positional, dict(asked.others)
        self._loss_of = (
            () if asked.loss_fn is None else (asked.loss_fn,)
        )  # in a tuple, lest a module becomes part of the model
        self._choose, self._precision, self._reading, self._followed = choose, asked.precision, reading, followed
        self._switches, self._aliases = Switches(), Aliases(model)
        self._answers, self._outside = Decided(), NoOutsideGradients()
        self._loops = loops
        self._repeated = Repeated(lambda: loops.active is None and self._switches.all_on)

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """The losses, the auxiliary outputs, then what forward left in attributes that it read."""
        batch, attributes = self._reading.parted(dict(zip(self._names, tensors, strict=True)))
        computed = as_computed(attributes, self._precision)
        with self._following():
            with assignments_written(self.model, self._aliases.is_used), self._reading.of(computed):
                output = self._call(batch)
            losses = output
            for loss_fn in self._loss_of:
                with self._reading.of(attributes):
                    losses = loss_fn(output, batch)
            results = [*self._choose(losses, output, bool(self._loss_of)), *self._reading.left()]
        return results

    @contextmanager
    def _following(self) -> Iterator[None]:
        self._switches.begin(self.model)
        self._aliases.begin(self.model)
        with self._outside, self._answers, self._followed, self._switches, self._aliases, looping(self._loops):
            self._repeated.begin(_WithLoss.forward.__code__)
            with self._repeated, KnownValues():
                yield
        self._switches.end()

    def _call(self, batch: dict[str, Tensor]) -> object:
        taken = as_computed(batch, self._precision)
        args, kwargs = arguments(self.model, taken, self._others, self._positional, bool(self._loss_of))
        return self.model(*args, **kwargs)


def _chooser(returned: _Returned, choice: LossChoice, keep_outputs: bool) -> Callable[..., list[Tensor]]:
    """Takes apart what a forward returned; notes the names in `returned`."""

    def choose(losses: object, output: object, from_loss_fn: bool) -> list[Tensor]:
        chosen = choose_losses(losses, choice, from_loss_fn)
        taken = set() if from_loss_fn else {each.source for each in chosen}
        kept = {name: x for name, x in named_tensors(output) if name not in taken} if keep_outputs else {}
        returned.losses = tuple((each.name, each.weight) for each in chosen)
        returned.outputs = tuple(kept)
        return [*(each.value for each in chosen), *(x.detach() for x in kept.values())]

    return choose


def export_loss(
    model: nn.Module,
    batch: dict[str, Tensor],
    mode: FakeTensorMode,
    asked: Asked,
    reading: Reading | None = None,
) -> Exported:
    """Exports the losses of a fake model on a fake batch, and its other outputs.

    Args:
        model, batch: the model and the tensors it is called with.
        mode: the model's fake mode.
        asked: how it is called, and what is wanted.
        reading: takes note of what is read of Python; made here if left out.
    Raises:
        CaptureError: the forward cannot be traced; names the user's line and the remedy.
    """
    loss_fn, precision = asked.loss_fn, asked.precision
    reading, returned = reading or Reading(model, loss_fn), _Returned()
    followed = Followed(reading.recorder.around.cached)
    choose, loops = _chooser(returned, asked.choice, asked.keep_outputs), Loops(asked.apart if asked.rolled else None)
    wrapped = _WithLoss(model, tuple(batch), asked, choose, reading, followed, loops)
    wrapped.training = model.training  # its own alone: parts of a model may be in another mode
    narrow = default_dtype(torch.float32 if precision == "fp64" else torch.get_default_dtype())
    with (
        mode,
        narrow,
        eager_masks(batch),
        followed_modules(followed),
        lazy_modules(),
        recorded_functions() as functions,
        refusals_noted() as refused,
    ):
        try:
            with no_outside_numbers(), reading.watching(), loops_followed(model, loss_fn, loops):
                program = torch.export.export(wrapped, tuple(batch.values()), strict=False)
            loops.check()
            followed.check(refused)
            relink(program.graph_module)
            keep_written(program)
            keep_no_grad(program.graph_module)
            with composites_known():
                program = functional(program) or program.run_decompositions({**recurrent_layers(), **explicit()})
        except CaptureError:
            raise
        except Exception as fault:
            if loops.began:
                raise NotALoop("", "a step of a loop over time cannot be recorded by itself") from fault
            raise explain(fault, precision) from fault
    _say_loss(program.graph_module.graph, loss_fn)
    _refuse_regions(program.graph_module.graph)
    refuse_hidden_writes(program)
    functions.restore(program.graph_module.graph)
    by_index(program.graph_module.graph, Rewriter(program.graph_module.graph, mode))
    _reject_mutation(program, tuple(batch))
    flat = _flatten(program, tuple(batch))._replace(losses=returned.losses, outputs=returned.outputs)
    reading.settle(flat.graph, flat.names, len(returned.losses) + len(returned.outputs))
    if precision not in ("fp64", DOUBLE):
        return flat
    return flat._replace(constants={name: followed.exact(value) for name, value in flat.constants.items()})


def _say_loss(graph: fx.Graph, loss_fn: LossFn | None) -> None:
    """Ops of the loss function come from its first line: torch keeps lines of functions called forward alone."""
    head = stack_of(loss_fn)
    said: dict[str, str] = {}  # nodes of equal calls share their stacks
    for node in graph.nodes:
        stack = node.meta.get("stack_trace")
        if node.op == "call_function" and stack:
            if stack not in said:
                said[stack] = stack if line_of_stack(stack) else f"{stack.rstrip()}\n{head}"
            node.meta["stack_trace"] = said[stack]


def _reject_mutation(program: ExportedProgram, batch_names: Sequence[str]) -> None:
    inputs = [each.arg.name for each in program.graph_signature.input_specs if each.kind is InputKind.USER_INPUT]
    called, results = dict(zip(inputs, batch_names, strict=True)), program.graph_module.graph.output_node().args[0]
    for spec, node in zip(program.graph_signature.output_specs, results, strict=True):
        line = line_of_stack(node.meta.get("stack_trace")) or "forward"
        name = called.get(str(spec.target), str(spec.target).removeprefix(_PREFIX))
        if spec.kind is OutputKind.USER_INPUT_MUTATION:
            raise CaptureError(f"{line}: writes the input {name!r} in place; work on a copy: x = x.clone()")
        if spec.kind is not OutputKind.PARAMETER_MUTATION:
            continue
        if program.state_dict[str(spec.target)].requires_grad:
            raise CaptureError(
                f"{line}: writes the trained parameter {name!r} in place, which only the optimizer may: do it after "
                "the optimizer's step, or compute with a changed copy (w = w.clamp(-1, 1))"
            )
        raise CaptureError(
            f"{line}: writes {name!r}, a parameter that does not train; what forward writes is a buffer: "
            f"register_buffer({name.rpartition('.')[2]!r}, ...) in place of nn.Parameter"
        )


def _take_updates(program: ExportedProgram) -> dict[str, fx.Node]:
    """What buffers hold after the step (running statistics, counters), no gradient flowing through; the graph's outputs
    are then the losses, the auxiliary outputs and these."""
    graph = program.graph_module.graph
    output = graph.output_node()
    results: tuple[fx.Node, ...] = tuple(output.args[0])  # type: ignore[arg-type]
    updates: dict[str, fx.Node] = {}
    kept = []
    for spec, node in zip(program.graph_signature.output_specs, results, strict=True):
        if spec.kind != OutputKind.BUFFER_MUTATION:
            kept.append(node)
            continue
        at = _after(node)
        with graph.inserting_before(at):
            made = graph.call_function(torch.ops.aten.detach.default, (node,))
        made.meta = {key: node.meta[key] for key in ("val", "stack_trace") if key in node.meta}
        updates[str(spec.target).removeprefix(_PREFIX)] = made
    output.args = ((*kept, *updates.values()),)
    return updates


def _after(node: fx.Node) -> fx.Node:
    """The node before which what reads `node` may stand: inputs and the pieces of a tuple stay together."""
    found = node.next
    while found.op == "placeholder" or found.target is operator.getitem:
        found = found.next
    return found


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
    return Exported(graph, names, constants, _take_updates(program))


def _constant_value(value: object, name: str) -> Tensor:
    if isinstance(value, Tensor) and is_fake(value):
        value = getattr(value, "constant", None)
    if not isinstance(value, Tensor) or value.device.type == "meta":
        raise CaptureError(
            f"tensor constant {name!r} has no value while tracing; use register_buffer, or build it "
            "in forward with torch.full/arange"
        )
    return value.detach()


_NUMBERS = frozenset({"aten.item.default", "aten._local_scalar_dense.default"})


def _listed(value: object) -> Sequence[object]:
    """Several results or one as a sequence."""
    return value if isinstance(value, (list, tuple)) else (value,)


def _refuse_regions(graph: fx.Graph) -> None:
    """Python numbers made of tensors, sizes that depend on data, sparse tensors, and branches.

    Raises:
        CaptureError: there is one; names the line.
    """
    for node in graph.nodes:
        if str(node.target) in _NUMBERS:
            raise CaptureError(f"{_line(node)}: {DATA_DEPENDENT} (.item(), float() or int() of a tensor)")
        made = node.meta.get("val")
        if any(isinstance(n, torch.SymInt) for x in _listed(made) if isinstance(x, Tensor) for n in x.shape):
            raise CaptureError(
                f"{_line(node)}: {DATA_DEPENDENT} ({node.target} gives as many elements as its data say)"
            )
        if any(x.layout is not torch.strided for x in _listed(made) if isinstance(x, Tensor)):
            raise CaptureError(f"{_line(node)}: {node.target} makes a sparse tensor, which no plan has; keep it dense")
        if node.op == "call_function" and is_region(node.target):
            raise CaptureError(
                f"{_line(node)}: {node.target} runs a branch or a loop of its own, which a program cannot hold; "
                "compute both branches and choose with torch.where, write the loop out"
            )


def _line(node: fx.Node) -> str:
    return line_of_stack(node.meta.get("stack_trace")) or "somewhere in the forward"
