"""Capture: an unmodified nn.Module -> `Program`.

fake copy -> export with its loss -> clean -> canonical ops -> cut -> one joint graph per kind. No weight is ever
allocated and no kernel runs, so a model on meta of any size is captured in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx, nn

from paraplan.ir.errors import CaptureError
from paraplan.ir.program import BatchInput, Denominator, LossTerm, ParamSpec, Program, Segment, SegmentKind
from paraplan.ir.tensor import TensorSpec
from paraplan.ir.trace.clean import clean, drop_idle_detach
from paraplan.ir.trace.convert import spec_of
from paraplan.ir.trace.cut import cut
from paraplan.ir.trace.export import Exported, LossFn, export_loss
from paraplan.ir.trace.fake import fake_batch, fake_copy, name_inputs, traced_dtype
from paraplan.ir.trace.fingerprint import fingerprint
from paraplan.ir.trace.flow import flows
from paraplan.ir.trace.kinds import make_denominator, make_kind
from paraplan.ir.trace.masks import simplify_masks
from paraplan.ir.trace.precision import lift_to_float64
from paraplan.ir.trace.rewrite import Rewriter, remove_dead
from paraplan.ir.trace.segments import Forward, closure, make_piece, signature
from paraplan.ir.trace.substitute import substitute
from paraplan.ir.trace.tail import Term, loss_terms
from paraplan.ir.trace.torch_private import FakeTensorMode, fake_mode


def capture(
    model: nn.Module,
    example_inputs: dict[str, Tensor] | tuple[object, ...],
    *,
    loss_fn: LossFn | None = None,
    precision: str = "fp32",
    batch_dims: dict[str, int | None] | None = None,
    name: str | None = None,
) -> Program:
    """Captures a model's training step at one global batch.

    Args:
        model: on meta, fake or real; it is not modified. Trains or not as it is (`model.training`).
        example_inputs: one global batch, by forward's parameter names or in their order; only shapes matter.
        loss_fn: (model output, batch by name) -> scalar loss; left out where the model returns its loss.
        precision: "fp32", "fp64" (every float of the forward, casts included) or "bf16".
        batch_dims: the batch dim of each input, None for inputs equal on every microbatch; dim 0 by default.
        name: what to call the program.
    Raises:
        CaptureError: the model cannot be captured; names the user's line and the remedy.
    """
    traced_dtype(precision)
    tensors, others = name_inputs(model, example_inputs)
    batch_size, dims = _batch_dims(tensors, batch_dims or {})
    mode = fake_mode()
    copied = fake_copy(model, precision, mode)
    batch = fake_batch(tensors, precision, mode)
    exported = export_loss(copied, batch, not isinstance(example_inputs, dict), others, loss_fn, mode)
    params, buffers, first_names = _tensors_of(copied, precision)
    if not any(param.trainable for param in params.values()):
        raise CaptureError(f"{type(model).__name__} has no trainable parameter; set requires_grad on some")
    forward, terms = _rewrite(exported, params, first_names, precision, mode)
    kinds, segments = _segment(forward, mode)
    denominators, loss = _loss(forward, terms, segments, mode)
    inputs = {
        key: BatchInput(spec=TensorSpec(dtype=_lifted(x, precision), shape=tuple(x.shape)), batch_dim=dims[key])
        for key, x in batch.items()
    }
    return Program(
        name=name or type(model).__name__,
        fingerprint=fingerprint(model, precision),
        precision=precision,
        batch_size=batch_size,
        batch=inputs,
        params=params,
        buffers=buffers,
        kinds=tuple(kinds),
        segments=tuple(s for s, _ in segments),
        loss=tuple(loss),
        denominators=tuple(denominators),
    )


def _lifted(x: Tensor, precision: str) -> str:
    return "float64" if precision == "fp64" and x.is_floating_point() else spec_of(x).dtype


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
            if size is not None and x.shape[dim] != size:
                raise CaptureError(f"input {name!r} has size {x.shape[dim]} in its batch dim {dim}, others have {size}")
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
        name: ParamSpec(
            spec=lifted(x), trainable=x.requires_grad and x.is_floating_point(), aliases=tuple(aliases[name])
        )
        for name, x in found.items()
    }
    return params, {name: lifted(x) for name, x in model.named_buffers()}, firsts


def _rewrite(
    exported: Exported, params: dict[str, ParamSpec], first_names: dict[str, str], precision: str, mode: FakeTensorMode
) -> tuple[Forward, list[Term]]:
    graph, names, constants = exported
    rewriter = Rewriter(graph, mode)
    _join_ties(graph, names, first_names)
    clean(graph)
    if precision == "fp64":
        constants = lift_to_float64(graph, rewriter, constants)
        clean(graph)
    substitute(graph, rewriter)
    simplify_masks(graph, names, constants, rewriter)

    def trainable(name: str) -> bool:
        return params[name].trainable

    found = flows(graph, names, trainable)
    drop_idle_detach(graph, {node for node, flow in found.items() if flow.carries})
    found = flows(graph, names, trainable)
    loss = graph.output_node().args[0][0]  # type: ignore[index]
    assert isinstance(loss, fx.Node)
    if not found[loss].carries:
        raise CaptureError("the loss does not depend on any trainable parameter (detached, or computed under no_grad)")
    terms = loss_terms(loss, found, rewriter)
    ends = [term.numerator for term in terms] + [term.denominator for term in terms if term.denominator is not None]
    graph.output_node().args = (tuple(ends),)
    remove_dead(graph)
    return Forward(graph, names, constants, found, tuple(dict.fromkeys(term.numerator for term in terms))), terms


def _join_ties(graph: fx.Graph, names: dict[fx.Node, str], first_names: dict[str, str]) -> None:
    """All uses of a tied parameter go through its first name."""
    owners: dict[str, fx.Node] = {}
    for node, name in list(names.items()):
        kind, target = name.split(":", 1)
        if kind != "param":
            continue
        owner = owners.setdefault(first_names[target], node)
        names[node] = f"param:{first_names[target]}"
        if owner is not node:
            node.replace_all_uses_with(owner)


Placed = tuple[Segment, tuple[fx.Node, ...]]


def _segment(forward: Forward, mode: FakeTensorMode) -> tuple[list[SegmentKind], list[Placed]]:
    """Kinds, and segment instances with the nodes their outputs are."""
    kinds: list[SegmentKind] = []
    index_of: dict[str, int] = {}
    values: dict[fx.Node, str] = {}
    segments: list[Placed] = []
    for number, main in enumerate(cut(forward)):
        piece = make_piece(forward, main)
        key = signature(forward, piece)
        if key not in index_of:
            index_of[key] = len(kinds)
            kinds.append(make_kind(f"k{len(kinds)}", forward, piece, mode))
        for position, node in enumerate(piece.outputs):
            values[node] = f"s{number}.{position}"
        segment = Segment(
            kind=index_of[key],
            params=tuple(forward.names[node].split(":", 1)[1] for node in piece.params),
            inputs=tuple(values[node] if node in values else forward.names[node] for node in piece.inputs),
            outputs=tuple(values[node] for node in piece.outputs),
        )
        segments.append((segment, piece.outputs))
    return kinds, segments


def _loss(
    forward: Forward, terms: Sequence[Term], segments: Sequence[Placed], mode: FakeTensorMode
) -> tuple[list[Denominator], list[LossTerm]]:
    """The loss' terms by the program's names, and the counts they divide by, each once."""
    values = {node: name for segment, nodes in segments for node, name in zip(nodes, segment.outputs, strict=True)}
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
        loss.append(LossTerm(numerator=values[term.numerator], denominator=index))
    return denominators, loss
