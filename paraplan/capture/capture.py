"""Capture: an unmodified nn.Module -> `Program`.

fake copy -> export with its loss -> clean -> canonical ops -> cut -> one joint graph per kind. No weight is ever
allocated and no kernel runs, so a model on meta of any size is captured in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import TypedDict, Unpack

import torch
from torch import Tensor, fx, nn

from paraplan.capture.cutting.auxiliary import asides_of, make_outputs, plain, read_asides, wanted_outputs
from paraplan.capture.cutting.cut import cut
from paraplan.capture.cutting.flow import flows, value_of
from paraplan.capture.cutting.graph_ends import end_in, ends_of, join_ties, refuse_numbers
from paraplan.capture.cutting.kinds import make_denominator, make_kind
from paraplan.capture.cutting.loss_terms import LossFraction, alike, loss_terms, own_numerators
from paraplan.capture.cutting.mixing import tail_nodes
from paraplan.capture.cutting.outputs import LossChoice
from paraplan.capture.cutting.segments import ForwardGraph, closure, make_piece, signature
from paraplan.capture.discovery.discover import attach_rules
from paraplan.capture.exporting.clean import clean, drop_idle_detach
from paraplan.capture.exporting.export import Asked, Exported, LossFn
from paraplan.capture.exporting.fake import name_inputs, of_microbatch, traced_dtype
from paraplan.capture.exporting.quiet import quiet_torch
from paraplan.capture.exporting.traced import blaming_attributes, trace_model
from paraplan.capture.fingerprint import fingerprint
from paraplan.capture.hooks import refuse_hooks, refuse_scripts
from paraplan.capture.precision import default_dtype, lift_to_float64, widened
from paraplan.capture.python_state.dynamic import Attribute, find_attributes
from paraplan.capture.python_state.reading import Reads
from paraplan.capture.recurrences.markers import NotALoop
from paraplan.capture.recurrences.roll import roll_loops
from paraplan.capture.rewriting.masks import simplify_masks
from paraplan.capture.rewriting.rewrite import Rewriter
from paraplan.capture.substituting.substitute import substitute
from paraplan.capture.substituting.substitute_float8 import convert_linears
from paraplan.ir.errors import CaptureError
from paraplan.ir.model.program import BatchInput, Denominator, LossTerm, ParamSpec, Program, Segment, SegmentKind
from paraplan.ir.model.tensor import COMPLEX, TensorSpec
from paraplan.ir.process.garbage import seldom_collected
from paraplan.kernels.dtypes import dtype_name
from paraplan.kernels.torch_private import FakeTensorMode, fake_mode

aten = torch.ops.aten


class How(TypedDict, total=False):
    """How a step is captured.

    loss_fn: (model output, batch by name) -> scalar loss (or several); left out where the model returns its loss.
    precision: "fp32" (if left out), "fp64" (every float of the forward, casts included), "bf16", "fp16" or "fp8"
        (bf16 with linear layers in float8, see `substitute_float8`).
    batch_dims: the batch dim of each input, None for inputs equal on every microbatch; dim 0 by default.
    name: what to call the program; the model's class by default.
    loss: which of several losses are trained on, with which weights; see `outputs.LossChoice`.
    dynamic: attributes of the model ("encoder.tau") that are inputs of the program instead of constants.
    per_microbatch: so many microbatches are batches by themselves (`Program.apart`): the program is that of one.
    """

    loss_fn: LossFn | None
    precision: str
    batch_dims: Mapping[str, int | None] | None
    name: str | None
    loss: LossChoice
    dynamic: Sequence[str]
    per_microbatch: int


def capture(model: nn.Module, example_inputs: dict[str, Tensor] | tuple[object, ...], **how: Unpack[How]) -> Program:
    """Captures a model's training step at one global batch.

    Args:
        model: on meta, fake or real; it is not modified. Trains or not as it is (`model.training`).
        example_inputs: one global batch, by forward's parameter names or in their order; only shapes matter.
        how: see `How`.
    Raises:
        CaptureError: the model cannot be captured; names the user's line and the remedy.
    """
    return capture_with_reads(model, example_inputs, **how)[0]


@seldom_collected()
@quiet_torch()
def capture_with_reads(
    model: nn.Module,
    example_inputs: dict[str, Tensor] | tuple[object, ...],
    **how: Unpack[How],
) -> tuple[Program, Reads]:
    """As `capture`, and what was read of objects of this process that no program names (closures, the loss function's
    modules).

    Args:
        model, example_inputs, how: as of `capture`.
    """
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise CaptureError(f"model is {given}: give an nn.Module whose forward is a step's, made")
    if unknown := how.keys() - How.__annotations__.keys():
        raise TypeError(f"capture() has no keyword {sorted(unknown)[0]!r}; it has {', '.join(How.__annotations__)}")
    attributes = find_attributes(model, how.get("dynamic", ()))
    try:
        return _rolled_or_not(model, example_inputs, how, attributes, keep_outputs=True)
    except CaptureError:  # an output nobody trains on is no reason to refuse a model
        return blaming_attributes(
            lambda given: _rolled_or_not(model, example_inputs, how, given, keep_outputs=False), attributes
        )


def _rolled_or_not(
    model: nn.Module,
    example_inputs: dict[str, Tensor] | tuple[object, ...],
    how: How,
    attributes: tuple[Attribute, ...],
    keep_outputs: bool,
) -> tuple[Program, Reads]:
    """Loops over time are kept, but for those that turn out to be none; where that is not said of one, all of them."""
    apart: dict[str, str] = {}
    while True:
        try:
            return _capture(model, example_inputs, how, attributes, keep_outputs, apart)
        except NotALoop as found:
            if not found.where or found.where in apart:
                return _capture(model, example_inputs, how, attributes, keep_outputs, None)
            apart = apart | {found.where: found.why}


def _capture(
    model: nn.Module,
    example_inputs: dict[str, Tensor] | tuple[object, ...],
    how: How,
    attributes: tuple[Attribute, ...],
    keep_outputs: bool,
    apart: Mapping[str, str] | None,
) -> tuple[Program, Reads]:
    precision, micros = how.get("precision", "fp32"), how.get("per_microbatch", 1)
    traced_dtype(precision)
    refuse_hooks(model)
    refuse_scripts(model)
    tensors, others = name_inputs(model, example_inputs)
    rows, dims = _batch_dims(tensors, dict(how.get("batch_dims") or {}))
    batch_size, tensors = of_microbatch(tensors, rows, dims, micros)
    dims |= {each.name: None for each in attributes}
    mode, positional = fake_mode(), not isinstance(example_inputs, dict)
    loops = apart is not None, apart or {}
    asked = Asked(how.get("loss_fn"), how.get("loss"), precision, positional, others, keep_outputs, *loops)
    copied, batch, exported, reads = trace_model(model, tensors, mode, asked, attributes)
    params, buffers, first_names = _tensors_of(copied, precision)
    _check_trained(params, precision, type(model).__name__)
    forward, terms, extra = _rewrite(exported, params, first_names, precision, mode)
    wanted = wanted_outputs(forward, extra)
    inputs = _inputs_of(batch, dims, attributes, precision)
    digest = fingerprint(model, precision)

    def program(tail: frozenset[fx.Node]) -> Program:
        with default_dtype(torch.float64 if precision == "fp64" else torch.get_default_dtype()):
            kinds, segments, values = _segment(forward, mode, read_asides(wanted), tail)
            denominators, loss = _loss(forward, terms, values, mode)
        used = {param for segment in segments for param in segment.params}
        ruled, counted = attach_rules(kinds, denominators)
        return Program(
            name=how.get("name") or type(model).__name__,
            fingerprint=digest,
            precision=precision,
            batch_size=batch_size,
            batch=inputs,
            params=params,
            buffers=buffers,
            kinds=ruled,
            segments=tuple(segments),
            seeds=len(segments),
            loss=tuple(loss),
            denominators=counted,
            buffer_updates={key: values[node] for key, node in exported.updates.items()},
            outputs=make_outputs(forward, wanted, values, used, mode),
            settings=reads.settings,
            code=reads.code,
            apart=micros,
        )

    made = program(frozenset())
    tail = tail_nodes(forward, made, mode)
    return (program(tail) if tail else made), reads


def _inputs_of(
    batch: Mapping[str, Tensor], dims: Mapping[str, int | None], attributes: Sequence[Attribute], precision: str
) -> dict[str, BatchInput]:
    """The batch as a program says it, attributes that are inputs last."""
    declared = {each.name: each.path for each in attributes}
    return {
        key: BatchInput(
            spec=TensorSpec(dtype=_lifted(x, precision), shape=tuple(x.shape)),
            batch_dim=dims[key],
            attribute=declared.get(key, ""),
        )
        for key, x in batch.items()
    }


def _check_trained(params: Mapping[str, ParamSpec], precision: str, name: str) -> None:
    """Something trains, and what does can be scaled."""
    paired = [key for key, param in params.items() if param.trainable and param.spec.dtype in COMPLEX]
    if paired and precision == "fp16":
        raise CaptureError(
            f"parameter {paired[0]!r} is complex: torch's gradient scaler, which fp16 needs, takes no complex "
            "gradients; choose precision='bf16' or 'fp32'"
        )
    if not any(param.trainable for param in params.values()):
        raise CaptureError(f"{name} has no trainable parameter; set requires_grad on some")


def _lifted(x: Tensor, precision: str) -> str:
    return dtype_name(widened(x.dtype) if precision == "fp64" else x.dtype)


def _batch_dims(tensors: dict[str, Tensor], given: dict[str, int | None]) -> tuple[int, dict[str, int | None]]:
    unknown = set(given) - set(tensors)
    if unknown:
        raise CaptureError(f"batch_dims names {sorted(unknown)}, but the inputs are {sorted(tensors)}")
    dims: dict[str, int | None] = {}
    size: int | None = None
    for name, x in tensors.items():
        dim = given.get(name, 0 if x.dim() else None)
        if name not in given and dim == 0 and size is not None and x.shape[0] != size:
            if x.shape[0] != 1:
                raise CaptureError(
                    f"input {name!r} has {x.shape[0]} rows where others have {size}; say "
                    f"batch_dims={{{name!r}: None}} if every microbatch gets it whole"
                )
            dim = None
        if dim is not None:
            if isinstance(dim, bool) or not isinstance(dim, int) or not 0 <= dim < x.dim():
                raise CaptureError(
                    f"batch_dims={{{name!r}: {dim!r}}}: the input has shape {tuple(x.shape)}; give a dim of it, "
                    "counted from 0, or None if every microbatch gets it whole"
                )
            if size is not None and x.shape[dim] != size:
                raise CaptureError(f"input {name!r} has size {x.shape[dim]} in its batch dim {dim}, others have {size}")
            if not x.shape[dim]:
                raise CaptureError(f"input {name!r} has no rows: its shape is {tuple(x.shape)}; give a batch with some")
            size = x.shape[dim]
        dims[name] = dim
    if size is None:
        raise CaptureError("no input has a batch dim; name one in batch_dims")
    return size, dims


def _tensors_of(model: nn.Module, precision: str) -> tuple[dict[str, ParamSpec], dict[str, TensorSpec], dict[str, str]]:
    """Parameters under their first names, buffers, and the first name of every parameter name."""
    first: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    firsts: dict[str, str] = {}
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(param), name)
        firsts[name] = owner
        found[owner] = param
        aliases.setdefault(owner, []).extend([name] if name != owner else [])

    def lifted(x: Tensor) -> TensorSpec:
        return TensorSpec(dtype=_lifted(x, precision), shape=tuple(x.shape))

    params = {
        name: ParamSpec(spec=lifted(x), trainable=x.requires_grad, aliases=tuple(aliases[name]))
        for name, x in found.items()
    }
    return params, {name: lifted(x) for name, x in model.named_buffers()}, firsts


def _rewrite(
    exported: Exported, params: dict[str, ParamSpec], first_names: dict[str, str], precision: str, mode: FakeTensorMode
) -> tuple[ForwardGraph, list[LossFraction], dict[str, fx.Node]]:
    graph, names, constants, updates = exported[:4]
    rewriter = Rewriter(graph, mode)
    join_ties(names, first_names)
    clean(graph)
    if precision == "fp64":
        constants = lift_to_float64(graph, rewriter, constants)
        clean(graph)
    substitute(graph, rewriter, precision)
    roll_loops(graph, rewriter)
    simplify_masks(graph, names, constants, rewriter)
    if precision == "fp8":
        convert_linears(graph, names, rewriter)

    def trainable(name: str) -> bool:
        return params[name].trainable

    found = flows(graph, names, trainable)
    drop_idle_detach(graph, {node for node, flow in found.items() if flow.carries}, set(updates.values()))
    found = flows(graph, names, trainable)
    results: Sequence[fx.Node] = graph.output_node().args[0]  # type: ignore[assignment]
    widest = reduce(torch.promote_types, (value_of(loss).dtype for loss in results[: len(exported.losses)]))
    terms: list[LossFraction] = []
    for loss, (name, weight) in zip(results, exported.losses, strict=False):
        if not found[loss].carries:
            which = f"the loss {name!r}" if name else "the loss"
            raise CaptureError(
                f"{which} does not depend on any trainable parameter (detached, or computed under no_grad)"
            )
        terms += loss_terms(loss, found, rewriter, widest, name, weight)
    terms = alike(terms, found, rewriter)
    first = len(exported.losses)
    extra = [plain(node) for node in results[first : first + len(exported.outputs)]]
    end_in(graph, [*ends_of(terms), *updates.values(), *extra])
    terms = own_numerators(terms, {*updates.values(), *extra}, found, rewriter)
    ends = [*ends_of(terms), *updates.values()]
    end_in(graph, [*ends, *extra])
    idle = asides_of(graph, ends)
    extra = list(graph.output_node().args[0][len(ends) :])  # type: ignore[index]
    roots = tuple(dict.fromkeys((*(term.numerator for term in terms), *updates.values())))
    refuse_numbers(graph)
    numerators = frozenset(term.numerator for term in terms)
    forward = ForwardGraph(graph, names, constants, found, roots, idle, numerators)
    return forward, terms, dict(zip(exported.outputs, extra, strict=True))


def _segment(
    forward: ForwardGraph, mode: FakeTensorMode, read: Iterable[fx.Node], tail: frozenset[fx.Node]
) -> tuple[list[SegmentKind], list[Segment], dict[fx.Node, str]]:
    """Kinds, segment instances, and the names of their outputs and asides; `read` are values some output reads."""
    pieces = [make_piece(forward, main) for main in cut(forward, tail)]
    keys = [signature(forward, piece) for piece in pieces]
    exposed: dict[str, dict[int, None]] = {key: {} for key in keys}
    for node in read:
        for piece, key in zip(pieces, keys, strict=True):
            if node in piece.nodes and node not in piece.outputs:
                exposed[key][piece.nodes.index(node)] = None
    kinds: list[SegmentKind] = []
    index_of: dict[str, int] = {}
    kept: list[tuple[int, ...]] = []
    values: dict[fx.Node, str] = {}
    segments: list[Segment] = []
    for number, (piece, key) in enumerate(zip(pieces, keys, strict=True)):
        if key not in index_of:
            index_of[key] = len(kinds)
            asides = [piece.nodes[position] for position in exposed[key]]
            kind, given = make_kind(f"k{len(kinds)}", forward, piece, mode, asides)
            kinds.append(kind)
            kept.append(tuple(piece.nodes.index(node) for node in given))
        for position, node in enumerate(piece.outputs):
            values[node] = f"s{number}.{position}"
        aside_nodes = [piece.nodes[position] for position in kept[index_of[key]]]
        values |= {node: f"s{number}+{position}" for position, node in enumerate(aside_nodes)}
        segments.append(
            Segment(
                kind=index_of[key],
                params=tuple(forward.names[node].split(":", 1)[1] for node in piece.params),
                inputs=tuple(values[node] if node in values else forward.names[node] for node in piece.inputs),
                outputs=tuple(values[node] for node in piece.outputs),
                asides=tuple(values[node] for node in aside_nodes),
                seeds=(number,) * len(kinds[index_of[key]].seeds),
            )
        )
    return kinds, segments, values


def _loss(
    forward: ForwardGraph, terms: Sequence[LossFraction], values: Mapping[fx.Node, str], mode: FakeTensorMode
) -> tuple[list[Denominator], list[LossTerm]]:
    """The loss' terms by the program's names, and the counts they divide by, each once."""
    denominators: list[Denominator] = []
    indices: dict[fx.Node, int] = {}
    loss = []
    for term in terms:
        index: int | None = None
        if term.denominator is not None:
            if term.denominator not in indices:
                indices[term.denominator] = len(denominators)
                denominators.append(make_denominator(forward, closure(forward, term.denominator), mode))
            index = indices[term.denominator]
        loss.append(LossTerm(numerator=values[term.numerator], denominator=index, name=term.name, weight=term.weight))
    return denominators, loss
