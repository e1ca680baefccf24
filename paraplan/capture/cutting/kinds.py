"""One `SegmentKind` per kind of piece, and the denominators of the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import fx

from paraplan.capture.convert import OpCollector, finish, write_constant
from paraplan.capture.cutting.segments import ForwardGraph, Piece
from paraplan.capture.exporting.user_functions import has_own_backward
from paraplan.capture.joint_graph import LABEL, line_of_node, trace_forward, trace_joint
from paraplan.capture.rewriting.complex_forms import COMPLEX_FORMS
from paraplan.capture.rewriting.index_forms import INDEX_FORMS
from paraplan.capture.rewriting.joined_grads import join_slices
from paraplan.capture.rewriting.norm_forms import NORM_FORMS
from paraplan.capture.rewriting.normal_forms import FORMS
from paraplan.capture.rewriting.own_storage import own_results
from paraplan.capture.rewriting.vision_forms import VISION_FORMS
from paraplan.capture.source_lines import line_of_stack
from paraplan.ir.errors import CaptureError
from paraplan.ir.model.graph import Graph
from paraplan.ir.model.program import Denominator, Output, SegmentKind
from paraplan.kernels.torch_private import FakeTensorMode

ALL_FORMS = {**FORMS, **COMPLEX_FORMS, **INDEX_FORMS, **NORM_FORMS, **VISION_FORMS}


def make_kind(
    name: str, forward: ForwardGraph, piece: Piece, mode: FakeTensorMode, asides: Sequence[fx.Node] = ()
) -> tuple[SegmentKind, tuple[fx.Node, ...]]:
    """Traces a piece and writes it down.

    An aside that is no value of the training graph once it is written down (its op was written as another) is left
    out, so that a training step never pays for one.

    Args:
        name: of the kind.
        forward: the whole forward graph.
        piece: any of its instances.
        mode: the fake mode its values live in.
        asides: nodes of the piece that auxiliary outputs read.
    Returns:
        The kind, and the asides it has.
    """
    joint = trace_joint(forward, piece, mode, asides)
    writer = OpCollector(ALL_FORMS)
    places = (node for node in joint.graph.nodes if node.op == "placeholder")
    params = [writer.add_input(next(places), f"p{index}") for index in range(len(piece.params))]
    inputs = [writer.add_input(next(places), f"x{index}") for index in range(len(piece.inputs))]
    _write_constants(writer, places, forward, piece)
    seed = writer.add_input(next(places), "seed") if joint.random else None
    tangents = [
        writer.add_input(next(places), f"g{index}") if want else None for index, want in enumerate(joint.tangents)
    ]
    results = write_body(writer, joint.graph)
    outputs = [_plain(writer, next(results)) for _ in piece.outputs]
    aside_names = [_plain(writer, next(results)) for _ in asides]
    param_grads = [_grad(writer, next(results)) if want else None for want in joint.param_grads]
    input_grads = [_grad(writer, next(results)) if want else None for want in joint.input_grads]
    outside = [*params, *inputs, *([seed] if seed else []), *(t for t in tangents if t)]
    written = join_slices(finish(writer, outside, [*outputs, *param_grads, *input_grads]))
    own = [node in forward.numerators or name in params for node, name in zip(piece.outputs, outputs, strict=True)]
    graph = own_results(written, own)
    kept = {node: local for node, local in zip(asides, aside_names, strict=True) if local in graph.values}
    kind = SegmentKind(
        name=name,
        graph=graph,
        params=tuple(params),
        inputs=tuple(inputs),
        seeds=() if seed is None else (seed,),
        outputs=tuple(str(name) for name in graph.outputs[: len(outputs)]),
        tangents=tuple(tangents),
        input_grads=tuple(input_grads),
        param_grads=tuple(param_grads),
        asides=tuple(kept.values()),
        own_backward=any(map(has_own_backward, piece.nodes)),
    )
    return kind, tuple(kept)


def make_denominator(forward: ForwardGraph, piece: Piece, mode: FakeTensorMode) -> Denominator:
    """A count of the batch as a graph of its own.

    Args:
        forward: the whole forward.
        piece: of it.
        mode: under which tensors have no data.
    """
    names = tuple(forward.names[node] for node in piece.inputs)
    return Denominator(graph=_forward_graph(forward, piece, mode), inputs=names)


def make_whole(forward: ForwardGraph, piece: Piece, mode: FakeTensorMode) -> Denominator:
    """The forward alone of a piece, each op under the name of the node it comes from; parameters, then inputs.

    Args:
        forward, piece, mode: as of `make_denominator`.
    """
    graph = _forward_graph(forward, piece, mode, str)
    return Denominator(graph=graph, inputs=tuple(map(str, (*piece.params, *piece.inputs))))


def make_output(forward: ForwardGraph, piece: Piece, names: Sequence[str], mode: FakeTensorMode) -> Output:
    """An auxiliary output as a graph of its own.

    Args:
        forward, piece, mode: as of `make_denominator`.
        names: the program's, of the piece's parameters, then inputs.
    """
    return Output(graph=_forward_graph(forward, piece, mode), inputs=tuple(names))


def _forward_graph(
    forward: ForwardGraph, piece: Piece, mode: FakeTensorMode, source_of: Callable[[fx.Node], str] = line_of_node
) -> Graph:
    """The forward alone of a piece; its inputs are the piece's parameters and inputs, and the seed where it is read."""
    graph = trace_forward(piece, mode, source_of)
    writer = OpCollector(ALL_FORMS)
    places = (node for node in graph.nodes if node.op == "placeholder")
    inputs = [writer.add_input(next(places), f"x{index}") for index in range(len(piece.params) + len(piece.inputs))]
    _write_constants(writer, places, forward, piece)
    seed = writer.add_input(next(places), "seed")
    outputs = [_plain(writer, node) for node in write_body(writer, graph)]
    found = finish(writer, inputs, outputs)
    return found if not any(seed in op.tensors for op in found.ops) else finish(writer, [*inputs, seed], outputs)


def _write_constants(writer: OpCollector, places: Iterator[fx.Node], forward: ForwardGraph, piece: Piece) -> None:
    for node in piece.constants:
        reader = next((user for user in piece.nodes if node in user.all_input_nodes), None)
        source = line_of_stack(reader.meta.get("stack_trace")) if reader is not None else ""
        write_constant(writer, next(places), forward.constants[forward.names[node].split(":", 1)[1]], source)


def write_body(writer: OpCollector, graph: fx.Graph) -> Iterator[object]:
    """Writes all calls; yields the results.

    Raises:
        CaptureError: a call reads a tensor from elsewhere.
    """
    source = ""
    for node in graph.nodes:
        source = node.meta.get(LABEL, ("", source))[1]
        if node.op == "call_function":
            writer.visit(node)
        elif node.op == "get_attr" and node.users:
            raise CaptureError(
                f"{source or 'forward'}: a function of autograd reads a tensor that is none of its arguments (made of "
                "numbers, or held by an object); pass it to apply, or compute with the number"
            )
    results: Sequence[object] = graph.output_node().args[0]  # type: ignore[assignment]
    return iter(results)


def _plain(writer: OpCollector, node: object) -> str:
    return str(writer.ref(node))[1:]


def _grad(writer: OpCollector, node: object) -> str | None:
    return None if node is None else _plain(writer, node)
